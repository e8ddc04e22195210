"""What a language model drops in training: symbols, outputs, states, weights.

The rates have the names of the settings of `lm.make`, which says what each is.
"""

from typing import Any, NamedTuple

import jax

from rnnlab import nn


class Drops(NamedTuple):
  """All that one update drops, each from a key of its own; None: nothing."""

  key: Any
  rates: dict
  locked: bool

  def of(self, name, layer):
    """The key for one kind at one layer, or None where nothing is dropped."""
    if self.key is None or not self.rates[name]:
      return None
    # The outputs' own numbers are those of the layers.
    kind = {"embed_dropout": -1, "state_dropout": -2, "weight_dropout": -3}
    key = self.key
    if name in kind:
      key = jax.random.fold_in(key, 2**32 + kind[name])
    return jax.random.fold_in(key, layer)

  def symbols(self, table_VD):
    key = self.of("embed_dropout", 0)
    if key is None:
      return table_VD
    shape = len(table_VD), 1
    return table_VD * nn.kept(key, shape, self.rates["embed_dropout"])

  def weights(self, layer, params):
    key = self.of("weight_dropout", layer)
    if key is None:
      return params
    u_GH, rate = params["u_GH"], self.rates["weight_dropout"]
    return params | {"u_GH": u_GH * nn.kept(key, u_GH.shape, rate)}

  def states(self, layers, hidden, batch):
    keys = [self.of("state_dropout", layer) for layer in range(layers)]
    if keys[0] is None:
      return None
    rate = self.rates["state_dropout"]
    return [nn.kept(key, (hidden, batch), rate) for key in keys]

  def outputs(self, layers, layer, h_BTH):
    name = "out_dropout" if layer == layers - 1 else "dropout"
    key = self.of(name, layer)
    return nn.dropout(key, h_BTH, self.rates[name], self.locked)
