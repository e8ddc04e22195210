r"""Times rnnlab beside PyTorch, Flax, Haiku and Equinox, on the same work.

Every library runs in a process of its own, in turns (A B C C B A); before that
the losses and gradients of all are compared. `pip install '.[peers]'` brings
the others; those that are missing are left out.

Examples:
  python scripts/benchmark.py --pin --json=benchmark.json
  python scripts/benchmark.py --pin --quick --only=W1,W4
  python scripts/benchmark.py --pin --growth
"""

import contextlib
import json
import math
import os
import pathlib
import platform
from importlib import metadata

import numpy as np
from absl import flags
from benchmarks import growth, members, peak, timing, workloads
from benchmarks.worker import PEERS

from rnnlab import cli, rundir

PIN = flags.DEFINE_bool(
  "pin", False, "One core alone, for all libraries; W9 has all cores."
)
ONLY = flags.DEFINE_list("only", None, "Workloads by name: W1,W4.")
PEER = flags.DEFINE_list("peers", list(PEERS[1:]), "The libraries beside ours.")
JSON = flags.DEFINE_string("json", None, "A file for all figures.")
QUICK = flags.DEFINE_bool("quick", False, "Fewer and shorter rounds.")
GROWTH = flags.DEFINE_bool(
  "growth", False, "Instead: the cost against T, B and H, and its exponent."
)
MEMORY = flags.DEFINE_enum(
  "memory",
  "own",
  ["own", "kept", "system"],
  "Freed memory stays with the process: own: in rnnlab's, as its commands do; "
  "kept: in all; system: in none.",
)
SWEEP = "W9"
# The rows of the geometric mean, one step a call.
MEAN = ("W1", "W2", "W3", "W4", "W5", "W6", "W8")


def main():
  known = [*workloads.WORKLOADS, SWEEP]
  names = ONLY.value or known
  if odd := sorted(set(names) - set(known)):
    raise ValueError(f"--only={odd[0]} is no workload: {', '.join(known)}")
  peers = ("rnnlab", *PEER.value)
  if odd := sorted(set(peers) - set(PEERS)):
    raise ValueError(f"--peers={odd[0]} is none of {', '.join(PEERS[1:])}")
  cores = sorted(os.sched_getaffinity(0))
  how = timing.How(
    cores=tuple(cores[:1] if PIN.value else cores),
    kept={"own": ("rnnlab",), "kept": PEERS, "system": ()}[MEMORY.value],
    rounds=4 if QUICK.value else 10,
    least=0.1 if QUICK.value else 0.4,
  )
  record = {
    "machine": {"processor": _processor(), "cores": len(how.cores)},
    "versions": _versions(),
    "memory": MEMORY.value,
  }
  if GROWTH.value:
    record["growth"] = growth.measure(how, peers, cli.say)
  else:
    record |= _rows([n for n in names if n != SWEEP], how, peers)
    if SWEEP in names:
      _keep(record)  # the sweep takes minutes, and may be stopped
      record["workloads"][SWEEP] = members.measure(how, cli.say)
  _keep(record)
  return record


def _keep(record):
  if JSON.value:
    path = pathlib.Path(JSON.value)
    rundir.write_whole(path, json.dumps(record, indent=1) + "\n")
    cli.say(f"wrote {path}")


def _rows(names, how, peers):
  rows, products = {}, peak.Products(how)
  before = products.gflops()
  for name in names:
    work = workloads.WORKLOADS[name]
    found = timing.compare(work, how, peers, say=cli.say)
    rows[name] = row = {"title": work.title, "libraries": found}
    ours = found["rnnlab"]["seconds"]
    others = {p: f["seconds"] for p, f in found.items() if p != "rnnlab"}
    row["ratio"] = {p: ours / seconds for p, seconds in others.items()}
    after = products.gflops()
    row["peak_gflops"] = (before + after) / 2
    row["of_peak"] = peak.flops(work) / ours / row["peak_gflops"] / 1e9
    before = after
    cli.say(*_lines(name, row))
  products.close()
  ratios = [rows[n]["ratio"].get("torch") for n in MEAN if n in rows]
  mean = None
  if len(ratios) == len(MEAN) and None not in ratios:
    mean = math.exp(np.mean(np.log(ratios)))
    cli.say(f"geometric mean of {', '.join(MEAN)} to torch: {mean:.3f}")
  return {"workloads": rows, "geometric_mean": mean}


def _lines(name, row):
  """One line a workload, and one a library under it."""
  found, ratio = row["libraries"], row["ratio"]
  fastest = max(ratio, key=ratio.get) if ratio else None
  lines = [
    f"{name}  {row['title']}: "
    + (f"{ratio[fastest]:.2f} of {fastest}, " if fastest else "")
    + f"{100 * row['of_peak']:.0f} % of {row['peak_gflops']:.0f} GFLOP/s"
  ]
  for peer, figures in found.items():
    low, high = figures["quartiles"]
    held = figures["temporary_bytes"]
    lines.append(
      f"    {peer:8}{1e3 * figures['seconds']:10.2f} ms "
      f"({1e3 * low:.2f} .. {1e3 * high:.2f})"
      + (f"  x {ratio[peer]:.2f}" if peer in ratio else " " * 8)
      + f"  compile {figures['compile_seconds']:.1f} s"
      + (f"  temporary {held / 2**20:.0f} MiB" if held else "")
      + f"  peak {figures['peak_bytes'] / 2**20:.0f} MiB  {figures['note']}"
    )
  return lines


def _versions():
  found = {"python": platform.python_version()}
  for package in ("jax", "flax", "torch", "dm-haiku", "equinox"):
    with contextlib.suppress(metadata.PackageNotFoundError):
      found[package] = metadata.version(package)
  return found


def _processor():
  with open("/proc/cpuinfo") as file:
    lines = [line for line in file if line.startswith("model name")]
  return lines[0].split(":")[1].strip() if lines else platform.machine()


if __name__ == "__main__":
  cli.run(main)
