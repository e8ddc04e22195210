"""One rule for settings: a `make` says by its signature what it takes."""

import inspect
import types
import typing


def bind(make, where, settings, positional=()) -> dict:
  """The settings as keyword arguments of `make`, checked against it.

  None means "not set" and is dropped, in nested settings too, so the default
  in the signature counts. A name that `make` lacks, one that is missing, and a
  value that is not of the annotated type raise ValueError with `where`, the
  name, the value and what would do. An int does for a float; nothing else is
  converted: 2.0 and True are not ints. positional: parameters of `make` that
  are no settings.
  """
  parameters = {
    name: parameter
    for name, parameter in inspect.signature(make).parameters.items()
    if name not in positional
  }
  settings = _set(settings)
  if unknown := sorted(settings.keys() - parameters.keys()):
    raise ValueError(
      f"{where}.{unknown[0]} is no setting here (value "
      f"{settings[unknown[0]]!r}); there are {', '.join(parameters) or 'none'}"
    )
  for name, parameter in parameters.items():
    if name in settings:
      value, wanted = settings[name], parameter.annotation
      settings[name] = _typed(f"{where}.{name}", value, wanted)
    elif parameter.default is inspect.Parameter.empty:
      raise ValueError(f"{where}.{name} has to be set")
  return settings


def _set(settings):
  kept = {
    name: _set(value) if isinstance(value, dict) else value
    for name, value in settings.items()
    if value is not None
  }
  return {name: value for name, value in kept.items() if value != {}}


def _typed(name, value, wanted):
  union = isinstance(wanted, types.UnionType)
  options = typing.get_args(wanted) if union else (wanted,)
  if inspect.Parameter.empty in options or type(value) in options:
    return value
  if float in options and type(value) is int:
    return float(value)
  words = " or ".join(o.__name__ for o in options if o is not types.NoneType)
  raise ValueError(
    f"{name} must be of type {words}, not {value!r} ({type(value).__name__})"
  )
