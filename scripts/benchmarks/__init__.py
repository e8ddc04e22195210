"""The workloads of `scripts/benchmark.py`, and how every library does them."""
