"""Stacks: over all of time layer by layer, or as one cell step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import all_cells, assert_close, compiled, draw, rows

from rnnlab import cells, layers, scan, stepping

D, B, T = 2, 3, 5
X_BTD = np.random.default_rng(0).normal(size=(B, T, D))
FLAGS = {
  "mask_BT": np.array([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1], [0] * 5], bool),
  "reset_BT": np.array([[0, 1, 0, 1, 0], [1, 0, 0, 1, 0], [1] * 5], bool),
}
MIXED = [
  {"name": "lstm", "hidden": 3},
  {"name": "gru", "hidden": 4, "reset": "before"},
  {"name": "rnn", "hidden": 2},
  {"name": "gru", "hidden": 3},
]


def setup(*settings):
  stack = [cells.make(initial="learned", **each) for each in settings]
  cell = layers.as_cell(stack)
  params = draw(cell, D)
  return stack, cell, params, rows(cell, params, B)


@pytest.mark.parametrize("settings", all_cells())
def test_one_cell_of_all_layers_is_layer_by_layer(settings, x64):
  two = [{"hidden": hidden, **settings} for hidden in (3, 4)]
  stack, cell, params, carry = setup(*two)
  assert_close(
    jax.jit(lambda p: scan.unroll(cell, p, X_BTD, carry, **FLAGS))(params),
    jax.jit(lambda p: layers.unroll(stack, p, X_BTD, carry, **FLAGS))(params),
  )


def test_its_gradients_are_those_layer_by_layer(x64):
  stack, cell, params, carry = setup(*MIXED[:3])

  def loss(params, x_BTD, carry):
    both = layers.unroll(stack, params, x_BTD, carry, **FLAGS)
    leaves = jax.tree.leaves(both)
    return sum(jnp.sum(jnp.sin(leaf + 0.5)) for leaf in leaves), both

  grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
  (dparams, dx, dcarry), (final, h_BTH) = grads(params, X_BTD, carry)
  expected = {
    "final": final, "out": h_BTH,
    "dparams": dparams, "dx": dx, "dcarry": dcarry,
  }  # fmt: skip
  for options in ({}, {"bptt": "autodiff"}):
    run = compiled(cell, **FLAGS, **options)
    assert_close(run(params, X_BTD, carry), expected)


def test_one_cell_steps_through_all_layers(x64):
  stack, cell, params, carry = setup(*MIXED)
  _, expected = layers.unroll(stack, params, X_BTD, carry)
  c, outs = jax.tree.map(jnp.transpose, carry), []
  for x_BD in np.swapaxes(X_BTD, 0, 1):
    c, out = stepping.step(cell, params, c, cell.project(params, x_BD.T))
    outs.append(out.T)
  assert_close(jnp.stack(outs, 1), expected)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_output_depends_on_its_prefix_alone(depth, x64):
  stack, cell, params, _ = setup(*MIXED[:depth])
  runs = [
    lambda x: layers.unroll(stack, params, x)[1][0],
    lambda x: scan.unroll(cell, params, x)[1][0],
  ]
  for run in runs:
    # d out_t / d x_s, for one row.
    jacobian = jax.jit(jax.jacrev(run))(X_BTD[:1])[:, :, 0]
    seen_TT = np.abs(jacobian).max((1, 3)) > 0
    assert np.array_equal(seen_TT, np.tril(np.ones((T, T), bool)))


def test_between_is_applied_to_every_output_and_to_no_carry(x64):
  stack, _, params, carry = setup(*MIXED[:2])
  seen = []

  def between(layer, h_BTH):
    seen.append((layer, h_BTH.shape))
    return (layer + 2) * h_BTH

  final, h_BTH = layers.unroll(stack, params, X_BTD, carry, between=between)
  assert seen == [(0, (B, T, 3)), (1, (B, T, 4))]
  first, below_BTH = scan.unroll(stack[0], params[0], X_BTD, carry[0])
  second, top_BTH = scan.unroll(stack[1], params[1], 2 * below_BTH, carry[1])
  assert_close((final, h_BTH), ((first, second), 3 * top_BTH))


def test_a_lookup_feeds_the_first_layer(x64):
  stack, _, params, carry = setup(*MIXED[:2])
  table_VD = np.random.default_rng(1).normal(size=(4, D))
  tokens_BT = np.random.default_rng(2).integers(4, size=(B, T))
  assert_close(
    layers.unroll(stack, params, scan.Lookup(table_VD, tokens_BT), carry),
    layers.unroll(stack, params, table_VD[tokens_BT], carry),
  )


def test_each_layer_has_its_own_parameters():
  stack = [cells.make("rnn", hidden=4)] * 3
  params = layers.init(stack, jax.random.key(0), 4)
  assert np.abs(params[1]["u_GH"] - params[2]["u_GH"]).max() > 0.1
  params = layers.init(stack, jax.random.key(0), 2)
  assert [p["w_GD"].shape for p in params] == [(4, 2), (4, 4), (4, 4)]
