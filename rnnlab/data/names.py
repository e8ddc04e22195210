"""Lists of names: how a file is read, and how it is split."""

import dataclasses
import hashlib
import os
import pathlib
import random

from rnnlab.data.batching import check_seed

EMBEDDED = pathlib.Path(__file__).with_name("names_ssa_min100.txt")
RULES = ("hash", "shuffle")


@dataclasses.dataclass(frozen=True)
class Names:
  """Names in file order, and what a run records about where they came from.

  `lines[i]` is the line of `texts[i]`, from 1; `blank` lines were skipped;
  `sha256` is that of the bytes of the file named by `source`.
  """

  texts: list[str]
  lines: list[int]
  blank: int
  sha256: str
  source: str

  @property
  def repeats(self) -> int:
    """How many names stand on an earlier line too."""
    return len(self.texts) - len(set(self.texts))

  def where(self, i: int) -> str:
    """Returns the file and line of name i, for messages."""
    return f"{self.source}, line {self.lines[i]}"

  def __str__(self):
    return (
      f"{len(self.texts)} names from {self.source}: "
      f"{self.blank} blank lines skipped, {self.repeats} names repeated"
    )


def read(path: str = "", tabs: bool = False) -> Names:
  """Reads a UTF-8 list of names, one a line; without a path the embedded one.

  Lines end at a newline alone, which the last may lack. A leading byte order
  mark and outer blanks are removed, blank lines skipped and counted; inner
  blanks, case and repeats are kept. tabs: a tab is a border between columns,
  so outer ones stay, but for a line of nothing else. A relative path starts at
  the current directory, "~" at the home directory. ValueError where the file
  cannot be read, is not UTF-8 or holds no name.
  """
  source = str(path) if path else f"embedded {EMBEDDED.name}"
  text, sha256 = read_utf8(path or EMBEDDED)
  # A final newline ends the last line; it does not begin a blank one.
  pieces = text.removesuffix("\n").split("\n")
  if tabs:
    pieces = [
      piece.strip(" \r\v\f") if piece.strip() else "" for piece in pieces
    ]
  else:
    pieces = [piece.strip() for piece in pieces]
  stripped = list(enumerate(pieces, 1))
  kept = [(i, name) for i, name in stripped if name]
  if not kept:
    raise ValueError(
      f"{source}: no names, only {len(pieces)} blank lines"
      if text
      else f"{source}: no names, the file is empty"
    )
  return Names(
    texts=[name for _, name in kept],
    lines=[i for i, _ in kept],
    blank=len(pieces) - len(kept),
    sha256=sha256,
    source=source,
  )


def read_utf8(path: str | os.PathLike) -> tuple[str, str]:
  """Returns the text of a file and the sha256 of its bytes.

  A leading byte order mark is removed; no locale takes part. ValueError where
  the file cannot be read, or with the offset (from 0) and value of the first
  byte that is not UTF-8.
  """
  try:
    data = pathlib.Path(os.path.expanduser(path)).read_bytes()
  except OSError as error:
    raise ValueError(f"{path}: cannot be read, {error.strerror}") from None
  try:
    text = data.decode("utf-8")
  except UnicodeDecodeError as error:
    raise ValueError(
      f"{path}: not UTF-8, byte 0x{data[error.start]:02x} at offset "
      f"{error.start}"
    ) from None
  return text.removeprefix("\ufeff"), hashlib.sha256(data).hexdigest()


def drop_repeats(names: Names) -> Names:
  """Returns the names with each text at its first line only."""
  first = {}
  for i, text in enumerate(names.texts):
    first.setdefault(text, i)
  return dataclasses.replace(
    names, texts=list(first), lines=[names.lines[i] for i in first.values()]
  )


