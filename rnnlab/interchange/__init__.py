"""Packed recurrent weights from and to other libraries, conventions carried.

Nothing in a packed array shows the order of its gates, which side its update
gate keeps or where its reset gate acts. So a `Convention` says it, and what
cannot be converted exactly is refused. Here are the arrays of one layer;
`pytorch_files` has whole layers in files, `flax_cells` Flax's own cells.
"""

from typing import NamedTuple

import numpy as np

from rnnlab import gates, shapes
from rnnlab.cells import gru, lstm, rnn, ugrnn

CELLS = {"rnn": rnn, "ugrnn": ugrnn, "gru": gru, "lstm": lstm}


class Convention(NamedTuple):
  """How packed weights are to be read, in the letters of the cell's GATES.

  order: one letter a block of rows; q and c are the candidates, which others
  call g and n. update: what the gate z multiplies, the old state ("keeps") or
  the candidate ("replaces"). reset: whether r acts "before" the product with
  the state or "after" it. None where the cell has no such gate.
  """

  order: str
  update: str | None = None
  reset: str | None = None


PYTORCH = {
  "rnn": Convention("h"),
  "gru": Convention("rzc", update="keeps", reset="after"),
  "lstm": Convention("ifqo"),
}


def from_packed(name, arrays, convention, reset=None) -> dict:
  """Parameters of the cell `name` from the packed arrays of one layer.

  arrays: weight_ih [G, D], weight_hh [G, H] and either both of bias_ih and
  bias_hh [G] or neither: the names of a PyTorch state_dict, less the `_l0`.
  reset: that of the GRU cell which is to use the parameters.

  Blocks are reordered and the rows of z negated where it keeps, both exactly.
  The two biases are summed, but for the candidate of a GRU that resets after
  the product: there r scales the second one. Raises ValueError where the
  resets differ, as neither can be written as the other, and for an order of
  other gates, other names or other shapes.
  """
  order = _order(name, convention, reset)
  arrays = {key: np.asarray(a) for key, a in arrays.items()}
  _check_names(arrays, {"weight_ih", "weight_hh"}, {"bias_ih", "bias_hh"})
  letters = {"weight_ih": "GD", "weight_hh": "GH"}
  _check(order, {f"{k}_{letters.get(k, 'G')}": a for k, a in arrays.items()})
  for key, packed in arrays.items():
    arrays[key] = _convert(packed, convention.order, order, convention)
  params = {"w_GD": arrays["weight_ih"], "u_GH": arrays["weight_hh"]}
  if "bias_ih" in arrays:
    if reset == "after":
      candidate_H = _block(arrays["bias_hh"], order, "c")
      params["bh_H"] = candidate_H.copy()
      candidate_H[:] = 0
    params["b_G"] = arrays["bias_ih"] + arrays["bias_hh"]
  return params


def to_packed(name, params, convention, reset=None) -> dict:
  """The packed arrays of a cell's parameters: the inverse of `from_packed`.

  Biases come out in bias_ih, with bias_hh 0 where r does not scale it. Raises
  ValueError as `from_packed` does, and for parameters that the arrays have no
  place for (a learned initial carry).
  """
  order = _order(name, convention, reset)
  params = {key: np.asarray(a) for key, a in params.items()}
  biases = {"b_G", "bh_H"} if reset == "after" else {"b_G"}
  _check_names(params, {"w_GD", "u_GH"}, biases)
  _check(order, params)
  arrays = {"weight_ih": params["w_GD"], "weight_hh": params["u_GH"]}
  if "b_G" in params:
    arrays["bias_ih"] = params["b_G"]
    arrays["bias_hh"] = np.zeros_like(params["b_G"])
    if reset == "after":
      _block(arrays["bias_hh"], order, "c")[:] = params["bh_H"]
  for key, packed in arrays.items():
    arrays[key] = _convert(packed, order, convention.order, convention)
  return arrays


def _order(name, convention, reset):
  """The cell's own gate order; refuses a convention it cannot be read in."""
  if name not in CELLS:
    raise ValueError(f"packed weights are known for {[*CELLS]}, not {name!r}")
  order = CELLS[name].GATES
  if sorted(convention.order) != sorted(order):
    raise ValueError(
      f"convention.order of a {name} holds the gates {order!r}, in any order, "
      f"not {convention.order!r}"
    )
  words = {"update": ("keeps", "replaces"), "reset": ("before", "after")}
  for field, gate in (("update", "z"), ("reset", "r")):
    value = getattr(convention, field)
    allowed = words[field] if gate in order else (None,)
    if value not in allowed:
      raise ValueError(
        f"convention.{field} of a {name} is one of {allowed}, not {value!r}"
      )
  if reset != convention.reset:
    raise ValueError(
      f"the packed weights reset {convention.reset!r} the product, the cell "
      f"{reset!r}: neither can be converted into the other"
    )
  return order


def _check_names(given, weights, biases):
  if set(given) not in (weights, weights | biases):
    raise ValueError(
      f"packed weights are {sorted(weights)}, with all of {sorted(biases)} or "
      f"none, not {sorted(given)}"
    )


def _check(order, arrays):
  sizes = shapes.check(**arrays)
  if sizes["G"] != len(order) * sizes["H"]:
    raise ValueError(
      f"{sizes['G']} rows are not {len(order)} gates {order!r} of "
      f"{sizes['H']} hidden units"
    )


def _convert(packed, order, to, convention):
  packed = np.array(gates.reorder(packed, order, to))
  if convention.update == "keeps":
    # 1 - sigmoid(z) is sigmoid(-z), so keeping becomes replacing by the sign.
    _block(packed, to, "z")[:] *= -1
  return packed


def _block(packed, order, gate):
  """The rows of one gate, as a view."""
  return np.split(packed, len(order))[order.index(gate)]
