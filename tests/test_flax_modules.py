"""A cell inside a user's own Flax model does what `scan.unroll` does."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import all_cells, assert_close, exhaustive_but
from flax import linen, nnx

from rnnlab import cells, layers, scan
from rnnlab.flax_modules import LinenUnroll, NNXUnroll

B, T, D, E, H, V = 3, 6, 2, 4, 3, 5
RATE = 0.1
X_BTD = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
MASK_BT = np.array([[1, 1, 0, 1, 1, 1], [1, 1, 1, 1, 1, 0], [0] * T], bool)
RESET_BT = np.zeros((B, T), bool)
RESET_BT[:2, [2, 5]] = RESET_BT[0, 3] = True


def in_two_calls(below, layer, top):
  """A model's loss: the layer is called twice, and reads NaN as padding."""
  x_BTE = jnp.where(MASK_BT[..., None], below(X_BTD), jnp.nan)
  carry, parts = None, []
  for at in (slice(0, 3), slice(3, T)):
    flags = {"mask_BT": MASK_BT[:, at], "reset_BT": RESET_BT[:, at]}
    carry, h_BTH = layer(x_BTE[:, at], carry, **flags)
    parts.append(h_BTH)
  return loss(carry, top(jnp.concatenate(parts, axis=1)))


def loss(carry, y_BTV):
  return sum(jnp.sum(jnp.sin(a + 0.5)) for a in jax.tree.leaves((carry, y_BTV)))


class LinenModel(linen.Module):
  cell: cells.Cell

  @linen.compact
  def __call__(self):
    below, top = linen.Dense(E, name="below"), linen.Dense(V, name="top")
    layer = LinenUnroll(self.cell, name="layer")
    return in_two_calls(below, layer, top)


class NNXModel(nnx.Module):
  def __init__(self, cell, rngs):
    self.below = nnx.Linear(D, E, rngs=rngs)
    self.layer = NNXUnroll(cell, E, rngs=rngs)
    self.top = nnx.Linear(H, V, rngs=rngs)

  def __call__(self):
    return in_two_calls(self.below, self.layer, self.top)


def descended(loss, params):
  """The loss and the parameters after one step down its gradient."""

  def step(params):
    value, grads = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - RATE * g, params, grads)

  return jax.jit(step)(params)


@pytest.fixture(scope="module")
def functional():
  """settings -> cell, parameters, and the step in one plain pass; made once."""
  made = {}

  def of(settings):
    if str(settings) not in made:
      cell = cells.make(hidden=H, initial="learned", **settings)
      made[str(settings)] = cell, *plain_step(cell)
    return made[str(settings)]

  return of


def plain_step(cell):
  rng = np.random.default_rng(2)
  params = jax.tree.map(
    lambda p: rng.normal(size=p.shape, scale=0.5).astype(np.float32),
    jax.eval_shape(LinenModel(cell).init, jax.random.key(0))["params"],
  )

  def affine(params, x):
    return x @ params["kernel"] + params["bias"][None, None]

  def plain(params):
    x_BTE = affine(params["below"], X_BTD)
    flags = {"mask_BT": MASK_BT, "reset_BT": RESET_BT}
    carry, h_BTH = scan.unroll(
      cell, params["layer"]["cell"], x_BTE, bptt="autodiff", **flags
    )
    return loss(carry, affine(params["top"], h_BTH))

  return params, *descended(plain, params)


@pytest.mark.parametrize("settings", exhaustive_but(["lstm"], all_cells()))
def test_a_step_of_a_linen_model(settings, functional):
  cell, params, value, new = functional(settings)
  model = LinenModel(cell)
  found = descended(lambda p: model.apply({"params": p}), params)
  assert_close(found, (value, new), atol=1e-5)


@pytest.mark.parametrize("settings", exhaustive_but(["lstm"], all_cells()))
def test_a_step_of_an_nnx_model(settings, functional):
  cell, params, value, new = functional(settings)
  model = NNXModel(cell, nnx.Rngs(0))
  layer = {"params": params["layer"]["cell"]}
  nnx.update(model, params | {"layer": layer})
  optimizer = nnx.Optimizer(model, optax.sgd(RATE), wrt=nnx.Param)

  @nnx.jit
  def step(model, optimizer):
    value, grads = nnx.value_and_grad(lambda model: model())(model)
    optimizer.update(model, grads)
    return value

  assert_close(step(model, optimizer), value, atol=1e-5)
  found = nnx.to_pure_dict(nnx.state(model, nnx.Param))
  found["layer"] = {"cell": found["layer"]["params"]}
  assert_close(found, new, atol=1e-5)


def made(kind, cell, d_in, **options):
  """A layer as (x, ...) -> carry, out, and the parameters it has drawn."""
  if kind == "nnx":
    layer = NNXUnroll(cell, d_in, rngs=nnx.Rngs(0), **options)
    return layer, nnx.to_pure_dict(nnx.state(layer))["params"]
  layer = LinenUnroll(cell, **options)
  variables = layer.init(jax.random.key(0), jnp.zeros((1, 1, d_in)))
  return layer.bind(variables), variables["params"]["cell"]


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_all_that_unroll_takes_arrives(kind, monkeypatch):
  signature = inspect.signature(scan.unroll)
  given = {name: object() for name in signature.parameters} | {"x": X_BTD}
  given["cell"], seen = cells.make("rnn", hidden=H), {}

  def record(*args, **options):
    seen.update(signature.bind(*args, **options).arguments)

  monkeypatch.setattr(scan, "unroll", record)
  asked = {name: given[name] for name in ("reverse", "chunk", "unroll", "bptt")}
  layer, given["params"] = made(kind, given["cell"], D, **asked)
  layer(
    **{
      name: value
      for name, value in given.items()
      if name not in {"cell", "params", *asked}
    }
  )
  assert_close(seen.pop("params"), given.pop("params"), atol=0)
  assert seen == given


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_a_stack_reads_the_rows_of_a_table(kind):
  stack = [cells.make(name, hidden=H) for name in ("lstm", "gru")]
  cell = layers.as_cell(stack)
  table_VD = jnp.linspace(-1, 1, V * D).reshape(V, D)
  tokens_BT = np.arange(B * T).reshape(B, T) % V
  layer, params = made(kind, cell, D)
  assert jax.tree.structure(tuple(params[i] for i in range(2))) == (
    jax.tree.structure(cell.init(jax.random.key(0), D))
  )
  x = scan.Lookup(table_VD, tokens_BT)
  params = tuple(params[i] for i in range(2))
  expected = scan.unroll(cell, params, x, reverse=True)
  layer, _ = made(kind, cell, D, reverse=True)
  assert_close(layer(x), expected, atol=1e-6)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_what_is_refused_is_named(kind):
  layer, _ = made(kind, cells.make("rnn", hidden=H), D)
  with pytest.raises(ValueError, match="mask_BT"):
    layer(X_BTD, mask_BT=MASK_BT[:, 1:])