def split(texts: list[str], rule: str, seed: int) -> dict[str, list[int]]:
  """Returns the indices of "train", "validation" and "test"; all are used once.

  "hash": sha256 of the name modulo 20; 0 is test, 1 validation, the rest
  train, in file order. It depends on each name alone: a repeat never stands on
  two sides, other names move nothing, and the seed is not used. "shuffle": all
  lines shuffled by `random.Random(seed)`, cut at .8 and .9; repeats may stand
  on two sides, which `seen_in` counts.

  A short list can leave a part empty. ValueError for another rule or a seed
  outside [0, 2**32).
  """
  seed = check_seed("task.split_seed", seed)
  if rule == "hash":
    parts = {"train": [], "validation": [], "test": []}
    for i, text in enumerate(texts):
      digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
      side = {0: "test", 1: "validation"}.get(int(digest, 16) % 20, "train")
      parts[side].append(i)
    return parts
  if rule == "shuffle":
    order = list(range(len(texts)))
    random.Random(seed).shuffle(order)
    a, b = int(0.8 * len(order)), int(0.9 * len(order))
    return {"train": order[:a], "validation": order[a:b], "test": order[b:]}
  raise ValueError(f"split rule {rule!r} is not one of {', '.join(RULES)}")


@dataclasses.dataclass(frozen=True)
class Splits:
  """A list of names with its splits: indices, texts, and what to record."""

  listed: Names
  indices: dict[str, list[int]]
  texts: dict[str, list[str]]
  facts: dict


def load(
  path: str,
  rule: str,
  seed: int,
  unique: bool = False,
  max_length: int | None = None,
  columns=None,
) -> Splits:
  """Reads a list and splits it; repeats are dropped first where `unique`.

  columns(line): its texts, where a tab separates them; by the first a line is
  split and looked up in training. max_length: lines with a longer text are
  dropped, whole, from every split, and counted; nothing is cut. ValueError as
  in `read` and `split`, and where nothing is left to train on.
  """
  if max_length is not None and max_length < 1:
    raise ValueError(f"task.max_length must be at least 1, not {max_length}")
  listed = read(path, tabs=columns is not None)
  columns = columns or (lambda line: (line,))
  if unique:
    listed = drop_repeats(listed)
  keys = [columns(line)[0] for line in listed.texts]
  facts = {
    "sha256": listed.sha256,
    "names": len(keys),
    "blank_lines": listed.blank,
    "repeats": listed.repeats,
  }
  parts = split(keys, rule, seed)
  if max_length is not None:
    long = {
      i
      for i, line in enumerate(listed.texts)
      if max(map(len, columns(line))) > max_length
    }
    for side, part in parts.items():
      facts[f"{side}_too_long"] = sum(i in long for i in part)
    kept = [i for i in range(len(keys)) if i not in long]
    listed, parts, keys = _keep(listed, parts, keys, kept)
  if not parts["train"]:
    raise ValueError(
      f"{listed.source}: of {facts['names']} lines task.split={rule}"
      + ("" if max_length is None else f" with task.max_length={max_length}")
      + " leaves 0 to train on, at least 1 is needed"
    )
  texts = {side: [keys[i] for i in part] for side, part in parts.items()}
  facts |= {side: len(part) for side, part in parts.items()}
  for side in ("validation", "test"):
    facts[f"{side}_in_train"] = seen_in(texts["train"], texts[side])
  return Splits(listed, parts, texts, facts)


def _keep(listed, parts, keys, kept):
  """The list of the lines `kept` alone, and the splits in its own numbers."""
  place = {old: new for new, old in enumerate(kept)}
  parts = {
    s: [place[i] for i in part if i in place] for s, part in parts.items()
  }
  texts = [listed.texts[i] for i in kept]
  lines = [listed.lines[i] for i in kept]
  listed = dataclasses.replace(listed, texts=texts, lines=lines)
  return listed, parts, [keys[i] for i in kept]


def seen_in(train_texts: list[str], texts: list[str]) -> int:
  """Returns how many of `texts`, repeats counted, also stand in training."""
  train = set(train_texts)
  return sum(text in train for text in texts)
