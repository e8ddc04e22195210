"""Other implementations of the same cells, with the same weights."""

import jax
import numpy as np
import pytest
from conftest import draw
from flax import linen

from rnnlab import cells, interchange, scan
from rnnlab.interchange import PYTORCH, Convention

H, D, B, T = 6, 4, 3, 9
X_BTD = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)

# Linen keeps one Dense a gate: its names from the input and from the state, in
# the order of the convention beside them.
LINEN = {
  "rnn": (linen.SimpleCell, [("i", "h")], PYTORCH["rnn"]),
  "gru": (
    linen.GRUCell,
    [("ir", "hr"), ("iz", "hz"), ("in", "hn")],
    PYTORCH["gru"],
  ),
  "lstm": (
    linen.LSTMCell,
    [(f"i{g}", f"h{g}") for g in "ifgo"],
    PYTORCH["lstm"],
  ),
  "lstm-optimized": (
    linen.OptimizedLSTMCell,
    [(f"i{g}", f"h{g}") for g in "gofi"],
    Convention("qofi"),
  ),
}


def packed(dense, names):
  """Kernels as rows, and the biases, of Linen's layers, one below the other."""
  kernels = [dense[name]["kernel"].T for name in names]
  biases = [dense[name].get("bias", np.zeros(H)) for name in names]
  return np.concatenate(kernels), np.concatenate(biases)


@pytest.mark.parametrize("which", LINEN)
def test_linen(which):
  linen_cell, gates, convention = LINEN[which]
  network = linen.RNN(linen_cell(H), return_carry=True)
  shapes = network.init(jax.random.key(0), X_BTD)
  rng = np.random.default_rng(1)
  variables = jax.tree.map(
    lambda a: rng.normal(size=a.shape, scale=0.4).astype(np.float32), shapes
  )
  carry, h_BTH = network.apply(variables, X_BTD)
  (dense,) = variables["params"].values()
  arrays = {}
  for side, names in zip(("ih", "hh"), zip(*gates, strict=True), strict=True):
    arrays[f"weight_{side}"], arrays[f"bias_{side}"] = packed(dense, names)
  name = which.split("-")[0]
  params = interchange.from_packed(name, arrays, convention, convention.reset)
  last, ours_BTH = scan.unroll(cells.make(name, hidden=H), params, X_BTD)
  np.testing.assert_allclose(ours_BTH, h_BTH, atol=1e-5)
  if name == "lstm":
    carry = carry[::-1]  # Linen's pair is (c, h).
  for a, b in zip(jax.tree.leaves(last), jax.tree.leaves(carry), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("name", PYTORCH)
@pytest.mark.parametrize("bias", [True, False])
def test_pytorch(name, bias):
  reason = "PyTorch is no dependency, only an oracle where it is installed"
  torch = pytest.importorskip("torch", reason=reason)
  layer = getattr(torch.nn, name.upper())(D, H, batch_first=True, bias=bias)
  reset = PYTORCH[name].reset
  cell = cells.make(name, hidden=H, bias=bias)

  def agree(params):
    with torch.no_grad():
      h_BTH, carry = layer(torch.from_numpy(X_BTD))
    last, ours_BTH = scan.unroll(cell, params, X_BTD)
    np.testing.assert_allclose(ours_BTH, h_BTH.numpy(), atol=1e-5)
    carry = carry if name == "lstm" else [carry]
    for a, b in zip(jax.tree.leaves(last), carry, strict=True):
      np.testing.assert_allclose(a, b[0].numpy(), atol=1e-5)

  arrays = {
    key.removesuffix("_l0"): value.numpy()
    for key, value in layer.state_dict().items()
  }
  agree(interchange.from_packed(name, arrays, PYTORCH[name], reset))
  params = draw(cell, D)
  exported = interchange.to_packed(name, params, PYTORCH[name], reset)
  layer.load_state_dict(
    {f"{key}_l0": torch.from_numpy(a) for key, a in exported.items()}
  )
  agree(params)
