"""Strict JSON that gives back what it was given, and the rule for settings."""

import json
import math
from typing import Any

import numpy as np

# How values that JSON has no word for are written.
_TUPLE, _FLOAT = "__tuple__", "__float__"


def dumps(value: Any, indent: int | None = None) -> str:
  """Strict JSON from which `loads` rebuilds an equal value.

  Tuples stay tuples, 1.0 stays a float, nan and the infinities stay what they
  are, numpy scalars become Python ones. ValueError for any other type and for
  keys that are not str.
  """
  return json.dumps(
    _encode(value), indent=indent, allow_nan=False, ensure_ascii=False
  )


def loads(text: str) -> Any:
  """The value that `dumps` wrote; ValueError where it is not strict JSON."""
  return json.loads(text, object_hook=_decode, parse_constant=refuse_word)


def plain_json(row: dict) -> str:
  """A record as one line of strict JSON, for any reader.

  nan and infinities become null and are named under "nonfinite", so that none
  of them is mistaken for a number.
  """
  nonfinite = {}

  def plain(value, name):
    if isinstance(value, dict):
      return {
        k: plain(v, f"{name}.{k}" if name else k) for k, v in value.items()
      }
    if isinstance(value, list | tuple):
      return [plain(v, f"{name}[{i}]") for i, v in enumerate(value)]
    value = value.item() if hasattr(value, "item") else value
    if isinstance(value, float) and not math.isfinite(value):
      value, nonfinite[name] = None, str(value)
    return value

  made = plain(row, "")
  return json.dumps(
    made | ({"nonfinite": nonfinite} if nonfinite else {}), allow_nan=False
  )


def settle(config: dict, where: str) -> dict:
  """The config as plain Python values: one rule, whatever set them.

  Lists become tuples and numpy scalars Python numbers. ValueError, naming
  `where` and the dotted field, for nan, infinities, types that a config
  cannot keep, and keys that would make dotted names ambiguous.
  """
  return _settle(config, where, "")


def _settle(value, where, name):
  if isinstance(value, np.generic):
    value = value.item()
  if isinstance(value, dict):
    for key in value:
      if not isinstance(key, str) or "." in key or key in (_TUPLE, _FLOAT):
        raise ValueError(f"{where}: {key!r} cannot name a field of {name!r}")
    return {
      key: _settle(inner, where, f"{name}.{key}" if name else key)
      for key, inner in value.items()
    }
  if isinstance(value, tuple | list):
    return tuple(
      _settle(inner, where, f"{name}[{i}]") for i, inner in enumerate(value)
    )
  if isinstance(value, float) and not math.isfinite(value):
    raise ValueError(f"{where}: {name} is {value}; a finite number is needed")
  if value is None or isinstance(value, bool | int | float | str):
    return value
  raise ValueError(
    f"{where}: {name} is {value!r}, a {type(value).__name__}; a setting is a "
    "bool, int, float, str, None, or a tuple of those"
  )


def _encode(value):
  if isinstance(value, np.generic):
    value = value.item()
  if isinstance(value, dict):
    for key in value:
      if not isinstance(key, str) or key in (_TUPLE, _FLOAT):
        raise ValueError(f"{key!r} cannot be a key in these files")
    return {key: _encode(inner) for key, inner in value.items()}
  if isinstance(value, tuple):
    return {_TUPLE: [_encode(inner) for inner in value]}
  if isinstance(value, list):
    return [_encode(inner) for inner in value]
  if isinstance(value, float) and not math.isfinite(value):
    return {_FLOAT: str(value)}
  if value is None or isinstance(value, bool | int | float | str):
    return value
  raise ValueError(
    f"{value!r}, a {type(value).__name__}, cannot be kept in these files"
  )


def _decode(pairs):
  if pairs.keys() == {_TUPLE}:
    return tuple(pairs[_TUPLE])
  if pairs.keys() == {_FLOAT}:
    return float(pairs[_FLOAT])
  return pairs


def refuse_word(word):
  """For `parse_constant`: NaN and Infinity are not strict JSON."""
  raise ValueError(f"{word} is not strict JSON")
