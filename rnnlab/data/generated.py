"""Examples drawn from a seed: training without end, and two fixed sets."""

import hashlib
import itertools

import numpy as np

from rnnlab.data.batching import check_seed, check_size

# Each is a stream of its own; "shown" is for samples, and no set holds them.
STREAMS = {"train": 0, "validation": 1, "test": 2, "shown": 3}


def rng(seed: int, stream: str, i: int = 0) -> np.random.Generator:
  """The generator of batch i of a stream: a function of the three alone."""
  # Always three numbers, since (seed,) and (seed, 0) would be one stream.
  return np.random.default_rng((seed, STREAMS[stream], i))


def of_task(
  draw, *, seed, batch_size, eval_batch_size, validation, test, facts
) -> dict:
  """The fields of a `Task` whose examples are drawn by `draw(rng, n)`.

  draw returns a dict of arrays with n rows. Batches are such dicts with
  `example_B`, which is False for the rows that fill up a set's last batch. Axis
  1 of what is named `_BT` or `_BTD` is time: extra padding goes there.
  validation, test: the sizes of the sets. facts: what is recorded besides the
  sizes and the digest of both sets. Raises ValueError by name.
  """
  sizes = {"validation": validation, "test": test}
  named = {"batch_size": batch_size, "eval_batch_size": eval_batch_size}
  check_seed("task.seed", seed)
  for name, size in (named | sizes).items():
    check_size(f"task.{name}", size)
  sets = {name: draw(rng(seed, name), n) for name, n in sizes.items()}
  digest = hashlib.sha256()
  for rows in sets.values():
    for array in rows.values():
      digest.update(array.tobytes())

  def train_batches(start):
    for i in itertools.count(start):
      yield _batch(draw(rng(seed, "train", i), batch_size), batch_size)

  def eval_batches(split, size=None, extra=0, first=None):
    """extra: columns of zeros behind the last step. first: so many examples."""
    size = size or eval_batch_size
    for i in range(0, min(sizes[split], first or sizes[split]), size):
      cut = slice(i, i + size if first is None else min(i + size, first))
      part = {name: array[cut] for name, array in sets[split].items()}
      yield _batch(part, size, extra)

  return {
    "facts": facts | sizes | {"sha256": digest.hexdigest()},
    "texts": {name: range(n) for name, n in sizes.items()},
    "train_batches": train_batches,
    "eval_batches": eval_batches,
  }


def _batch(rows, size, extra=0):
  """Rows as a batch of `size` rows, with `extra` columns more."""
  batch = {}
  for name, array in rows.items():
    wider = [(0, size - len(array))] + [(0, 0)] * (array.ndim - 1)
    if name.rsplit("_", 1)[-1] in ("BT", "BTD"):
      wider[1] = (0, extra)
    batch[name] = np.pad(array, wider)
  return batch | {"example_B": np.arange(size) < len(array)}
