"""Sources and targets: pairs from a file, or names reversed through noise."""

import dataclasses
import functools
import itertools

import numpy as np

from rnnlab.data import batching
from rnnlab.data.names import Names
from rnnlab.data.vocabulary import PAD, START_STOP, Vocabulary


@dataclasses.dataclass(frozen=True)
class Pairs:
  """Sources and targets in file order; `noisy` where noise is still to come."""

  sources: list[str]
  targets: list[str]
  noisy: bool


def of(listed: Names) -> Pairs:
  """The pairs of a file: its two columns, or its names and their reversal.

  A file is of pairs if its first line has a tab; then every line needs exactly
  one, with something on both sides. Raises ValueError with the line.
  """
  two = "\t" in listed.texts[0]
  for i, text in enumerate(listed.texts):
    columns = text.split("\t")
    if len(columns) != 1 + two or not all(columns):
      raise ValueError(
        f"{listed.where(i)}: {len(columns)} columns, but the first line of the "
        f"file has {1 + two}; a column is never empty: {text!r}"
      )
  if not two:
    return Pairs(listed.texts, [text[::-1] for text in listed.texts], True)
  sources, targets = zip(*(t.split("\t") for t in listed.texts), strict=True)
  return Pairs(list(sources), list(targets), False)


def interleave(tokens_NT, noise_NT):
  """One noise token after each token: x_1 n_1 x_2 n_2 ..., 2 T wide."""
  N, T = tokens_NT.shape
  return np.stack([tokens_NT, noise_NT], axis=-1).reshape(N, 2 * T)


@functools.lru_cache(maxsize=2)
def noise(shape: tuple[int, int], letters: int, seed: int, epoch: int):
  """Noise tokens in [0, letters) for every example, read-only.

  Row n is that of example n of the file, whatever batch asks. The last two
  tables are kept: the fixed one, and that of the current epoch.
  """
  # The 1 keeps this stream apart from the one that orders the examples.
  rng = np.random.default_rng((seed, epoch, 1))
  table_NT = rng.integers(0, letters, shape, np.int32)
  table_NT.setflags(write=False)
  return table_NT


