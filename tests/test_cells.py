"""Every cell against its written equations, and the laws they all obey."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import all_cells, assert_close, draw

from rnnlab import cells, nn, scan, stepping

H, D, B, T = 3, 2, 4, 5


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def rnn(act, p, h, x):
  h = act(p["u_GH"] @ h + p["w_GD"] @ x + p["b_G"])
  return h, h


def ugrnn(p, h, x):
  z, c = np.split(p["w_GD"] @ x + p["u_GH"] @ h + p["b_G"], 2)
  h = (1 - sigmoid(z)) * h + sigmoid(z) * np.tanh(c)
  return h, h


def gru(reset, p, h, x):
  w_r, w_z, w_c = np.split(p["w_GD"], 3)
  u_r, u_z, u_c = np.split(p["u_GH"], 3)
  b_r, b_z, b_c = np.split(p["b_G"], 3)
  r = sigmoid(w_r @ x + u_r @ h + b_r)
  z = sigmoid(w_z @ x + u_z @ h + b_z)
  if reset == "before":
    c = np.tanh(w_c @ x + b_c + u_c @ (r * h))
  else:
    c = np.tanh(w_c @ x + b_c + r * (u_c @ h + p["bh_H"]))
  h = (1 - z) * h + z * c
  return h, h


def lstm(p, carry, x):
  h, c = carry
  # Four maps written apart; the packed product has to be the same.
  w, u, b = (np.split(p[key], 4) for key in ("w_GD", "u_GH", "b_G"))
  i, f, q, o = (w[k] @ x + u[k] @ h + b[k] for k in range(4))
  c = sigmoid(f) * c + sigmoid(i) * np.tanh(q)
  h = sigmoid(o) * np.tanh(c)
  return (h, c), h


# A new cell brings its equations here, one step for one example.
EQUATIONS = {
  "rnn-tanh": lambda *a: rnn(np.tanh, *a),
  "rnn-relu": lambda *a: rnn(lambda x: np.maximum(x, 0), *a),
  "ugrnn": ugrnn,
  "gru-before": lambda *a: gru("before", *a),
  "gru-after": lambda *a: gru("after", *a),
  "lstm": lstm,
}


def written(settings):
  name, *variant = settings.values()
  return EQUATIONS["-".join([name, *variant])]


def row(tree, b):
  """One example of a tree of columns, in numpy."""
  return jax.tree.map(lambda a: np.asarray(a)[..., b], tree)


@pytest.mark.parametrize("settings", all_cells())
def test_one_step_is_the_written_equation(settings, x64):
  cell = cells.make(hidden=H, initial="learned", **settings)
  params = draw(cell, D)
  rng = np.random.default_rng(1)
  x_DB = jnp.asarray(rng.normal(size=(D, B)))
  carry = jax.tree.map(
    lambda c: c + rng.normal(size=c.shape), cell.carry(params, B)
  )
  actual = stepping.step(cell, params, carry, cell.project(params, x_DB))
  p = jax.tree.map(np.asarray, params)
  for b in range(B):
    expected = written(settings)(p, row(carry, b), row(x_DB, b))
    assert_close(row(actual, b), expected)


@pytest.mark.parametrize("settings", all_cells())
def test_a_run_is_the_written_loop(settings, x64):
  cell = cells.make(hidden=H, initial="learned", **settings)
  params = draw(cell, D)
  x_BTD = np.random.default_rng(1).normal(size=(B, T, D))
  final, h_BTH = scan.unroll(cell, params, x_BTD)
  p = jax.tree.map(np.asarray, params)
  for b in range(B):
    carry, outs = row(cell.carry(params, B), b), []
    for x_D in x_BTD[b]:
      carry, out = written(settings)(p, carry, x_D)
      outs.append(out)
    assert_close(h_BTH[b], np.stack(outs))
    assert_close(jax.tree.map(lambda c, b=b: c[b], final), carry)


@pytest.mark.parametrize("settings", all_cells())
def test_project_is_position_wise_and_exact(settings, x64):
  cell = cells.make(hidden=H, **settings)
  params = draw(cell, D)
  x_DN = jnp.asarray(np.random.default_rng(2).normal(size=(D, 6)))
  u = cell.project(params, x_DN)
  u_GN = jnp.concatenate(jax.tree.leaves(u))
  expected = params["w_GD"] @ x_DN + params["b_G"][:, None]
  assert_close(u_GN, expected)
  for n in range(6):
    alone = cell.project(params, x_DN[:, n : n + 1])
    assert_close(alone, jax.tree.map(lambda u, n=n: u[:, n : n + 1], u))


@pytest.mark.parametrize("settings", all_cells("keep"))
@pytest.mark.parametrize("value", [-1.5, 0.0, 2.0])
def test_the_direct_path_keeps_sigmoid_of_the_keep_logit(settings, value, x64):
  keep = {"kind": "constant", "value": value}
  cell = cells.make(hidden=H, keep=keep, **settings)
  params = cell.init(jax.random.key(0), D)
  params["w_GD"], params["u_GH"] = 0 * params["w_GD"], 0 * params["u_GH"]
  u_GB = cell.project(params, jnp.ones((D, 1)))

  def last(carry):
    # The state that is blended: h, or c of the pair (h, c).
    carry, _ = stepping.step(cell, params, carry, u_GB)
    return jax.tree.leaves(carry)[-1][:, 0]

  carry = jax.tree.map(lambda c: c + 0.7, cell.carry(params, 1))
  path = jax.tree.leaves(jax.jacrev(last)(carry))[-1][:, :, 0]
  assert_close(path, np.eye(H) / (1 + math.exp(-value)))


@pytest.mark.parametrize("settings", all_cells("initial"))
def test_the_initial_carry_is_a_parameter_only_if_learned(settings):
  fixed = cells.make(hidden=H, **settings)
  params = fixed.init(jax.random.key(0), D)
  assert_close(
    fixed.carry(params, B),
    jax.tree.map(jnp.zeros_like, fixed.carry(params, B)),
    atol=0,
  )
  cell = cells.make(hidden=H, initial="learned", **settings)
  learned = cell.init(jax.random.key(0), D)
  extra = sorted(learned.keys() - params.keys())
  assert extra == (["c0_H", "h0_H"] if settings["name"] == "lstm" else ["h0_H"])
  learned = draw(cell, D)
  assert_close(
    jax.tree.leaves(cell.carry(learned, B)),
    [jnp.tile(learned[key][:, None], B) for key in reversed(extra)],
    atol=0,
  )


def test_gradients_of_the_tanh_network_are_those_by_hand(x64):
  cell = cells.make("rnn", hidden=H)
  params = draw(cell, D)
  rng = np.random.default_rng(3)
  x_TD, r_TH = rng.normal(size=(T, D)), rng.normal(size=(T, H))

  def loss(params):
    _, h_BTH = scan.unroll(cell, params, x_TD[None])
    return jnp.sum(h_BTH[0] * r_TH)

  h_TH = np.asarray(scan.unroll(cell, params, x_TD[None])[1][0])
  u_HH = np.asarray(params["u_GH"])
  dw, du, db = np.zeros((H, D)), np.zeros((H, H)), np.zeros(H)
  delta_H = np.zeros(H)
  for t in reversed(range(T)):
    delta_H = (r_TH[t] + u_HH.T @ delta_H) * (1 - h_TH[t] ** 2)
    dw += np.outer(delta_H, x_TD[t])
    db += delta_H
    du += np.outer(delta_H, h_TH[t - 1] if t else np.zeros(H))
  assert_close(jax.grad(loss)(params), {"w_GD": dw, "u_GH": du, "b_G": db})


@pytest.mark.parametrize("settings", all_cells())
def test_a_shared_weight_gathers_the_gradients_of_all_its_uses(settings, x64):
  cell = cells.make(hidden=H, **settings)
  params = draw(cell, D)
  x_BTD = np.random.default_rng(4).normal(size=(B, T, D))

  def untied(params_T):
    carry, total = cell.carry(params, B), 0.0
    for params_t, x_BD in zip(params_T, jnp.swapaxes(x_BTD, 0, 1), strict=True):
      u_GB = cell.project(params_t, x_BD.T)
      carry, h_HB = stepping.step(cell, params_t, carry, u_GB)
      total += jnp.sum(jnp.sin(h_HB))
    return total

  def tied(params):
    return jnp.sum(jnp.sin(scan.unroll(cell, params, x_BTD)[1]))

  parts = jax.grad(untied)([params] * T)
  summed = jax.tree.map(lambda *g: sum(g), *parts)
  assert_close(jax.grad(tied)(params), summed)


def lstm_step(i, f, q, o, c):
  """One scalar step from pre-activations: (h, c)."""
  cell = cells.make("lstm", hidden=1)
  params = {"w_GD": jnp.zeros((4, 1)), "u_GH": jnp.zeros((4, 1))}
  params["b_G"] = jnp.array([i, f, q, o])
  carry = (jnp.zeros((1, 1)), jnp.full((1, 1), c))
  u_GB = cell.project(params, jnp.zeros((1, 1)))
  (h_HB, c_HB), _ = stepping.step(cell, params, carry, u_GB)
  return float(h_HB[0, 0]), float(c_HB[0, 0])


def test_scalar_lstm_steps(x64):
  # The forget bias stands in b_f alone: one more 1 would give c = 1.438671.
  assert lstm_step(0.4, 1.2, -0.7, 0.3, 2.0) == pytest.approx(
    (0.474454, 1.175222), abs=1e-6
  )
  i, f, o = (math.log(p / (1 - p)) for p in (0.2, 0.9, 0.8))
  gates = [i, f, math.atanh(-0.5), o]
  assert lstm_step(*gates, 2.0) == pytest.approx((0.7483273, 1.7), abs=1e-7)


def test_the_lstm_memory_is_not_bounded_by_one():
  cell = cells.make("lstm", hidden=1)
  params = {"w_GD": jnp.zeros((4, 1)), "u_GH": jnp.zeros((4, 1))}
  params["b_G"] = jnp.array([50.0, 50.0, math.atanh(0.9), 0.0])
  (_, c_BH), _ = scan.unroll(cell, params, jnp.zeros((1, 20, 1)))
  assert float(c_BH[0, 0]) == pytest.approx(18.0, abs=1e-5)


def test_a_gru_with_a_closed_gate_carries_by_one_minus_z(x64):
  z, c = math.log(0.01 / 0.99), 0.0
  cell = cells.make("gru", hidden=1)
  params = {"w_GD": jnp.zeros((3, 1)), "u_GH": jnp.zeros((3, 1))}
  params |= {"b_G": jnp.array([0.0, z, c]), "bh_H": jnp.zeros(1)}
  h_BH, _ = scan.unroll(cell, params, jnp.zeros((1, 50, 1)), 1.0)
  assert float(h_BH[0, 0]) == pytest.approx(0.6050061, abs=1e-7)


def test_a_saturated_gate_has_no_derivative_in_float32():
  logit = jnp.float32(20)
  assert float(jax.nn.sigmoid(logit)) == 1.0
  assert float(jax.grad(jax.nn.sigmoid)(logit)) == 0.0


def count(tree):
  return sum(leaf.size for leaf in jax.tree.leaves(tree))


def test_parameter_counts():
  H, D, V = 96, 96, 28
  rnn = cells.make("rnn", hidden=H).init(jax.random.key(0), D)
  readout = nn.linear(jax.random.key(1), V, H)
  assert count((rnn, readout)) == H * H + H * D + H + V * H + V == 21244
  for name, gates in (("ugrnn", 2), ("lstm", 4)):
    params = cells.make(name, hidden=H).init(jax.random.key(0), D)
    assert count(params) == gates * (H * H + H * D + H)
  for reset, extra in (("before", 0), ("after", H)):
    params = cells.make("gru", hidden=H, reset=reset).init(jax.random.key(0), D)
    assert count(params) == 3 * (H * H + H * D + H) + extra


@pytest.mark.parametrize("settings", all_cells())
def test_shapes_that_do_not_fit_raise(settings):
  cell = cells.make(hidden=H, **settings)
  params = cell.init(jax.random.key(0), D)
  with pytest.raises((TypeError, ValueError)):
    scan.unroll(cell, params, jnp.zeros((B, T, D + 1)))


@pytest.mark.parametrize(
  "settings, words",
  [
    ({"name": "grru"}, "grru"),
    ({"name": "gru", "reset": "inside"}, "reset.*'inside'"),
    ({"name": "rnn", "activation": "gelu"}, "activation.*'gelu'"),
    ({"name": "rnn", "initial": "random"}, "initial.*'random'"),
    ({"name": "rnn", "recurrent": "orthagonal"}, "'orthagonal'"),
    ({"name": "rnn", "keep": {"kind": "uniform"}}, "keep"),
    ({"name": "lstm", "forget_bias": 1.0}, "forget_bias"),
    ({"name": "lstm", "bias": 1}, "bias.*1"),
  ],
)
def test_a_wrong_setting_is_refused_by_name(settings, words):
  with pytest.raises(ValueError, match=words):
    cells.make(hidden=H, **settings).init(jax.random.key(0), D)
