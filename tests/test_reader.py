"""The reader: one stack of cells, read out at some steps, for any loss."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

from rnnlab import cells, layers, metrics
from rnnlab.models import reader

B, T, V, H = 3, 7, 5, 4
CELL = {"name": "gru", "recurrent": "identity"}
TOKENS_BT = np.random.default_rng(0).integers(V, size=(B, T), dtype=np.int32)
X_BTV = np.random.default_rng(1).normal(size=(B, T, V))


def make(cell=None, **settings):
  sizes = {"inputs": V, "outputs": 3, "hidden": H}
  return reader.make(**sizes | settings, cell=cell or CELL)


def drawn(model):
  """Parameters with no zeros left, so that nothing is hidden by one."""
  leaves, tree = jax.tree.flatten(jax.eval_shape(model.init, jax.random.key(0)))
  rng = np.random.default_rng(0)
  return tree.unflatten(
    jnp.asarray(rng.normal(size=p.shape), p.dtype) for p in leaves
  )


@pytest.mark.parametrize("embed", [None, 2])
def test_a_token_is_a_one_hot_vector(embed, x64):
  model = make(embed=embed, layers=2)
  params = drawn(model)
  carry, y_BTV = model.apply(params, TOKENS_BT)
  assert y_BTV.shape == (B, T, 3) and len(carry) == 2
  assert_close(model.apply(params, np.eye(V)[TOKENS_BT]), (carry, y_BTV))
  assert ("embed_VD" in params) == bool(embed)
  assert params["cells"][0]["w_GD"].shape == (3 * H, embed or V)


def test_only_what_is_asked_for_is_read_out(x64):
  model = make()
  params = drawn(model)
  carry, all_BTV = model.apply(params, X_BTV)
  for at in (slice(2, 5), slice(T - 1, T)):
    found = model.apply(params, X_BTV, at=at)
    assert_close(found, (carry, all_BTV[:, at]))
  last = jax.make_jaxpr(lambda x: model.apply(params, x, at=at)[1])(X_BTV)
  shown = jax.make_jaxpr(lambda x: model.apply(params, x)[1])(X_BTV)
  assert f"[{B},{T},3]" in str(shown) and f"[{B},{T},3]" not in str(last)


def test_one_cell_serves_a_classification_and_a_regression(x64):
  """Each gradient is the readout's by hand, sent back through the same cell."""
  cell = CELL | {"name": "lstm"}
  classes_B, sums_B = np.array([0, 2, 1]), np.array([0.3, 1.9, -0.4])

  def nll(y_BV):
    return metrics.cross_entropy(y_BV, classes_B).sum()

  def error(y_BV):
    return jnp.square(y_BV[:, 0] - sums_B).sum()

  def by_hand(y_BV, outputs):
    if outputs == 1:
      return 2 * (y_BV - sums_B[:, None])
    e_BV = np.exp(y_BV - y_BV.max(1, keepdims=True))
    return e_BV / e_BV.sum(1, keepdims=True) - np.eye(3)[classes_B]

  for outputs, loss in ((3, nll), (1, error)):
    model = make(cell, outputs=outputs)
    params = drawn(model)

    @jax.jit
    def last(params, model=model):
      return model.apply(params, X_BTV, at=slice(T - 1, T))[1][:, 0]

    stack = (cells.make(hidden=H, **cell),)

    @jax.jit
    def states(own, stack=stack):
      return layers.unroll(stack, own, X_BTV)[1][:, -1]

    grads = jax.jit(jax.grad(lambda p, f=loss, y=last: f(y(p))))(params)
    dy_BV = by_hand(np.asarray(last(params)), outputs)
    h_BH, pull = jax.vjp(states, params["cells"])
    out = {"w_VH": dy_BV.T @ np.asarray(h_BH), "b_V": dy_BV.sum(0)}
    assert_close(grads["out"], out)
    (dcells,) = pull(jnp.asarray(dy_BV @ params["out"]["w_VH"]))
    assert_close(grads["cells"], dcells)


def test_a_chunked_scan_changes_no_gradient(x64):
  plain, chunked = make(embed=2), make(embed=2, chunk=3)
  params = drawn(plain)

  def both(model):
    def loss(params):
      y_BUV = model.apply(params, TOKENS_BT, at=slice(T - 2, T))[1]
      return jnp.sum(jnp.sin(y_BUV))

    return jax.jit(jax.value_and_grad(loss))(params)

  assert_close(both(chunked), both(plain))


def test_an_option_of_the_call_stands_above_the_models_own():
  model = make(chunk=2)
  jaxpr = jax.make_jaxpr(lambda p: model.apply(p, TOKENS_BT)[1])
  other = jax.make_jaxpr(lambda p: model.apply(p, TOKENS_BT, chunk=None)[1])
  params = drawn(model)
  assert "remat" in str(jaxpr(params)) or "checkpoint" in str(jaxpr(params))
  assert "remat" not in str(other(params))


@pytest.mark.parametrize(
  "words, settings",
  [
    ("model.hidden must be at least 1, not 0", {"hidden": 0}),
    ("model.embed must be at least 1, not 0", {"embed": 0}),
    ("model.layers must be at least 1, not -1", {"layers": -1}),
    ("model.chunk must be at least 1, not 0", {"chunk": 0}),
    ("no cell named 'elman'", {"cell": {"name": "elman"}}),
  ],
)
def test_a_wrong_setting_is_refused_by_name(words, settings):
  with pytest.raises(ValueError, match=words):
    make(**settings)
