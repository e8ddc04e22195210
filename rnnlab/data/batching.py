"""Batches of one fixed shape, each a function of (seed, batch number) alone.

All sequences are padded once into a table; a batch is a few of its rows.
Shuffling permutes rows, never time steps.
"""

import functools
import itertools
import numbers
from collections.abc import Sequence

import numpy as np

from rnnlab.data.vocabulary import check_ids


def check_seed(name: str, value) -> int:
  """Returns a seed in [0, 2**32) as an int; ValueError with its name if not.

  Beyond that range seeds would meet: jax takes 2**32 for 0.
  """
  integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
  if not integer or not 0 <= value < 2**32:
    raise ValueError(
      f"{name} is {value!r}, needed is an integer with 0 <= {name} < 2**32"
    )
  return int(value)


def check_size(name: str, value: int) -> None:
  """Refuses by name a batch without a row."""
  if value < 1:
    raise ValueError(f"{name} must be at least 1, not {value}")


def padded(
  sequences: Sequence[Sequence[int]],
  length: int,
  pad: int,
  size_B: int,
  vocab_size: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns tokens_BT int32 and mask_BT, True where a sequence stands.

  Rows past the last sequence are padding throughout. ValueError for too many
  sequences, one longer than `length`, or ids (`pad` too) outside [0, V).
  """
  if len(sequences) > size_B:
    raise ValueError(f"{len(sequences)} sequences for {size_B} rows")
  lengths_B = np.zeros(size_B, np.int64)
  lengths_B[: len(sequences)] = [len(sequence) for sequence in sequences]
  if lengths_B.max(initial=0) > length:
    row = int(np.argmax(lengths_B > length))
    raise ValueError(
      f"sequence {row} (from 0) has length {lengths_B[row]}, the limit is "
      f"{length}"
    )
  # An empty list has no integer type of its own.
  arrays = [np.asarray(sequence) for sequence in sequences if len(sequence)]
  for dtype in {array.dtype for array in arrays}:
    check_ids(np.zeros((0, 0), dtype), vocab_size, "sequences")
  mask_BT = np.arange(length) < lengths_B[:, None]
  tokens_BT = np.full(mask_BT.shape, pad, np.int64)
  if arrays:
    tokens_BT[mask_BT] = np.concatenate(arrays)
  check_ids(tokens_BT, vocab_size, "sequences")
  return tokens_BT.astype(np.int32), mask_BT


def rows(
  tokens_NT: np.ndarray,
  mask_NT: np.ndarray,
  indices: np.ndarray,
  pad: int,
  size_B: int,
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the rows `indices` of a padded table, filled up to size_B rows.

  The rows that are missing are padding throughout, so that the short last
  batch of an epoch has the shape of all others.
  """
  n, (_, length) = len(indices), tokens_NT.shape
  if n > size_B:
    raise ValueError(f"{n} sequences for {size_B} rows")
  tokens_BT = np.full((size_B, length), pad, np.int32)
  mask_BT = np.zeros((size_B, length), bool)
  tokens_BT[:n] = tokens_NT[indices]
  mask_BT[:n] = mask_NT[indices]
  return tokens_BT, mask_BT


def steps_per_epoch(n: int, batch_size: int) -> int:
  """Returns the batches of an epoch; the last one may be short."""
  if n < 1 or batch_size < 1:
    raise ValueError(
      f"needed is at least 1 example and a batch of at least 1, found "
      f"{n} examples and batch_size {batch_size}"
    )
  return -(-n // batch_size)


@functools.lru_cache(maxsize=1, typed=True)  # True is not the seed 1
def epoch_order(n: int, seed: int, epoch: int) -> np.ndarray:
  """Returns the permutation of n examples in one epoch, read-only.

  Independent of the batch size. The last one asked for is kept, so the batches
  of an epoch cost one shuffle.
  """
  # Seeds fill one 32-bit word, so no two pairs (seed, epoch) share a stream.
  rng = np.random.default_rng((check_seed("data seed", seed), epoch))
  order_N = rng.permutation(n)
  order_N.setflags(write=False)
  return order_N


def batch_indices(n: int, batch_size: int, seed: int, i: int) -> np.ndarray:
  """Returns the examples of batch i, counted from 0 over all epochs."""
  if i < 0:
    raise ValueError(f"batch {i}: batches count from 0")
  epoch, k = divmod(i, steps_per_epoch(n, batch_size))
  return epoch_order(n, seed, epoch)[k * batch_size : (k + 1) * batch_size]


def feeds(parts, batch, batch_size: int, eval_batch_size: int, seed: int):
  """`train_batches` and `eval_batches` of a task, of examples in a table.

  parts: {split: what is taken of each}, arrays; batch(rows, size, extra) makes
  a batch of `size` rows and `extra` columns of padding of some of them.
  """

  def train_batches(start):
    part = parts["train"]
    for i in itertools.count(start):
      rows = batch_indices(len(part), batch_size, seed, i)
      yield batch(part[rows], batch_size, 0)

  def eval_batches(split, size=None, extra=0, first=None):
    """extra: columns of padding beyond the longest. first: so many examples."""
    part, size = parts[split][:first], size or eval_batch_size
    for i in range(0, len(part), size):
      yield batch(part[i : i + size], size, extra)

  return train_batches, eval_batches
