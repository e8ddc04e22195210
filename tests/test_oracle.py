"""Other implementations of the same cells, with the same weights."""

import jax
import numpy as np
import pytest
from conftest import assert_close, draw
from flax import linen, nnx

from rnnlab import cells, interchange, scan, wiring
from rnnlab.interchange import PYTORCH, flax_cells, pytorch_files, safetensors

H, D, B, T = 6, 4, 3, 9
X_BTD = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)


def flax_layer(which):
  """(shapes of one of Flax's cells, (its parameters) -> carry, outputs)."""
  side, name = which.split(".")
  if side == "linen":
    network = linen.RNN(getattr(linen, name)(H), return_carry=True)
    variables = jax.eval_shape(network.init, jax.random.key(0), X_BTD)
    ((inside, tree),) = variables["params"].items()
    return tree, lambda p: network.apply({"params": {inside: p}}, X_BTD)
  rngs = nnx.Rngs(0)
  cell = getattr(nnx, name)(D, H, rngs=rngs)

  def run(params):
    nnx.update(cell, params)
    return nnx.RNN(cell, return_carry=True, rngs=rngs)(X_BTD)

  return nnx.to_pure_dict(nnx.state(cell, nnx.Param)), run


@pytest.mark.parametrize("which", flax_cells.FORMS)
def test_flax(which):
  shapes, run = flax_layer(which)
  rng = np.random.default_rng(1)
  theirs = jax.tree.map(
    lambda a: rng.normal(size=a.shape, scale=0.4).astype(np.float32), shapes
  )
  carry, h_BTH = run(theirs)
  params = flax_cells.from_flax(which, theirs)
  settings = {"name": flax_cells.FORMS[which].cell, "hidden": H}
  last, ours_BTH = scan.unroll(cells.make(**settings), params, X_BTD)
  np.testing.assert_allclose(ours_BTH, h_BTH, atol=1e-5)
  if settings["name"] == "lstm":
    carry = carry[::-1]  # Flax's pair is (c, h).
  for a, b in zip(jax.tree.leaves(last), jax.tree.leaves(carry), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)
  assert_close(flax_cells.to_flax(which, settings, params), theirs, atol=0)


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


@pytest.mark.parametrize("name", PYTORCH)
def test_pytorch_reads_what_it_wrote(name, tmp_path):
  reason = "PyTorch is no dependency, only an oracle where it is installed"
  torch = pytest.importorskip("torch", reason=reason)
  given = {"name": name} | ({"activation": "relu"} if name == "rnn" else {})
  options = {"nonlinearity": "relu"} if name == "rnn" else {}

  def made():
    layer = getattr(torch.nn, name.upper())
    return layer(
      D, H, 2, batch_first=True, bidirectional=True, **options
    ).eval()

  def outputs(layer):
    with torch.no_grad():
      return layer(torch.from_numpy(X_BTD))[0].numpy()

  layer, there, back = made(), tmp_path / "there", tmp_path / "back"
  arrays = {k: a.numpy() for k, a in layer.state_dict().items()}
  safetensors.write(there, arrays, {"format": "pt"})
  read = pytorch_files.load(there, given)
  _, h_BTH = wiring.unroll(read.stack(), read.params, X_BTD)
  np.testing.assert_allclose(h_BTH, outputs(layer), atol=1e-6)
  pytorch_files.save(back, read)
  other, (arrays, _) = made(), safetensors.read(back)
  other.load_state_dict({k: torch.from_numpy(a) for k, a in arrays.items()})
  np.testing.assert_allclose(outputs(other), outputs(layer), atol=1e-6)
