"""Slow points: where they are known, and what holds wherever they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import all_cells, assert_close, exhaustive_but
from test_retention import drawn

from rnnlab import cells, layers, stepping
from rnnlab.analysis import fixed_points

H, D = 3, 2


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def test_a_bistable_unit_rests_at_three_places(x64):
  """tanh(2h): at 0, which it leaves by a factor of 2, and on both sides."""
  cell = cells.make("rnn", hidden=1, bias=False)
  params = {"w_GD": jnp.ones((1, 1)), "u_GH": jnp.full((1, 1), 2.0)}
  x_BTD = np.random.default_rng(0).normal(size=(8, 5, 1))
  r = layers.Recurrence("one", cell, params, jnp.asarray(x_BTD))
  found = fixed_points.find(r, starts=40, steps=300)
  order = np.argsort(found.state_PN[:, 0])
  rest = 0.9575040240772687  # h = tanh(2h)
  points = found.state_PN[order, 0]
  assert_close(points, np.array([-rest, 0, rest]), atol=1e-10)
  assert (found.speed_P < 1e-10).all() and found.starts_P.sum() == 40
  values = found.eigenvalues_PN[order, 0]
  side = 2 * (1 - rest**2)
  assert_close(values.real, np.array([side, 2, side]), atol=1e-9)
  assert np.abs(values.imag).max() == 0


@pytest.mark.parametrize(
  "settings", exhaustive_but(["lstm"], all_cells("keep"))
)
def test_gates_that_read_no_state_rest_where_the_candidate_is(settings, x64):
  """And what is displaced comes back by the keep gate's share a step."""
  cell = cells.make(hidden=H, **settings)
  params = drawn(lambda key: cell.init(key, D))
  params["u_GH"] = 0 * params["u_GH"]
  held_D = np.array([0.5, -1.0])
  x_BTD = jnp.asarray(np.random.default_rng(0).normal(size=(2, 6, D)))
  read = layers.Recurrence("one", cell, params, x_BTD)
  found = fixed_points.find(read, starts=6, steps=50, x_D=held_D)
  u_G = np.asarray(params["w_GD"] @ held_D + params["b_G"])
  blocks = u_G.reshape(-1, H)
  if settings["name"] == "lstm":
    i, f, q, o = blocks
    c = sigmoid(i) * np.tanh(q) / (1 - sigmoid(f))
    state_N = np.concatenate([sigmoid(o) * np.tanh(c), c])
    keep = np.concatenate([sigmoid(f), np.zeros(H)])
  else:
    *r, z, c = blocks
    if settings.get("reset") == "after":
      c = c + sigmoid(r[0]) * params["bh_H"]
    state_N, keep = np.tanh(c), 1 - sigmoid(z)
  assert_close(found.state_PN, state_N[None], atol=1e-9)
  assert found.starts_P.tolist() == [6]
  values = np.sort(found.eigenvalues_PN[0].real)
  assert_close(values, np.sort(keep), atol=1e-9)


@pytest.mark.parametrize(
  "settings", exhaustive_but(["gru-before"], all_cells())
)
def test_points_are_as_slow_as_they_say(settings, x64):
  cell = cells.make(hidden=H, **settings)
  params = drawn(lambda key: cell.init(key, D))
  x_BTD = np.random.default_rng(0).normal(size=(3, 6, D))
  mask_BT = np.arange(6)[None] < np.array([[6], [0], [2]])
  x_BTD = np.where(mask_BT[..., None], x_BTD, np.nan)
  r = layers.Recurrence("one", cell, params, jnp.asarray(x_BTD))
  found = fixed_points.find(r._replace(mask_BT=mask_BT), starts=9, steps=50)
  assert len(found.visited_MN) == 8 and np.isfinite(found.visited_MN).all()
  assert (np.diff(found.speed_P) >= 0).all() and found.starts_P.sum() == 9
  like = cell.carry(params, 1)
  _, back = jax.flatten_util.ravel_pytree(like)

  @jax.jit
  def step(state_N):
    u_GB = cell.project(params, jnp.zeros((D, 1)))
    new, _ = stepping.step(cell, params, back(state_N), u_GB)
    return jax.flatten_util.ravel_pytree(new)[0]

  for p, state_N in enumerate(found.state_PN):
    speed = np.linalg.norm(step(state_N) - state_N)
    assert found.speed_P[p] == pytest.approx(speed, abs=1e-12)
    values = np.linalg.eigvals(jax.jit(jax.jacrev(step))(state_N))
    expected = np.sort_complex(values)
    assert_close(np.sort_complex(found.eigenvalues_PN[p]), expected, atol=1e-7)


def test_what_has_no_fixed_points_is_said():
  cell = cells.make("gru", hidden=H)
  params = drawn(lambda key: cell.init(key, D))
  r = layers.Recurrence("decoder", cell, params, jnp.zeros((2, 3, D)))
  with pytest.raises(ValueError, match="decoder: every step reads a memory"):
    fixed_points.find(r._replace(memory=jnp.zeros(3)))
  nothing = r._replace(mask_BT=np.zeros((2, 3), bool))
  with pytest.raises(ValueError, match="decoder: there is no real step"):
    fixed_points.find(nothing)
