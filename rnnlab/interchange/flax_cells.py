"""The parameters of Flax's own recurrent cells, from and to those of a cell.

All of Flax's cells follow PyTorch's equations. They differ in where they keep
what: a Dense a gate or one for all, and which of them has a bias. The trees are
those of the modules: `variables["params"][...]` of Linen, and
`nnx.to_pure_dict(nnx.state(cell, nnx.Param))`.
"""

from typing import NamedTuple

import numpy as np

from rnnlab import interchange


class Form(NamedTuple):
  """One of Flax's cells: the layers that read x, that read h, with a bias.

  The layers stand in PyTorch's order of the gates, one each or one for all.
  """

  cell: str
  inputs: tuple
  states: tuple
  biased: tuple


_R, _I = ("ir", "iz", "in"), ("ii", "if", "ig", "io")
_LSTM = tuple(f"h{gate}" for gate in "ifgo")
FORMS = {
  "linen.SimpleCell": Form("rnn", ("i",), ("h",), ("i",)),
  "linen.GRUCell": Form("gru", _R, ("hr", "hz", "hn"), (*_R, "hn")),
  "linen.LSTMCell": Form("lstm", _I, _LSTM, _LSTM),
  "linen.OptimizedLSTMCell": Form("lstm", _I, _LSTM, _LSTM),
  "nnx.SimpleCell": Form("rnn", ("dense_i",), ("dense_h",), ("dense_i",)),
  "nnx.GRUCell": Form("gru", ("dense_i",), ("dense_h",), ("dense_i",)),
  "nnx.LSTMCell": Form("lstm", ("ii", "if_", "ig", "io"), _LSTM, _LSTM),
  "nnx.OptimizedLSTMCell": Form(
    "lstm", ("dense_i",), ("dense_h",), ("dense_h",)
  ),
}


def from_flax(which, tree) -> dict:
  """Parameters of a cell from those of one of Flax's, named as in FORMS.

  A GRU is one that resets after the product. The activation is no parameter: a
  SimpleCell with a relu is an rnn with one. Raises ValueError by name for
  another module, and for layers or parameters that it does not have.
  """
  form = _form(which)
  names = form.inputs + form.states
  if {*tree} != {*names}:
    raise ValueError(f"{which} has {sorted(names)}, not {sorted(tree)}")
  arrays = {}
  for side, layers in (("ih", form.inputs), ("hh", form.states)):
    weights, biases = [], []
    for name in layers:
      layer = tree[name]
      own = {"kernel", "bias"} if name in form.biased else {"kernel"}
      if {*layer} != own:
        raise ValueError(
          f"{which}: {name} has {sorted(own)}, not {sorted(layer)}"
        )
      weights.append(np.asarray(layer["kernel"]).T)
      zeros = np.zeros(len(weights[-1]), weights[-1].dtype)
      biases.append(np.asarray(layer.get("bias", zeros)))
    arrays[f"weight_{side}"] = np.concatenate(weights)
    arrays[f"bias_{side}"] = np.concatenate(biases)
  convention = interchange.PYTORCH[form.cell]
  return interchange.from_packed(
    form.cell, arrays, convention, convention.reset
  )


def to_flax(which, cell: dict, params) -> dict:
  """The tree of one of Flax's cells from a cell's parameters.

  cell: its settings, with the name. Raises ValueError by name where the two are
  not the same recurrence, a GRU that resets before the product for one, and for
  the second bias of a GRU's candidate, unless 0, where the module has none.
  """
  form = _form(which)
  if cell["name"] != form.cell:
    raise ValueError(f"{which} is a {form.cell}, not a {cell['name']}")
  convention = interchange.PYTORCH[form.cell]
  reset = cell.get("reset", convention.reset)
  arrays = interchange.to_packed(form.cell, params, convention, reset)
  sides = {"ih": form.inputs, "hh": form.states}
  rows = len(arrays["weight_ih"])
  zeros = np.zeros(rows, arrays["weight_ih"].dtype)
  bias = {side: arrays.get(f"bias_{side}", zeros) for side in sides}
  if not {*form.inputs} & {*form.biased}:
    bias = {"ih": zeros, "hh": bias["ih"] + bias["hh"]}
  tree = {}
  for side, layers in sides.items():
    weights = np.split(arrays[f"weight_{side}"], len(layers))
    for name, own, b in zip(
      layers, weights, np.split(bias[side], len(layers)), strict=True
    ):
      tree[name] = {"kernel": own.T}
      if name in form.biased:
        tree[name]["bias"] = b
      elif b.any():
        raise ValueError(
          f"{which} has no bias in {name}, where bh_H would have to go"
        )
  return tree


def _form(which):
  if which not in FORMS:
    raise ValueError(f"known of Flax are {[*FORMS]}, not {which!r}")
  return FORMS[which]
