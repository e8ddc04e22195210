"""Long texts: how they are read, split, and kept as tokens outside memory.

A text is one file, or the documents of a folder one after another. It is read
in blocks, so it may be larger than memory; what stays is a file of tokens, in
the user's cache, that is mapped and not loaded.
"""

import codecs
import dataclasses
import hashlib
import os
import pathlib
import platform
import zlib
from collections.abc import Sequence

import numpy as np

from rnnlab.data import cache, python_source
from rnnlab.data.vocabulary import (
  CODE_POINTS,
  UNKNOWN,
  Vocabulary,
  code_points,
)

BLOCK = 1 << 20  # bytes
SURROGATES = 0x800  # code points that are no characters
SPLITS = "train", "validation"


@dataclasses.dataclass(frozen=True)
class Text:
  """A text as tokens, split: what streams are made of.

  tokens: {split: tokens_N}, mapped from a file, uint8 or wider. starts: {split:
  where its documents start, ascending, 0 first}.
  """

  vocab: Vocabulary
  tokens: dict
  starts: dict
  facts: dict

  def sequences(self, split: str) -> list:
    """The tokens of a split, document by document."""
    return np.split(self.tokens[split], self.starts[split][1:])

  def documents(self, split: str) -> "Documents":
    """The documents of a split as a person reads them."""
    return Documents(self.vocab, self.tokens[split], self.starts[split])


class Documents(Sequence):
  """Documents that are decoded when they are asked for."""

  def __init__(self, vocab, tokens_N, starts):
    self.vocab, self.tokens_N = vocab, tokens_N
    self.ends = np.append(starts, len(tokens_N))

  def __len__(self):
    return len(self.ends) - 1

  def __getitem__(self, i):
    if isinstance(i, slice):
      return [self[j] for j in range(*i.indices(len(self)))]
    if not -len(self) <= i < len(self):
      raise IndexError(i)
    i %= len(self)
    return self.vocab.decode(self.tokens_N[self.ends[i] : self.ends[i + 1]])


def load(path: str = "", held_out: float = 0.1, symbols=None) -> Text:
  """Reads a UTF-8 file; without a path the interpreter's standard library.

  A file is one document; its last `held_out` of the characters are held out.
  The standard library, its top-level modules by name, is split by file: by
  sha256 of the name, one in round(1 / held_out) is held out. held_out=0 holds
  nothing out.

  The vocabulary is the characters of training and UNKNOWN, which stands for
  others in the held-out part (facts count them as `unknown`); symbols: a run's
  stored one, which has to be the same. ValueError for what cannot be read, is
  no UTF-8, or where training or the held-out part would hold no character.
  """
  if not 0 <= held_out < 1:
    raise ValueError(f"task.held_out must be in [0, 1), not {held_out}")
  files = (
    [pathlib.Path(os.path.expanduser(path))]
    if path
    else python_source.library()
  )
  source = str(path) if path else "the standard library"
  digest, sizes = hashlib.sha256(), []
  for file in files:
    # Of one file the digest is that of its bytes; of several, names count too.
    digest.update(b"" if path else file.name.encode() + b"\0")
    sizes.append(sum(map(len, _blocks(file, digest))))
  if path:
    held = int(held_out * sizes[0])
    cuts = {
      "train": (0, sizes[0] - held),
      "validation": (sizes[0] - held, None),
    }
    plan = {split: [(files[0], *cut)] for split, cut in cuts.items()}
    counts = {"train": [sizes[0] - held], "validation": [held]}
  else:
    plan, counts = {s: [] for s in SPLITS}, {s: [] for s in SPLITS}
    for file, size in zip(files, sizes, strict=True):
      split = SPLITS[_is_held_out(file.name, held_out)]
      plan[split].append((file, 0, None))
      counts[split].append(size)
  totals = {split: sum(counts[split]) for split in SPLITS}
  for split in SPLITS:
    # A document's first character has nothing before it to be predicted from.
    predicted = sum(size - 1 for size in counts[split] if size)
    if predicted < 1 and (split == "train" or held_out):
      raise ValueError(
        f"{source}: {sum(sizes)} characters, of which task.held_out="
        f"{held_out:g} leaves {totals[split]} for {split}, where at least 2 "
        "are needed; task.held_out=0 holds out nothing"
      )
  known = np.zeros(CODE_POINTS, bool)
  for piece in _pieces(plan["train"]):
    known[code_points(piece)] = True
  vocab = Vocabulary.of_points(np.flatnonzero(known))
  if symbols is not None and tuple(symbols) != vocab.symbols:
    raise ValueError(
      f"{source}: its training part has other characters than the run's "
      f"vocabulary: {vocab.size - 1}, not {len(symbols) - 1}"
    )
  tokens = {
    split: _tokens(digest.hexdigest(), split, pieces, totals[split], vocab)
    for split, pieces in plan.items()
  }
  starts = {
    split: np.cumsum([0, *counts[split]])[:-1][np.array(counts[split]) > 0]
    for split in SPLITS
  }
  held_N = tokens["validation"]
  facts = {
    "sha256": digest.hexdigest(),
    "characters": sum(sizes),
    **totals,
    "unknown": int(np.count_nonzero(held_N == vocab.id(UNKNOWN))),
  }
  if not path:
    facts["python"] = platform.python_version()
    facts |= {f"{split}_files": len(plan[split]) for split in SPLITS}
  return Text(vocab, tokens, starts, facts)


