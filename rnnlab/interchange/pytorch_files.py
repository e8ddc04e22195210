"""PyTorch's nn.RNN, nn.GRU and nn.LSTM, from and to safetensors files.

    read = load("layer.safetensors", {"name": "gru"})
    _, h_BTH = wiring.unroll(read.stack(), read.params, x_BTD)
    save("back.safetensors", read)

The arrays in such a file are those of the layer's state_dict, under its names.
What they do not show, the cell and how its packed weights are to be read, goes
into the file's metadata, under "rnnlab".
"""

import inspect
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rnnlab import cells, interchange, strict_json
from rnnlab.interchange import Convention, safetensors

WEIGHTS, BIASES = ("weight_ih", "weight_hh"), ("bias_ih", "bias_hh")
SUFFIXES = {"forward": "", "backward": "_reverse"}
# Settings of a cell that change what it computes, beside its parameters.
SHOWN = "name", "hidden", "bias", "reset", "activation"


class Layers(NamedTuple):
  """Stacked layers of one kind of cell.

  cell: settings for `cells.make`, with the name. params: a dict of directions
  a layer, as `wiring.init` makes it; of a stack that reads forward
  alone it is `tuple({"forward": own} for own in params)`.
  """

  cell: dict
  params: Any

  def stack(self) -> list:
    """The cells, for `wiring.unroll`."""
    return [cells.make(**self.cell)] * len(self.params)


def load(path, cell: dict | None = None, prefix: str = "") -> Layers:
  """The recurrent layers in a file, all layers and directions.

  cell: what the file does not say. One that `save` wrote says all; of any other
  the arrays are taken for PyTorch's, and cell has to hold its "name" and, of an
  rnn, the "activation"; other settings of the cell may join, and None is none.
  prefix: of the names in a model's file ("encoder.rnn."): the others are left
  alone.

  Float16 and bfloat16 become float32, exactly. Raises ValueError with the path
  and the name for what is missing, left over, of another type or shape, and
  where the file and `cell` disagree.
  """
  arrays, metadata = safetensors.read(path)
  arrays = {
    name.removeprefix(prefix): _wide(f"{path}: {name}", array)
    for name, array in arrays.items()
    if name.startswith(prefix)
  }
  try:
    given = {k: v for k, v in (cell or {}).items() if v is not None}
    return _layers(arrays, metadata, given)
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def save(path, layers: Layers) -> None:
  """Writes layers so that PyTorch's layer of the same sizes loads them.

  Raises ValueError by name for what that layer could not be: another cell, a
  GRU that resets before the product, learned initial carries, a layer of its
  own width or direction. An nn.RNN has to be made with the nonlinearity of the
  cell, which stands in the file's metadata.
  """
  known = _known(layers.cell)
  convention, arrays = interchange.PYTORCH[known["name"]], {}
  for layer, own in enumerate(layers.params):
    alike = {*own} == {*layers.params[0]}
    if not alike or {*own} not in ({"forward"}, {*SUFFIXES}):
      raise ValueError(
        "PyTorch's layers all read forward, or all both ways; layer "
        f"{layer} has {sorted(own)}"
      )
    for way, params in own.items():
      args = known["name"], params, convention, known.get("reset")
      packed = _at(layer, way, interchange.to_packed, *args)
      suffix = _suffix(layer, way)
      arrays |= {name + suffix: array for name, array in packed.items()}
  found = _sizes(arrays)
  for setting in ("hidden", "bias"):
    if known[setting] != found[setting]:
      raise ValueError(
        f"the cell has {setting}={known[setting]}, its parameters "
        f"{found[setting]}"
      )
  about = {"cell": known, "convention": convention._asdict()}
  metadata = {"format": "pt", "rnnlab": strict_json.dumps(about)}
  safetensors.write(path, arrays, metadata)


def _known(cell):
  """What a file says of a cell, defaults too; refuses what PyTorch has not."""
  if cell.get("name") not in interchange.PYTORCH:
    raise ValueError(
      f"PyTorch has layers of {[*interchange.PYTORCH]}, not of "
      f"{cell.get('name')!r}"
    )
  cells.make(**cell)  # refuses what is no setting
  make = inspect.signature(interchange.CELLS[cell["name"]].make)
  defaults = {name: p.default for name, p in make.parameters.items()}
  said = defaults | {k: v for k, v in cell.items() if v is not None}
  return {name: said[name] for name in SHOWN if name in said}


