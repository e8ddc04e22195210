"""Interleaved timing of the same work in several libraries."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.worker import PEERS

SCRIPTS = Path(__file__).parents[1]


class How(NamedTuple):
  """cores: which to run on. kept: the libraries whose processes keep freed
  memory (`backend.keep_memory`). rounds: A B C then C B A is two. least:
  seconds a visit takes at least."""

  cores: tuple
  kept: tuple
  rounds: int
  least: float


class Worker:
  """A process that holds one library on one workload."""

  def __init__(self, peer, work, how):
    paths = [str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH")]
    self.process = subprocess.Popen(
      [
        sys.executable,
        *("-m", "benchmarks.worker", peer, pickle.dumps(work).hex()),
        ",".join(map(str, how.cores)),
        "kept" if peer in how.kept else "system",
      ],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
      # A thread pool that spins while it waits would slow the others down.
      env=os.environ
      | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_WAIT_POLICY": "PASSIVE",
        "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", ""),
      },
    )
    self.built = self._answer()

  def run(self, n):
    """Seconds for n runs."""
    print(n, file=self.process.stdin, flush=True)
    return self._answer()["seconds"]

  def close(self):
    """Ends it; the bytes that it held at most, beyond the library itself."""
    self.process.stdin.close()
    peak = None if "missing" in self.built else self._answer()["peak_bytes"]
    self.process.wait()
    return peak

  def _answer(self):
    line = self.process.stdout.readline()
    if not line:
      raise RuntimeError(f"a worker ended: {' '.join(self.process.args[2:5])}")
    return json.loads(line)


def compare(work, how, peers=PEERS, tolerance=1e-4, say=print) -> dict:
  """Times a workload in all peers that can do it: {peer: figures}.

  Raises ValueError with both values where a peer's loss or a gradient differs
  from rnnlab's by more than the tolerance, relative to its largest element.
  """
  workers, skipped = {}, {}
  try:
    for peer in peers:
      worker = Worker(peer, work, how)
      if "missing" in worker.built:
        skipped[peer] = worker.built["missing"]
        worker.close()
        continue
      workers[peer] = worker
    ours = workers["rnnlab"].built
    for peer, worker in workers.items():
      _check(peer, worker.built, ours, tolerance)
    seconds = _interleaved(workers, work, how)
    peaks = {peer: worker.close() for peer, worker in workers.items()}
  finally:
    for worker in workers.values():
      worker.process.kill()
  for why in skipped.values():
    say(f"  {why}")
  return {
    peer: {
      "seconds": float(np.median(each)),
      "quartiles": [float(q) for q in np.quantile(each, (0.25, 0.75))],
      "least": float(np.min(each)),
      "peak_bytes": peaks[peer],
      "compile_seconds": workers[peer].built["compile_seconds"],
      "temporary_bytes": workers[peer].built["temporary_bytes"],
      "note": workers[peer].built["note"],
    }
    for peer, each in seconds.items()
  }


def _interleaved(workers, work, how):
  """Seconds a run, visit by visit."""
  counts = {}
  for peer, worker in workers.items():
    worker.run(work.per_call)  # the first is slow everywhere
    once = worker.run(work.per_call) / work.per_call
    calls = max(1, round(how.least / once / work.per_call))
    counts[peer] = calls * work.per_call
  seconds = {peer: [] for peer in workers}
  for i in range(how.rounds):
    order = list(workers) if i % 2 == 0 else list(workers)[::-1]
    for peer in order:
      took = workers[peer].run(counts[peer])
      seconds[peer].append(took / counts[peer])
  return seconds


def _check(peer, built, ours, tolerance):
  pairs = [("loss", built["loss"], ours["loss"])]
  theirs = pickle.loads(bytes.fromhex(built["grads"]))
  own = pickle.loads(bytes.fromhex(ours["grads"]))
  pairs += [(name, grad, own[name]) for name, grad in theirs.items()]
  for name, a, b in pairs:
    a, b = np.asarray(a, float), np.asarray(b, float)
    difference = np.max(np.abs(a - b)) / np.max(np.abs(b))
    if not difference <= tolerance:
      raise ValueError(
        f"{peer} and rnnlab do not compute the same: {name} differs by "
        f"{difference:.1e}, relative to its largest element"
      )