def _is_held_out(name, held_out):
  """By the name alone, so that no other file moves it."""
  side = python_source.number(name)
  return bool(held_out) and side % round(1 / held_out) == 0


def _blocks(path, digest=None):
  """The text of a UTF-8 file in blocks, without a leading byte order mark.

  digest takes the bytes. ValueError where the file cannot be read, or with the
  offset (from 0) and value of the first byte that is not UTF-8.
  """
  decoder, read = codecs.getincrementaldecoder("utf-8")(), 0
  mark = "\ufeff"
  try:
    with open(path, "rb") as file:
      while True:
        block = file.read(BLOCK)
        if digest:
          digest.update(block)
        pending = decoder.getstate()[0]
        text = decoder.decode(block, final=not block)
        yield text.removeprefix(mark)
        if not block:
          return
        mark = "" if text else mark
        read += len(block)
  except UnicodeDecodeError as error:
    at = read - len(pending) + error.start
    wrong = (pending + block)[error.start]
    raise ValueError(
      f"{path}: not UTF-8, byte 0x{wrong:02x} at offset {at}"
    ) from None
  except OSError as error:
    raise ValueError(f"{path}: cannot be read, {error.strerror}") from None


def _pieces(parts):
  """The text of parts (file, first character, end or None), in blocks."""
  for path, first, end in parts:
    at = 0
    for text in _blocks(path):
      stop = None if end is None else max(end - at, 0)
      yield text[max(first - at, 0) : stop]
      at += len(text)
      if end is not None and at >= end:
        break


def _tokens(digest, split, parts, n, vocab):
  """The tokens of a split, mapped from the cache; written there if need be."""
  kind = next(t for t in "BHI" if np.iinfo(t).max >= vocab.size - 1)
  symbols = hashlib.sha256("\0".join(vocab.symbols).encode()).hexdigest()
  name = f"{digest[:32]}-{symbols[:16]}-{split}-{n}"
  path = cache.folder("texts") / f"{name}.tokens"
  if not _is_whole(path, n, kind):
    _write(path, _pieces(parts), n, kind, vocab)
  if n == 0:
    return np.zeros(0, kind)
  return np.memmap(path, kind, "r", shape=n)


def _is_whole(path, n, kind):
  """Whether the file is there with n tokens and their checksum after them."""
  size = n * np.dtype(kind).itemsize
  if not path.exists() or path.stat().st_size != size + 4:
    return False
  checksum = 0
  with open(path, "rb") as file:
    for at in range(0, size, BLOCK):
      checksum = zlib.crc32(file.read(min(BLOCK, size - at)), checksum)
    return file.read() == checksum.to_bytes(4, "little")


def _write(path, pieces, n, kind, vocab):
  """Writes n tokens and their checksum."""
  checksum, written = 0, 0
  with cache.write(path) as file:
    for piece in pieces:
      data = vocab.ids(piece).astype(kind).tobytes()
      checksum = zlib.crc32(data, checksum)
      written += len(piece)
      file.write(data)
    file.write(checksum.to_bytes(4, "little"))
    if written != n:
      raise ValueError(f"the text changed while it was read, {path.name}")
