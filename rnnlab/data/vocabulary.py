"""Which id stands for which symbol, and the refusal of everything else."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable

import numpy as np

START_STOP = "[S]"
PAD = "[PAD]"
UNKNOWN = "[?]"  # stands for every character that training lacks
CODE_POINTS = 0x110000


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """The symbols of a model in the order of their ids.

  A symbol of one Unicode code point is a character, a longer one a special
  symbol, so the two cannot be confused. Text is never normalised: "é" as one
  code point and "e" with a combining accent are different texts.

  Stored as the JSON list `list(vocab.symbols)`, restored by
  `Vocabulary(symbols)`. Two vocabularies are equal where their symbols are:
  the same size is not enough. Empty and repeated symbols raise ValueError.
  """

  symbols: tuple[str, ...]

  def __post_init__(self):
    object.__setattr__(self, "symbols", tuple(self.symbols))
    for i, symbol in enumerate(self.symbols):
      if not isinstance(symbol, str) or not symbol:
        raise ValueError(f"vocabulary: id {i} is {symbol!r}, not a symbol")
      if self._ids[symbol] != i:
        raise ValueError(
          f"vocabulary: {symbol!r} has two ids, {i} and {self._ids[symbol]}"
        )

  @classmethod
  def of(
    cls, texts: Iterable[str], specials: Iterable[str] = (START_STOP, PAD)
  ) -> "Vocabulary":
    """Returns the characters of `texts` by code point, then `specials`.

    For names in a to z: letters 0 to 25, [S] 26, [PAD] 27. ValueError where
    there is no character, or a special symbol is not longer than one.
    """
    characters = sorted(set(itertools.chain.from_iterable(texts)))
    if not characters:
      raise ValueError("vocabulary: the texts hold no character")
    specials = tuple(specials)
    for symbol in specials:
      if len(symbol) < 2:
        raise ValueError(
          f"vocabulary: special symbol {symbol!r} has length {len(symbol)}, "
          "which a character has; it needs at least 2"
        )
    return cls((*characters, *specials))

  @classmethod
  def of_points(cls, known) -> "Vocabulary":
    """The characters of code points, ascending and each once, then UNKNOWN."""
    return cls((*map(chr, known.tolist()), UNKNOWN))

  @functools.cached_property
  def _of_point(self) -> np.ndarray:
    ids = np.full(CODE_POINTS, self.id(UNKNOWN), np.int32)
    for symbol, i in self._ids.items():
      if len(symbol) == 1:
        ids[ord(symbol)] = i
    return ids

  @functools.cached_property
  def _ids(self) -> dict[str, int]:
    return {symbol: i for i, symbol in enumerate(self.symbols)}

  @property
  def size(self) -> int:
    """V, special symbols included."""
    return len(self.symbols)

  def id(self, symbol: str) -> int:
    """Returns the id of a character or special symbol; ValueError if none."""
    if symbol not in self._ids:
      raise ValueError(f"vocabulary of {self.size}: no symbol {symbol!r}")
    return self._ids[symbol]

  def encode(self, text: str, where: str = "") -> np.ndarray:
    """Returns the ids of the code points of `text`, int32, one each.

    An unseen character raises ValueError with its code point, its position
    (from 1) and `where` the text came from.
    """
    try:
      ids = map(self._ids.__getitem__, text)
      return np.fromiter(ids, np.int32, len(text))
    except KeyError as error:
      (character,) = error.args
      known = sum(len(symbol) == 1 for symbol in self.symbols)
      raise ValueError(
        f"{where or repr(text[:40])}: character {character!r} "
        f"(U+{ord(character):04X}) at position {text.index(character) + 1} "
        f"is not among the {known} characters of the vocabulary"
      ) from None

  def ids(self, text: str) -> np.ndarray:
    """The ids of a text, int32, that of UNKNOWN for what is not among them.

    Only for a vocabulary that has UNKNOWN; `encode` refuses instead.
    """
    return self._of_point[code_points(text)]

  def decode(self, ids) -> str:
    """Returns the text of a list of ids; a special id shows as its symbol."""
    # An empty list has no integer type of its own.
    ids = np.asarray(ids) if len(ids) else np.zeros(0, np.int32)
    check_ids(ids, self.size)
    return "".join(self.symbols[i] for i in ids.tolist())


def code_points(text: str) -> np.ndarray:
  """The code points of a text, uint32, one a character."""
  return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def check_ids(ids: np.ndarray, vocab_size: int, where: str = "ids") -> None:
  """Refuses ids outside [0, V), and storage that could not hold V - 1.

  A type too narrow for V - 1 may have wrapped an id around before anyone
  looked (200 as int8 is -56), so it is refused whatever it holds. ValueError
  with the id, its row and position (from 0, as numpy counts) and V.
  """
  if ids.dtype.kind not in "iu":
    raise ValueError(f"{where}: type {ids.dtype} is not an integer type")
  if np.iinfo(ids.dtype).max < vocab_size - 1:
    raise ValueError(
      f"{where}: type {ids.dtype} holds ids up to {np.iinfo(ids.dtype).max}, "
      f"V = {vocab_size} needs {vocab_size - 1}"
    )
  wrong = (ids < 0) | (ids >= vocab_size)
  if wrong.any():
    index = tuple(np.argwhere(wrong)[0].tolist())
    axes = ("row", "position")[-len(index) :]
    place = ", ".join(f"{a} {i}" for a, i in zip(axes, index, strict=True))
    raise ValueError(
      f"{where}: id {ids[index]} at {place} (from 0) is outside the "
      f"vocabulary, 0 <= id < V = {vocab_size}"
    )