def _layers(arrays, metadata, given):
  known, convention = _told(metadata, given)
  sizes = _sizes(arrays)
  known |= {name: sizes[name] for name in ("hidden", "bias")}
  if convention.reset is not None:
    known["reset"] = convention.reset
  for setting, value in given.items():
    if known.get(setting, value) != value:
      raise ValueError(
        f"it holds a cell with {setting}={known[setting]!r}, not {value!r}"
      )

  def params(layer, way):
    suffix = _suffix(layer, way)
    packed = {
      kind: arrays[kind + suffix]
      for kind in WEIGHTS + BIASES
      if kind + suffix in arrays
    }
    args = known["name"], packed, convention, known.get("reset")
    return _at(layer, way, interchange.from_packed, *args)

  made = tuple(
    {way: params(layer, way) for way in sizes["directions"]}
    for layer in range(sizes["layers"])
  )
  cells.make(**given | known)  # refuses a setting that is none
  return Layers(given | known, made)


def _told(metadata, given):
  """({setting: value}, convention), from the file or from the caller."""
  if "rnnlab" in metadata:
    try:
      about = strict_json.loads(metadata["rnnlab"])
      cell, convention = about["cell"], Convention(**about["convention"])
      if not isinstance(cell["name"], str):
        raise ValueError(f"the name {cell['name']!r}")
    except (ValueError, TypeError, KeyError) as error:
      raise ValueError(
        f"its metadata under 'rnnlab' are damaged: {error!r}"
      ) from error
    return {k: v for k, v in cell.items() if k in SHOWN}, convention
  name = given.get("name")
  if name not in interchange.PYTORCH:
    raise ValueError(
      "it says nothing of its cell: cell={'name': ...} has to be one of "
      f"{[*interchange.PYTORCH]}, not {name!r}"
    )
  if name == "rnn" and "activation" not in given:
    raise ValueError(
      "it holds an rnn and does not say its activation: cell has to"
    )
  return {"name": name}, interchange.PYTORCH[name]


def _sizes(arrays):
  """The sizes of PyTorch's layer with these arrays; refuses others by name."""
  pattern = r"(weight|bias)_[ih]h_l(\d{1,4})(_reverse)?"
  found = [m for name in arrays if (m := re.fullmatch(pattern, name))]
  layers = 1 + max((int(m[2]) for m in found), default=0)
  directions = [*SUFFIXES] if any(m[3] for m in found) else ["forward"]
  bias = any(m[1] == "bias" for m in found)
  ways = [(layer, way) for layer in range(layers) for way in directions]
  kinds = WEIGHTS + BIASES if bias else WEIGHTS
  expected = {kind + _suffix(*own) for kind in kinds for own in ways}
  if missing := sorted(expected - arrays.keys()):
    raise ValueError(f"there is no {', no '.join(missing[:4])}")
  if extra := sorted(arrays.keys() - expected):
    raise ValueError(
      f"there is no place for {', '.join(extra[:4])}: a projected state cannot "
      "be read, and a prefix leaves alone what is no part of the layers"
    )
  for name in sorted(expected):
    if arrays[name].ndim != (2 if name.startswith("weight") else 1):
      raise ValueError(f"{name} has the shape {arrays[name].shape}")
  (width, hidden) = (arrays[f"{kind}_l0"].shape[1] for kind in WEIGHTS)
  for own in ways:
    reads = hidden * len(directions) if own[0] else width
    for kind, columns in zip(WEIGHTS, (reads, hidden), strict=True):
      shape = arrays[name := kind + _suffix(*own)].shape
      if shape[1] != columns:
        raise ValueError(f"{name} has the shape {shape}, not {columns} columns")
  sizes = {"layers": layers, "directions": directions}
  return sizes | {"hidden": hidden, "bias": bias}


def _suffix(layer, way):
  return f"_l{layer}{SUFFIXES[way]}"


def _at(layer, way, convert, *args):
  try:
    return convert(*args)
  except ValueError as error:
    raise ValueError(f"layer {layer}, {way}: {error}") from error


def _wide(name, array):
  """Floats of the width that parameters have; nothing is rounded."""
  if not jnp.issubdtype(array.dtype, jnp.floating):
    raise ValueError(f"{name} is of {array.dtype}; weights are floats")
  if array.dtype == np.float64:
    if not jax.config.jax_enable_x64:
      raise ValueError(
        f"{name} is of float64, which JAX rounds to float32 unless "
        "jax_enable_x64 is set; save it as float32 to say so"
      )
    return array
  return array.astype(np.float32)
