"""Arrays in safetensors files: a JSON header, then the raw data.

The format is small and fixed: 8 bytes hold the header's length, the header the
type, shape and place of every array and, under __metadata__, words about them.
All of it stands here, so no package is needed, and what is damaged is named.
Source: the safetensors project's description of its format.
"""

import json
import math
import os
import pathlib

import ml_dtypes
import numpy as np

TYPES = {
  "F64": np.float64,
  "F32": np.float32,
  "F16": np.float16,
  "BF16": ml_dtypes.bfloat16,
  "I64": np.int64,
  "I32": np.int32,
  "I16": np.int16,
  "I8": np.int8,
  "U8": np.uint8,
  "BOOL": np.bool_,
}
_NAMES = {np.dtype(kind): name for name, kind in TYPES.items()}
_METADATA = "__metadata__"


def write(path, arrays: dict, metadata: dict) -> None:
  """Writes {name: array} with metadata, {str: str}, to a file, whole or not.

  Raises ValueError for a type that the format does not have.
  """
  header, data, end = {_METADATA: metadata}, [], 0
  for name, array in arrays.items():
    array = np.asarray(array)
    if array.dtype not in _NAMES:
      raise ValueError(f"{name} is of {array.dtype}, not of {[*TYPES]}")
    raw = array.astype(array.dtype.newbyteorder("<")).tobytes()
    header[name] = {
      "dtype": _NAMES[array.dtype],
      "shape": list(array.shape),
      "data_offsets": [end, end + len(raw)],
    }
    data.append(raw)
    end += len(raw)
  text = json.dumps(header, allow_nan=False).encode()
  text += b" " * (-len(text) % 8)  # so that the data are aligned
  path = pathlib.Path(path)
  part = path.with_name(f"{path.name}.{os.getpid()}.part")
  try:
    part.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *data]))
    part.replace(path)
  finally:
    part.unlink(missing_ok=True)


def read(path) -> tuple[dict, dict]:
  """({name: array}, metadata) of a file.

  Raises ValueError with the path and the array's name for what is damaged or
  no such file.
  """
  raw = pathlib.Path(path).read_bytes()
  try:
    return _read(raw)
  except (ValueError, TypeError, KeyError, RecursionError) as error:
    raise ValueError(f"{path} is no whole safetensors file: {error}") from error


def _read(raw):
  start = 8 + int.from_bytes(raw[:8], "little")
  if len(raw) < 8 or start > len(raw):
    raise ValueError(f"{len(raw)} bytes, and a header that ends at {start}")
  header = json.loads(raw[8:start], object_pairs_hook=_once)
  if not isinstance(header, dict):
    raise ValueError("its header is no object")
  metadata = header.pop(_METADATA, {})
  if not all(isinstance(v, str) for v in metadata.values()):
    raise ValueError(f"{_METADATA} holds more than words: {metadata}")
  data, arrays, end = memoryview(raw)[start:], {}, 0
  for name, entry in sorted(header.items(), key=_place):
    kind, shape, (first, last) = (
      entry[field] for field in ("dtype", "shape", "data_offsets")
    )
    if kind not in TYPES:
      raise ValueError(f"{name} is of {kind!r}; known are {[*TYPES]}")
    dtype = np.dtype(TYPES[kind]).newbyteorder("<")
    size = math.prod(shape) * dtype.itemsize
    whole = last <= len(data) and min(shape, default=0) >= 0
    if not whole or (first, last) != (end, end + size):
      raise ValueError(
        f"{name} of {kind}, shape {shape}, lies at {first} .. {last}; its data "
        f"begin at {end}, and all end at {len(data)}"
      )
    found = np.frombuffer(data[first:last], dtype)
    arrays[name] = found.reshape(shape).astype(TYPES[kind])
    end = last
  if end != len(data):
    raise ValueError(f"{len(data)} bytes of data, of which arrays name {end}")
  return arrays, metadata


def _place(item):
  return item[1]["data_offsets"][0], item[1]["data_offsets"][1]


def _once(pairs):
  names = [name for name, _ in pairs]
  if twice := {name for name in names if names.count(name) > 1}:
    raise ValueError(f"{sorted(twice)} stand there twice")
  return dict(pairs)
