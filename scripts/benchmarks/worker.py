"""One library on one workload, in a process of its own: asked through a pipe.

`python -m benchmarks.worker PEER WORKLOAD ...` answers in lines of JSON: first
what building it took, then for every number n on stdin the seconds of n runs,
and at the end the memory that was held at most.
"""

import importlib
import json
import os
import pickle
import resource
import sys
import time

PEERS = ("rnnlab", "torch", "linen", "haiku", "equinox")


def main(peer, spec, cores, kept):
  cores = [int(core) for core in cores.split(",")]
  os.sched_setaffinity(0, cores)
  from rnnlab import backend

  if kept == "kept":
    backend.keep_memory()
  module = _load(peer, len(cores))
  if module is None:
    return _say(missing=f"{peer} is not installed")
  before = _resident()
  work = pickle.loads(bytes.fromhex(spec))
  runner = module.build(work)
  if runner is None:
    return _say(missing=f"{peer} has no such cell")
  loss, grads = runner.result()
  _say(
    loss=loss,
    grads=pickle.dumps(grads).hex(),
    **runner.prepare()._asdict(),
  )
  for line in sys.stdin:
    began = time.perf_counter()
    runner.run(int(line))
    _say(seconds=time.perf_counter() - began)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
  _say(peak_bytes=peak - before)


def _load(peer, threads):
  try:
    module = importlib.import_module(f"benchmarks.{peer}_peer")
  except ModuleNotFoundError:
    return None
  if peer == "torch":
    import torch

    torch.set_num_threads(threads)
  else:
    import jax

    # A program from the cache would have taken no time to compile.
    jax.config.update("jax_enable_compilation_cache", False)
  return module


def _resident():
  with open("/proc/self/statm") as file:
    return int(file.read().split()[1]) * resource.getpagesize()


def _say(**answer):
  print(json.dumps(answer), file=OUT, flush=True)


if __name__ == "__main__":
  # What a library prints must not be taken for an answer.
  OUT = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)
  main(*sys.argv[1:])
