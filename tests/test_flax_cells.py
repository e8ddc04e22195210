"""What Flax's cells cannot be, and what is none of theirs, is refused by name.

That the others compute alike is tested against Flax itself, with the oracles.
"""

import jax
import numpy as np
import pytest
from conftest import assert_close, draw

from rnnlab import cells
from rnnlab.interchange.flax_cells import FORMS, from_flax, to_flax

H, D = 3, 2


def drawn(**settings):
  settings |= {"hidden": H}
  return settings, draw(cells.make(**settings), D)


@pytest.mark.parametrize("which", FORMS)
@pytest.mark.parametrize("bias", [True, False])
def test_there_and_back(which, bias):
  cell, params = drawn(name=FORMS[which].cell, bias=bias)
  if which == "nnx.GRUCell" and bias:
    params["bh_H"] = 0 * params["bh_H"]
  params = jax.tree.map(np.asarray, params)
  back = from_flax(which, to_flax(which, cell, params))
  # Flax's cells always have biases: without one they are 0.
  biases = {k: 0 * a for k, a in back.items() if k.startswith("b")}
  assert_close(back, params if bias else params | biases, atol=0)


@pytest.mark.parametrize(
  "which, settings, words",
  [
    ("linen.MGUCell", {"name": "gru"}, "'linen.MGUCell'"),
    ("linen.GRUCell", {"name": "ugrnn"}, "linen.GRUCell is a gru.*ugrnn"),
    ("linen.GRUCell", {"name": "gru", "reset": "before"}, "'after'.*'before'"),
    (
      "nnx.GRUCell",
      {"name": "gru"},
      "nnx.GRUCell has no bias in dense_h.*bh_H",
    ),
    ("nnx.SimpleCell", {"name": "rnn", "initial": "learned"}, "h0_H"),
  ],
)
def test_what_flax_cannot_be(which, settings, words):
  with pytest.raises(ValueError, match=words):
    to_flax(which, *drawn(**settings))


def test_a_tree_of_another_module():
  cell, params = drawn(name="lstm")
  tree = to_flax("linen.LSTMCell", cell, params)
  with pytest.raises(ValueError, match="nnx.LSTMCell has.*'if_'.*not.*'if'"):
    from_flax("nnx.LSTMCell", tree)
  del tree["hf"]["bias"]
  with pytest.raises(
    ValueError, match=r"LSTMCell: hf has \['bias', 'kernel'\]"
  ):
    from_flax("linen.LSTMCell", tree)
