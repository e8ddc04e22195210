"""Training batches, K at a time, on the devices."""

from concurrent import futures

import jax
import numpy as np

from rnnlab import parallel

NO_END = 2**31 - 1


class Feed:
  """Prepares what a compiled call reads, once for all the runs that ask.

  K: updates a call. end: the number of updates that ends the run, or None.
  """

  def __init__(self, task, mesh, K, end):
    self._task, self._mesh, self._K, self._end = task, mesh, K, end
    self._batches, self._position, self._ahead = None, None, []
    self._thread, self._next = futures.ThreadPoolExecutor(1), (None, None)

  def at(self, step: int):
    """(stop, batches_K) of the call that begins there; None at the end.

    K updates, or fewer up to a multiple of K, the end or another shape.
    """
    self.soon(step)
    return self._next[1].result()

  def soon(self, step: int) -> None:
    """Prepares, in a thread of its own, what `at` will be asked for."""
    if self._next[0] != step:
      self._next = step, self._thread.submit(self._prepare, step)

  def _prepare(self, step):
    stop = min(self._end or NO_END, (step // self._K + 1) * self._K)
    if step >= stop:
      return None
    if step != self._position:
      self._batches, self._ahead = self._task.train_batches(step), []
    batches = self._take(stop - step)
    stop = self._position = step + len(batches)
    # Past `stop` any batch will do: no update reads it.
    batches += batches[-1:] * (self._K - len(batches))
    batches_K = jax.tree.map(lambda *rows: np.stack(rows), *batches)
    return stop, parallel.split(self._mesh, batches_K, axis=1)

  def _take(self, n):
    """The next batches, n at most, all of one shape."""
    taken = []
    while len(taken) < n:
      batch = self._ahead.pop() if self._ahead else next(self._batches)
      if taken and _shapes(batch) != _shapes(taken[0]):
        self._ahead.append(batch)
        break
      taken.append(batch)
    return taken


def _shapes(batch):
  return jax.tree.map(np.shape, batch)
