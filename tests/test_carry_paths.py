"""How much of a state is left after so many steps: what gates are for.

The direct path of a cell is its update with the gates held still. All in
float64, where long products are exact enough to be compared.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import all_cells, assert_close, draw

from rnnlab import cells, gates, scan, stepping

H, D, STEPS = 3, 2, 100

pytestmark = pytest.mark.usefixtures("x64")


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def logit(p):
  return math.log(p / (1 - p))


def still(settings, keep, hidden=H):
  """A cell and its parameters with all weights at 0: the biases act alone."""
  cell = cells.make(hidden=hidden, recurrent="identity", keep=keep, **settings)
  params = cell.init(jax.random.key(0), D)
  return cell, params | {name: 0 * params[name] for name in ("w_GD", "u_GH")}


def memory(carry):
  """The state that is blended: h, or c of the pair (h, c)."""
  return jax.tree.leaves(carry)[-1]


# What is left after 100 steps, where one number says it for all units.
LEFT = [
  ({"kind": "constant", "value": logit(0.99)}, 0.366032),
  ({"kind": "constant", "value": logit(0.95)}, 0.00592053),
  ({"kind": "constant", "value": logit(0.9)}, 2.65614e-5),
  ({"kind": "half_life", "steps": 100.0}, 0.5),
  ({"kind": "half_life", "steps": 50.0}, 0.25),
  ({"kind": "chrono", "t_max": 400.0}, None),
  ({"kind": "uniform"}, None),
]


@pytest.mark.parametrize("settings", all_cells("keep"))
def test_what_is_left_is_a_product_of_what_is_kept(settings):
  cell = cells.make(hidden=H, **settings)

  @jax.jit
  @functools.partial(jax.jacrev, argnums=1)
  def path(params, m_BH):
    leaves, tree = jax.tree.flatten(cell.carry(params, 1))
    carry = tree.unflatten([0.0] * (len(leaves) - 1) + [m_BH])
    x_BTD = jnp.zeros((1, STEPS, D))
    return memory(scan.unroll(cell, params, x_BTD, carry)[0])

  _, key_keep = jax.random.split(jax.random.key(0))
  for keep, left in LEFT:
    _, params = still(settings, keep)
    path_HH = path(params, jnp.full((1, H), 0.3))[0, :, 0]
    keep_H = np.asarray(gates.make(**keep).draw(key_keep, H))
    want_HH = np.diag(sigmoid(keep_H) ** STEPS)
    np.testing.assert_allclose(path_HH, want_HH, rtol=1e-9)
    if left is None:
      assert np.unique(keep_H).size == H
    else:
      np.testing.assert_allclose(path_HH, left * np.eye(H), rtol=2e-6)


@pytest.mark.parametrize(
  "factor, after_50", [(0.9, 0.00515378), (1.1, 117.39085), (0.99, 0.6050061)]
)
def test_sensitivity_over_50_steps(factor, after_50):
  if factor == 0.99:  # z = 0.01 carries by 1 - z
    keep = {"kind": "constant", "value": logit(factor)}
    cell, params = still({"name": "gru"}, keep, hidden=1)
  else:  # tanh' is 1 at 0
    cell = cells.make("rnn", hidden=1, recurrent="identity", scale=factor)
    params = cell.init(jax.random.key(0), D)

  @jax.jit
  @jax.jacrev
  def sensitivity(h_BH):
    _, h_BTH = scan.unroll(cell, params, jnp.zeros((1, 50, D)), h_BH)
    return jnp.concatenate([h_BH, h_BTH[0]])[:, 0]

  found_T = sensitivity(jnp.zeros((1, 1)))[:, 0, 0]
  np.testing.assert_allclose(found_T, factor ** np.arange(51), rtol=1e-12)
  assert float(found_T[-1]) == pytest.approx(after_50, rel=1e-6)


@pytest.mark.parametrize("settings", all_cells("keep"))
def test_the_direct_edge_is_the_whole_only_where_gates_are_still(settings):
  cell = cells.make(hidden=H, **settings)
  m_HB = jnp.linspace(-1, 1, H)[:, None]

  def carry_of(m_HB):
    if settings["name"] != "lstm":
      return m_HB
    return 0.4 * jnp.tanh(m_HB), m_HB  # h = o tanh(c), with o as it was

  @jax.jit
  def edges(params):
    u_GB = cell.project(params, jnp.ones((D, 1)))
    weights = cell.weights(params, False)
    a = stepping.drive(cell, weights, None, carry_of(m_HB), u_GB)

    def direct(m_HB):
      return memory(cell.update(carry_of(m_HB), a, None)[0])

    def whole(m_HB):
      return memory(stepping.step(cell, params, carry_of(m_HB), u_GB)[0])

    both = jax.jacrev(direct)(m_HB), jax.jacrev(whole)(m_HB)
    return jax.tree.map(lambda d: d[:, 0, :, 0], both)

  params = draw(cell, D)
  direct_HH, whole_HH = edges(params)
  kept_H = np.diag(direct_HH)
  assert_close(direct_HH, np.diag(kept_H), atol=0)
  assert np.all((kept_H > 0) & (kept_H < 1))
  assert np.abs(whole_HH - direct_HH).max() > 0.05
  direct_HH, whole_HH = edges(params | {"u_GH": 0 * params["u_GH"]})
  assert_close(whole_HH, direct_HH)


def test_the_whole_derivative_of_the_lstm_memory_by_hand():
  cell = cells.make("lstm", hidden=H)
  params = draw(cell, D)
  c_H, o_H, x_D = np.linspace(-1, 1, H), np.array([0.2, 0.5, 0.9]), np.ones(D)

  def step(c_H):
    carry = (o_H[:, None] * jnp.tanh(c_H)[:, None], c_H[:, None])
    u_GB = cell.project(params, x_D[:, None])
    return stepping.step(cell, params, carry, u_GB)[0][1][:, 0]

  names = "w_GD", "u_GH", "b_G"
  w, u, b = (np.split(np.asarray(params[name]), 4) for name in names)
  h_H = o_H * np.tanh(c_H)
  i, f, q, _ = (w[k] @ x_D + u[k] @ h_H + b[k] for k in range(4))
  i, f, q = sigmoid(i), sigmoid(f), np.tanh(q)
  through_h = (
    np.diag(c_H * f * (1 - f)) @ u[1]
    + np.diag(q * i * (1 - i)) @ u[0]
    + np.diag(i * (1 - q**2)) @ u[2]
  ) @ np.diag(o_H * (1 - np.tanh(c_H) ** 2))
  assert_close(jax.jit(jax.jacrev(step))(c_H), np.diag(f) + through_h)