class Batcher:
  """Batches of pairs, as dicts of arrays.

  source_BS, source_real_BS: tokens, and where they are real. source_there_BS:
  up to the longest source of the batch; columns after it, and rows without an
  example, exist only so that all batches have one of few shapes. inputs_BU,
  targets_BU, target_real_BU and target_there_BU likewise: inputs are
  [S] y_1 .. y_n, targets y_1 .. y_n [S].
  """

  def __init__(
    self, pairs: Pairs, vocab: Vocabulary, where, seed, buckets, batch_size=1
  ):
    self.pad, stop = vocab.id(PAD), vocab.id(START_STOP)
    self.seed, self.noisy = seed, pairs.noisy
    self.letters = vocab.size - 2
    sources = [vocab.encode(t, where(i)) for i, t in enumerate(pairs.sources)]
    targets = [
      np.concatenate([[stop], vocab.encode(t, where(i)), [stop]])
      for i, t in enumerate(pairs.targets)
    ]
    self.source = self._table(sources, vocab.size)
    self.target = self._table(targets, vocab.size)
    self.source_width = self.source[0].shape[1] * (1 + self.noisy)
    self.target_width = self.target[0].shape[1] - 1
    self.shapes = self._shapes(buckets, batch_size)

  def _table(self, sequences, vocab_size):
    longest = max(map(len, sequences))
    return batching.padded(
      sequences, longest, self.pad, len(sequences), vocab_size
    )

  def _shapes(self, buckets, batch_size):
    """(S, U) of every bucket, so that each fits about as many batches.

    A batch is as wide as its longest row: cut at a quantile q of the lengths,
    q^batch_size of the batches fit.
    """
    if buckets < 1:
      raise ValueError(f"task.buckets must be at least 1, not {buckets}")
    sources = np.sort(self.source[1].sum(1)) * (1 + self.noisy)
    targets = np.sort(self.target[1].sum(1)) - 1
    shares = ((k / buckets) ** (1 / batch_size) for k in range(1, buckets + 1))
    ends = [int(len(sources) * share) - 1 for share in shares]
    return [(int(sources[e]), int(targets[e])) for e in ends if e >= 0]

  def batch(self, indices, size, epoch, extra=0):
    """The examples `indices`, with the noise of that epoch, in `size` rows.

    extra: columns of padding that are there although no row needs them.
    """
    source_BS, real_BS = batching.rows(*self.source, indices, self.pad, size)
    if self.noisy:
      noise_BT = np.zeros_like(source_BS)
      shape = self.source[0].shape
      noise_BT[: len(indices)] = noise(shape, self.letters, self.seed, epoch)[
        indices
      ]
      source_BS = interleave(source_BS, noise_BT)
      real_BS = np.repeat(real_BS, 2, axis=1)
      source_BS = np.where(real_BS, source_BS, self.pad)
    target_BU, real_BU = batching.rows(*self.target, indices, self.pad, size)
    real_BU = real_BU[:, 1:]
    inputs_BU = np.where(real_BU, target_BU[:, :-1], self.pad)
    longest = real_BS.sum(1).max(), real_BU.sum(1).max()
    S, U = next(
      s for s in self.shapes if s[0] >= longest[0] and s[1] >= longest[1]
    )
    S, U = S + extra, U + extra
    example_B1 = np.arange(size)[:, None] < len(indices)
    there_BS = example_B1 & (np.arange(S) < longest[0] + extra)
    there_BU = example_B1 & (np.arange(U) < longest[1] + extra)
    return {
      "source_BS": _fit(source_BS, S, self.pad),
      "source_real_BS": _fit(real_BS, S, False),
      "source_there_BS": there_BS,
      "inputs_BU": _fit(inputs_BU, U, self.pad),
      "targets_BU": _fit(target_BU[:, 1:], U, self.pad),
      "target_real_BU": _fit(real_BU, U, False),
      "target_there_BU": there_BU,
    }

  def train(self, part, batch_size, fresh):
    """(start) -> training batches from number `start` on, without end."""
    part = np.asarray(part, np.int64)
    per_epoch = batching.steps_per_epoch(len(part), batch_size)

    def batches(start):
      for i in itertools.count(start):
        rows = batching.batch_indices(len(part), batch_size, self.seed, i)
        # Epoch 0 is the fixed noise, that of evaluation.
        epoch = 1 + i // per_epoch if fresh else 0
        yield self.batch(part[rows], batch_size, epoch)

    return batches

  def padding(self, part, batch_size):
    """What padding an epoch holds, in batches as wide as their longest source.

    The shares of source rows that have any, and of encoder steps that are it.
    """
    lengths = self.source[1].sum(1)[part]
    rows = missing = steps = 0
    for i in range(batching.steps_per_epoch(len(part), batch_size)):
      lengths_B = lengths[
        batching.batch_indices(len(part), batch_size, self.seed, i)
      ]
      longest = lengths_B.max()
      rows += int((lengths_B < longest).sum())
      missing += int((longest - lengths_B).sum())
      steps += int(longest) * len(lengths_B)
    return {
      "padded_source_rows": round(rows / len(part), 4),
      "padded_source_steps": round(missing / steps, 4),
    }

  def once(self, parts, batch_size):
    """(split, size, extra, first) -> the split once, in its order."""

    def batches(split, size=None, extra=0, first=None):
      part, size = np.asarray(parts[split][:first]), size or batch_size
      for i in range(0, len(part), size):
        yield self.batch(part[i : i + size], size, 0, extra)

    return batches


def _fit(array_BT, width, fill):
  """The first `width` columns, filled up where there are fewer."""
  array_BT = array_BT[:, :width]
  missing = width - array_BT.shape[1]
  return np.pad(array_BT, ((0, 0), (0, missing)), constant_values=fill)
