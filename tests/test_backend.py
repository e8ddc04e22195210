import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import all_cells, assert_close, draw

from rnnlab import backend, cells, scan

B, D, H, T, V = 3, 2, 5, 7, 4


@pytest.mark.parametrize("settings", all_cells())
@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("by", ["table", "vectors"])
def test_no_backends_tricks_change_a_number(
  settings, chunk, by, monkeypatch, x64
):
  cell = cells.make(hidden=H, **settings)
  params, rng = draw(cell, D), np.random.default_rng(0)
  mask_BT = rng.random((B, T)) < 0.8
  reset_BT = rng.random((B, T)) < 0.2
  options = {"mask_BT": mask_BT, "reset_BT": reset_BT, "chunk": chunk}
  x = jnp.asarray(rng.normal(size=(V, D) if by == "table" else (B, T, D)))
  tokens_BT = jnp.asarray(rng.integers(V, size=(B, T)))

  def loss(params, x):
    x = scan.Lookup(x, tokens_BT) if by == "table" else x
    carry, h_BTH = scan.unroll(cell, params, x, **options)
    return sum(map(jnp.sum, jax.tree.leaves(carry))) + jnp.sum(h_BTH**2)

  found = {}
  for kind in ("cpu", "gpu", "none"):
    monkeypatch.setenv("RNNLAB_TUNE_FOR", kind)
    # A new function, since what was traced before is kept.
    grad = jax.value_and_grad(lambda *args: loss(*args), (0, 1))
    found[kind] = jax.jit(grad)(params, x)
  assert_close(found["gpu"], found["none"], atol=0)
  assert_close(found["cpu"], found["none"], atol=1e-12)


def test_the_backend_is_that_of_jax_unless_told(monkeypatch):
  monkeypatch.delenv("RNNLAB_TUNE_FOR", raising=False)
  assert backend.kind() == jax.default_backend() == "cpu"
  assert backend.gate_by_gate()
  monkeypatch.setenv("RNNLAB_TUNE_FOR", "tpu")
  assert not backend.gate_by_gate()


@pytest.mark.parametrize("V", [1, 28, 128, 129])
def test_what_is_cumulated_is_the_same_by_any_way(V, monkeypatch):
  x_BV = jnp.asarray(np.random.default_rng(V).random((B, V)), jnp.float32)
  exact_BV = np.cumsum(np.asarray(x_BV, np.float64), axis=1)
  for kind in ("cpu", "none"):
    monkeypatch.setenv("RNNLAB_TUNE_FOR", kind)
    found_BV = backend.cumulated(x_BV)
    assert found_BV.dtype == jnp.float32
    np.testing.assert_allclose(found_BV, exact_BV, rtol=1e-6)
    # Rises, so that the first column above a number is the only way past it.
    assert np.all(np.diff(found_BV, axis=1) >= 0)


def test_one_row_without_numbers_spoils_no_other():
  x_BV = jnp.ones((2, 4)).at[0, 2].set(jnp.nan)
  np.testing.assert_array_equal(backend.cumulated(x_BV)[1], [1, 2, 3, 4])
