"""What matrix products can do on this machine, and how many a row needs."""

import numpy as np

from benchmarks import timing
from benchmarks.workloads import GATES, Workload

# Rows, depth and columns: a step's products and those over all steps.
SHAPES = ((1024, 256, 64), (2048, 512, 32), (1024, 8192, 256), (1024,) * 3)


class Products:
  """A few products in XLA, ready to be timed whenever it is asked for."""

  def __init__(self, how):
    self._workers = {
      shape: timing.Worker("product", shape, how) for shape in SHAPES
    }

  def gflops(self) -> float:
    """GFLOP/s of the best of them, now: a machine's clock comes and goes."""
    return max(map(self._rate, self._workers))

  def _rate(self, shape):
    worker = self._workers[shape]
    worker.run(1)
    n = max(1, int(0.1 / worker.run(1)))
    seconds = np.median([worker.run(n) / n for _ in range(7)])
    return float(2 * np.prod(shape) / seconds / 1e9)

  def close(self):
    for worker in self._workers.values():
      worker.close()


def flops(work: Workload) -> int:
  """Of the matrix products that rnnlab computes: additions counted too.

  The projected table's products (V rows instead of B T) are counted as such.
  """
  B, T, H, V = work.batch, work.steps, work.hidden, work.vocab
  G = GATES[work.cell] * H
  S = work.source or 0
  # Every product of a step of training is done three times: once forward, for
  # the gradient of either side once.
  passes = 3 if work.kind == "train" else 1
  steps = B * (T + S)
  state = 2 * G * H * steps * work.layers
  below = 2 * G * H * steps * (work.layers - 1)
  table = 2 * G * work.embed * V * (2 if S else 1)
  attention = 2 * 2 * B * T * S * H
  readout = 2 * V * H * (2 if S else 1) * B * T
  again = state if work.chunk else 0
  return passes * (state + below + table + attention + readout) + again
