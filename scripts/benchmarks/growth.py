"""How the cost of an LSTM's training step grows with T, B and H."""

import numpy as np

from benchmarks import timing, workloads

BASE = dict(cell="lstm", hidden=128, batch=16, steps=128)
AXES = {
  "T": ("steps", (64, 256, 1024, 4096)),
  "B": ("batch", (1, 4, 16, 64, 256)),
  "H": ("hidden", (64, 128, 256, 512, 1024)),
}


def measure(how, peers, say) -> dict:
  """{axis: {"values", "seconds": {peer: [..]}, "exponent", "ahead_from"}}.

  exponent: of a power law through the larger half of the values. ahead_from:
  from which value on rnnlab is ahead of the fastest other library; None where
  it is behind at the largest.
  """
  how = how._replace(rounds=min(how.rounds, 4), least=0.1)
  return {axis: _along(axis, how, peers, say) for axis in AXES}


def _along(axis, how, peers, say):
  field, values = AXES[axis]
  seconds = {}
  for value in values:
    work = workloads.Workload("step", **BASE | {field: value})
    found = timing.compare(work, how, peers, say=lambda *lines: None)
    for peer, figures in found.items():
      seconds.setdefault(peer, []).append(figures["seconds"])
    each = (f"{p} {1e3 * f['seconds']:.2f} ms" for p, f in found.items())
    say(f"{axis} = {value}: " + ", ".join(each))
  larger = len(values) // 2
  exponent = {
    peer: float(
      np.polyfit(np.log(values[larger:]), np.log(each[larger:]), 1)[0]
    )
    for peer, each in seconds.items()
  }
  ahead = None
  if others := [each for peer, each in seconds.items() if peer != "rnnlab"]:
    behind = np.asarray(seconds["rnnlab"]) > np.min(others, axis=0)
    first = int(np.max(np.flatnonzero(behind), initial=-1)) + 1
    ahead = values[first] if first < len(values) else None
  say(
    f"{axis}: cost grows as {axis}^{exponent['rnnlab']:.2f} in rnnlab ("
    + ", ".join(f"{p} {e:.2f}" for p, e in exponent.items() if p != "rnnlab")
    + f"); ahead of all others from {axis} = {ahead}"
  )
  return {
    "values": values,
    "seconds": seconds,
    "exponent": exponent,
    "ahead_from": ahead,
  }
