"""Streams: a long text in rows, so that row b of a batch continues the last.

  text      a b c d e f g h i j k l m n o p q r s t u v w x y z
  batch 0   a b c d -> b c d e      m n o p -> n o p q
  batch 1   e f g h -> f g h i      q r s t -> r s t u
  batch 2   i j k l -> j k l m      u v w x -> v w x y

Every target is the true next character, at the end of a window too. A row
never starts inside the part of another row.
"""

import bisect

import numpy as np

from rnnlab.data import batching


def windows(n: int, batch: int, steps: int) -> int:
  """How many batches an epoch of n characters has; ValueError for none."""
  found = (n - 1) // (batch * steps)
  if found < 1:
    raise ValueError(
      f"the training text has {n} characters; a batch of task.batch_size="
      f"{batch} rows of {steps} steps needs {batch * steps + 1}"
    )
  return found


def dropped(n: int, batch: int, steps: int) -> int:
  """How many characters at the end of the text are never read in training."""
  return n - windows(n, batch, steps) * batch * steps


def train_batch(
  tokens_N, starts, batch, steps, i, *, carried=True, seed=None
) -> dict:
  """Batch i of all epochs: inputs, targets, what is predicted, what is reset.

  starts: where documents start. Their first characters are read and not
  predicted (`mask_BT`), and the state is reset before them (`reset_BT`), as it
  is at the start of an epoch and, unless it is `carried`, of every window.
  seed: windows in random order, every epoch in another; only where nothing is
  carried.
  """
  count = windows(len(tokens_N), batch, steps)
  epoch, k = divmod(i, count)
  places = np.arange(batch) * count + k
  if seed is not None:
    places = batching.batch_indices(count * batch, batch, seed, i)
  rows = [(p * steps, p * steps + steps) for p in places]
  found = _read(tokens_N, starts, rows, steps)
  del found["real_BT"]  # all of it is
  if k == 0 or not carried:
    found["reset_BT"][:, 0] = True
  return found


def eval_batches(tokens_N, starts, batch, steps, extra=0):
  """All of a text once, each document in one row and from a fresh state.

  So what is predicted from what depends on no size here. batch: rows, None for
  as many as the longest document keeps busy. steps: of one batch at most.
  `real_BT` is False where a row is past its end. extra: columns of padding
  more.
  """
  ends = np.append(starts[1:], len(tokens_N))
  longest = int(np.max(ends - starts))
  batch = batch or -(-len(tokens_N) // longest)
  rows = _share(starts, ends, batch)
  rows += [(len(tokens_N), len(tokens_N))] * (batch - len(rows))
  # The last character of a row is never an input.
  last = max(max(end - first for first, end in rows) - 1, 1)
  steps = min(steps, last)
  for at in range(0, last, steps):
    cut = [(min(first + at, end), end) for first, end in rows]
    found = _read(tokens_N, starts, cut, steps, extra)
    if at == 0:
      found["reset_BT"][:, 0] = True
    yield found


def _read(tokens_N, starts, rows, steps, extra=0):
  """A batch of rows (first, end): at most `steps` inputs, then one target."""
  shape = len(rows), steps + extra
  found = {
    "inputs_BT": np.zeros(shape, np.int32),
    "targets_BT": np.zeros(shape, np.int32),
    "mask_BT": np.zeros(shape, bool),
    "reset_BT": np.zeros(shape, bool),
    "real_BT": np.zeros(shape, bool),
  }
  for b, (first, end) in enumerate(rows):
    # One more, since the next row's first character may be the last target.
    read = np.asarray(tokens_N[first : min(first + steps, end) + 1], np.int32)
    n = min(len(read) - 1, steps) if len(read) else 0
    if n < 1:
      continue
    found["inputs_BT"][b, :n] = read[:n]
    found["targets_BT"][b, :n] = read[1:]
    found["real_BT"][b, :n] = found["mask_BT"][b, :n] = True
    low, high = np.searchsorted(starts, (first, first + n + 1))
    for start in starts[low:high] - first:
      if start < n:
        found["reset_BT"][b, start] = True
      if start > 0:
        found["mask_BT"][b, start - 1] = False
  return found


def _share(starts, ends, batch):
  """Cuts consecutive documents into at most `batch` rows, the longest short."""

  def rows(limit):
    cut = []
    for first, end in zip(starts.tolist(), ends.tolist(), strict=True):
      if cut and end - cut[-1][0] <= limit:
        cut[-1] = cut[-1][0], end
      else:
        cut.append((first, end))
    return cut

  low, high = int(np.max(ends - starts)), int(ends[-1])
  limits = range(low, high + 1)
  best = bisect.bisect_left(limits, -batch, key=lambda limit: -len(rows(limit)))
  return rows(limits[best])
