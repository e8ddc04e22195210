"""Python source as data: which files, their hash, split and labels."""

import contextlib
import dataclasses
import hashlib
import io
import os
import pathlib
import platform
import sysconfig
import tokenize
import zipfile
import zlib

import numpy as np

from rnnlab.data import cache, roles


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


def library() -> list[pathlib.Path]:
  """The top-level modules of this Python's own library, by name."""
  folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
  if files := sorted(folder.glob("*.py"), key=lambda file: file.name):
    return files
  raise ValueError(
    f"the standard library in {folder} holds no .py files; name a text by "
    "task.path"
  )


def number(name: str) -> int:
  """What decides on which side of a split a file of this name stands."""
  data = name.encode("utf-8", "surrogateescape")
  return int(hashlib.sha256(data).hexdigest(), 16)


def read(path: str = "") -> Sources:
  """Reads a file, or all .py files of a folder and the folders in it.

  Without a path the top-level modules of this Python's own library. In the
  order of their paths, relative and with "/". A file is decoded as Python does,
  by its mark or its coding line, and its lines end in a newline each. Raises
  ValueError where there is nothing to read.
  """
  root, source = pathlib.Path(os.path.expanduser(path)), path
  if not path:
    listed = library()
    root = listed[0].parent
    source = f"the standard library in {root}"
  elif root.is_file():
    root, listed = root.parent, [root]
  else:
    listed = root.glob("**/*.py")
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
    part = {0: "test", 1: "validation"}.get(number(name) % 10, "train")
    parts[part if len(names) > 1 else "train"].append(i)
  return parts


@dataclasses.dataclass(frozen=True)
class Labelled:
  """The labels of many files; `kept` are the numbers of those that have any.

  `labels[i]` and `places[i]` are those of file kept[i]. `unparsed` files are no
  programs; in `unlabelled` ones tokens and nodes do not agree.
  """

  kept: list
  labels: list
  places: list
  unparsed: int
  unlabelled: int


def label(texts: list[str], digest: str) -> Labelled:
  """The roles of all characters of files, kept in the user's cache.

  digest: of what the texts are; with it, the labelling code and the version of
  Python the labels are the same.
  """
  own = hashlib.sha256(pathlib.Path(roles.__file__).read_bytes()).hexdigest()
  key = f"{digest}{own}{platform.python_version()}{len(texts)}"
  name = hashlib.sha256(key.encode()).hexdigest()[:32]
  path = cache.folder("labels") / f"{name}.npz"
  try:
    with np.load(io.BytesIO(path.read_bytes())) as found:
      arrays = {field: found[field] for field in found.files}
  except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
    arrays = _label(texts)
    with contextlib.suppress(OSError):  # without room there is no cache
      with cache.write(path) as file:
        np.savez_compressed(file, **arrays)
  ends = np.cumsum([len(texts[i]) for i in arrays["kept"]])[:-1]
  return Labelled(
    arrays["kept"].tolist(),
    np.split(arrays["labels"], ends),
    np.split(arrays["places"], ends),
    *arrays["failed"].tolist(),
  )


def _label(texts):
  kept, found, unparsed, unlabelled = [], [], 0, 0
  for i, text in enumerate(texts):
    try:
      found.append(roles.label(text))
      kept.append(i)
    except roles.Unlabelled:
      unlabelled += 1
    except roles.BROKEN:
      unparsed += 1
  labels, places = zip(*found, strict=True) if found else ((), ())
  none = np.zeros(0, np.uint8)
  return {
    "kept": np.array(kept, np.int64),
    "labels": np.concatenate([none, *labels]),
    "places": np.concatenate([none, *places]),
    "failed": np.array([unparsed, unlabelled]),
  }
