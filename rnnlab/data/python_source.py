"""Python source as data: which files, in which order, and their hash."""

import dataclasses
import hashlib
import io
import os
import pathlib
import sysconfig
import tokenize


@dataclasses.dataclass(frozen=True)
class Sources:
  """Files by their path, and what a run records of where they came from.

  `texts[i]` is the text of `names[i]`; `unreadable` files could not be decoded.
  `sha256` is that of all names and bytes, in order, the unreadable included.
  """

  names: list[str]
  texts: list[str]
  unreadable: int
  sha256: str
  source: str


def read(path: str = "") -> Sources:
  """Reads a file, or all .py files of a folder and the folders in it.

  Without a path the top-level modules of this Python's own library. In the
  order of their paths, relative and with "/". A file is decoded as Python does,
  by its mark or its coding line, and its lines end in a newline each. Raises
  ValueError where there is nothing to read.
  """
  root = pathlib.Path(os.path.expanduser(path or sysconfig.get_path("stdlib")))
  source = path or f"the standard library in {root}"
  if root.is_file():
    root, listed = root.parent, [root]
  else:
    listed = root.glob("**/*.py" if path else "*.py")
  names, texts, unreadable, digest = [], [], 0, hashlib.sha256()
  for name, file in sorted(
    (file.relative_to(root).as_posix(), file) for file in listed
  ):
    try:
      data = file.read_bytes()
    except OSError as error:
      raise ValueError(f"{file}: cannot be read, {error.strerror}") from None
    for part in (name.encode("utf-8", "surrogateescape"), data):
      digest.update(len(part).to_bytes(8, "big") + part)
    try:
      texts.append(decode(data))
      names.append(name)
    except (SyntaxError, UnicodeDecodeError, LookupError):
      unreadable += 1
  if not texts:
    raise ValueError(f"{source}: no Python file that can be read")
  return Sources(names, texts, unreadable, digest.hexdigest(), source)


def decode(data: bytes) -> str:
  """The text of a file as Python reads it; its lines end in "\\n" alone.

  Raises SyntaxError for a coding that is unknown, UnicodeDecodeError for bytes
  that are none of it.
  """
  encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
  text = data.decode(encoding)
  return text.replace("\r\n", "\n").replace("\r", "\n")


def split(names: list[str]) -> dict[str, list[int]]:
  """The indices of "train", "validation" and "test"; all are used once.

  By sha256 of a name modulo 10: 0 is test, 1 validation, the rest train. It
  depends on each name alone, so another file moves none. A single file is all
  for training.
  """
  parts = {"train": [], "validation": [], "test": []}
  for i, name in enumerate(names):
    data = name.encode("utf-8", "surrogateescape")
    side = int(hashlib.sha256(data).hexdigest(), 16) % 10
    part = {0: "test", 1: "validation"}.get(side, "train")
    parts[part if len(names) > 1 else "train"].append(i)
  return parts
