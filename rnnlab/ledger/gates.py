"""Gates: what a carry path keeps, and what it does not say."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from rnnlab import cells, interchange, layers, nn, scan, stepping
from rnnlab import gates as schemes
from rnnlab.analysis import jacobians, path, retention, sensitivity
from rnnlab.ledger import NLP, SYSTEMS, Row, difference, normal, parameters
from rnnlab.ledger.sensitivity import linear

STEPS = 50


def rows():
  yield from _figure()
  yield from _lstm_step()
  yield from _retention()
  yield from _updates()
  yield from _full_derivative()
  yield from _packing()
  yield from _starts()


def figure() -> dict:
  """Products over 0 .. 50 steps: a derivative of .9 or 1.1, and a gate of .01.

  The gate is the update gate of a recurrence that replaces by z, and its curve
  the direct path: .99 a step.
  """
  cell = cells.make("gru", hidden=1, reset="before")
  params = jax.tree.map(
    lambda p: jnp.zeros(p.shape),
    jax.eval_shape(lambda: cell.init(jax.random.key(0), 1)),
  )
  params["b_G"] = params["b_G"].at[1].set(_logit(0.01))
  r = layers.Recurrence("gru", cell, params, jnp.zeros((1, STEPS, 1)))
  direct_TB = jax.jit(lambda: sensitivity.direct_path(path.follow(r)))()
  loss, gain = linear([0.9, 1.1], STEPS)
  gate = np.exp(direct_TB[:, 0])
  curves = {"0.9": loss, "0.99 (z = .01)": gate, "1.1": gain}
  return {name: np.concatenate([[1.0], c]) for name, c in curves.items()}


def _logit(p):
  return math.log(p / (1 - p))


def _figure():
  ends = [curve[-1] for curve in figure().values()]
  said = "products of 50 steps of .9, .99 and 1.1"
  yield Row(said, NLP, (0.00515, 0.605, 117.4), ends, (5e-6, 5e-4, 5e-2))
  said = "a fixed gate z = .01 carries over 50 steps"
  yield Row(said, NLP, 0.6050061, ends[1], 5e-8)


def _lstm(f, i, q, o, units=1):
  """An LSTM whose gates are held at these values, and its parameters."""
  cell = cells.make("lstm", hidden=units)
  shapes = jax.eval_shape(lambda: cell.init(jax.random.key(0), 1))
  params = jax.tree.map(lambda p: jnp.zeros(p.shape), shapes)
  logits = [_logit(i), _logit(f), math.atanh(q), _logit(o)]
  params["b_G"] = jnp.repeat(jnp.array(logits), units)
  return cell, params


def _lstm_step():
  cell, params = _lstm(0.9, 0.2, -0.5, 0.8)
  u_GB = cell.project(params, jnp.zeros((1, 1)))
  carry = jnp.zeros((1, 1)), jnp.full((1, 1), 2.0)
  (h_HB, c_HB), _ = stepping.step(cell, params, carry, u_GB)
  said = "c = 2, f = .9, i = .2, q = -.5, o = .8: "
  yield Row(said + "c", SYSTEMS, 1.7, c_HB.item())
  yield Row(said + "h", SYSTEMS, 0.7483273, h_HB.item(), 5e-8)
  cell, params = _lstm(0.5, 0.5, 0.9, 0.5)
  params["b_G"] = params["b_G"].at[:2].set(60.0)  # i and f are 1 in float64
  run = jax.jit(lambda: scan.unroll(cell, params, jnp.zeros((1, 20, 1))))
  (_, c_BH), _ = run()
  said = "f = i = 1, q = .9, 20 steps: c is not bounded by 1"
  yield Row(said, SYSTEMS, 18.0, c_BH.item())


def _retention():
  held = {0.99: (0.366032, 5e-7), 0.95: (0.00592053, 5e-9)}
  held |= {0.9: (2.65614e-5, 5e-11)}
  cell, _ = _lstm(0.5, 0.5, 0.0, 0.5)

  @jax.jit
  def found(params):
    r = layers.Recurrence("lstm", cell, params, jnp.zeros((1, 100, 1)))
    return sensitivity.direct_path(path.follow(r))[-1], retention.measure(r)

  half = {}
  for f, (expected, tolerance) in held.items():
    log_B, sums = found(_lstm(f, 0.5, 0.0, 0.5)[1])
    kept = retention.summary(retention.add(None, sums))["keep"]
    half[f] = kept["half_life_H"].item()
    said = f"a forget gate of {f:g} over 100 steps"
    yield Row(said, SYSTEMS, expected, np.exp(log_B).item(), tolerance)
  yield Row("the half-life of f = .99", SYSTEMS, 68.968, half[0.99], 5e-4)
  yield Row("the half-life of f = .95", SYSTEMS, 13.513, half[0.95], 5e-4)
  open_ = _lstm(0.5, 0.5, 0.0, 0.5)[1]
  open_["b_G"] = open_["b_G"].at[1].set(20.0)
  _, sums = found(jax.tree.map(lambda p: p.astype(jnp.float32), open_))
  kept = retention.summary(retention.add(None, sums))["keep"]
  said = "sigmoid(20) in float32: "
  yield Row(said + "the share that is exactly 1", SYSTEMS, 1.0, kept["one"], 0)
  slope = kept["slope_H"].item()
  yield Row(said + "its derivative", SYSTEMS, 0.0, slope, 0)


def _updates():
  """The written equations against one step, for both conventions."""
  H, D = 3, 2
  h_H, x_D = normal(H, seed=1), normal(D, seed=2)

  def step(cell, params):
    u_GB = cell.project(params, x_D[:, None])
    return stepping.step(cell, params, h_H[:, None], u_GB)[0][:, 0]

  def sigmoid(x):
    return 1 / (1 + np.exp(-x))

  cell = cells.make("gru", hidden=H, reset="before", bias=False)
  p = parameters(lambda key: cell.init(key, D))
  w_r, w_z, w_c = np.split(p["w_GD"], 3)
  u_r, u_z, u_c = np.split(p["u_GH"], 3)
  r_H, z_H = sigmoid(w_r @ x_D + u_r @ h_H), sigmoid(w_z @ x_D + u_z @ h_H)
  wanted = (1 - z_H) * h_H + z_H * np.tanh(w_c @ x_D + u_c @ (r_H * h_H))
  said = "h = (1 - z) h + z c, the reset before its product: difference"
  yield Row(said, NLP, 0.0, difference(step(cell, p), wanted))
  named = ("weight_ih", (3 * H, D)), ("weight_hh", (3 * H, H))
  named += ("bias_ih", (3 * H,)), ("bias_hh", (3 * H,))
  torch = {name: normal(*s, seed=i) for i, (name, s) in enumerate(named)}
  i_r, i_z, i_n = np.split(torch["weight_ih"] @ x_D + torch["bias_ih"], 3)
  h_r, h_z, h_n = np.split(torch["weight_hh"] @ h_H + torch["bias_hh"], 3)
  z_H = sigmoid(i_z + h_z)
  n_H = np.tanh(i_n + sigmoid(i_r + h_r) * h_n)
  cell = cells.make("gru", hidden=H, reset="after")
  p = interchange.from_packed("gru", torch, interchange.PYTORCH["gru"], "after")
  said = "PyTorch's h = (1 - z) n + z h, by negated rows: difference"
  wanted = (1 - z_H) * n_H + z_H * h_H
  yield Row(said, NLP, 0.0, difference(step(cell, p), wanted))


def _full_derivative():
  H, D, T = 3, 2, 4
  for reset, source in (("before", NLP), ("after", NLP)):
    cell = cells.make("gru", hidden=H, reset=reset)
    params = parameters(lambda key, cell=cell: cell.init(key, D))
    r = layers.Recurrence("gru", cell, params, normal(1, T, D))

    @jax.jit
    def found(params, r=r, reset=reset):
      own = path.follow(r._replace(params=params))
      step = own.at(T - 1)
      state_H = step.state_NB[:, 0]
      u_G = _packed(step.inputs)
      on_paper = jacobians.gru(params, state_H, u_G, reset)
      terms = sensitivity.terms(own, step)
      terms = {name: terms[name][0] for name in on_paper}
      return path.jacobian(own, step)[0], terms, on_paper

    whole, terms, on_paper = found(params)
    said = f"the update's three terms, reset {reset}: "
    summed = difference(sum(terms.values()), whole)
    yield Row(said + "their sum and J", source, 0.0, summed)
    apart = difference(terms, on_paper)
    yield Row(said + "each on paper and by autodiff", source, 0.0, apart)
  yield from _direct_edge()


def _direct_edge():
  H, D, T = 3, 2, 5
  cell = cells.make("lstm", hidden=H)
  params = parameters(lambda key: cell.init(key, D))
  x_BTD = normal(1, T, D)

  @jax.jit
  def found(params):
    own = path.follow(layers.Recurrence("lstm", cell, params, x_BTD))
    product, kept_H = jnp.eye(2 * H), jnp.ones(H)
    for t in range(T):
      step = own.at(t)
      product = path.jacobian(own, step)[0] @ product
      kept_H = (
        kept_H * jax.nn.sigmoid(cell.gates(step.activations)["keep"])[:, 0]
      )
    step = own.at(0)
    on_paper = jacobians.lstm(
      params, step.state_NB[:H, 0], step.state_NB[H:, 0], _packed(step.inputs)
    )
    one = path.jacobian(own, step)[0]
    blocks = {"hh": one[:H, :H], "hc": one[:H, H:]}
    blocks |= {"ch": one[H:, :H], "cc": one[H:, H:]}
    return product[H:, H:], jnp.diag(kept_H), blocks, on_paper

  full, direct, blocks, on_paper = found(params)
  said = "the LSTM's four blocks on paper and by autodiff: difference"
  yield Row(said, SYSTEMS, 0.0, difference(blocks, on_paper))
  said = f"dc_T/dc_0 over {T} steps and the product of f: are they equal?"
  yield Row(said, SYSTEMS, "no", _equal(full, direct))
  full, direct, *_ = found(params | {"u_GH": 0 * params["u_GH"]})
  said = "the same with gates that read no state"
  yield Row(said, SYSTEMS, "yes", _equal(full, direct))


def _packed(u):
  """The first row's columns, gate under gate."""
  return jnp.concatenate([u_HB[:, 0] for u_HB in u])


def _equal(a, b):
  return "yes" if difference(a, b) < 1e-12 else "no"


def _packing():
  H, D = 3, 2
  cell = cells.make("lstm", hidden=H, bias=False)
  p = parameters(lambda key: cell.init(key, D))
  h_H, x_D = normal(H, seed=1), normal(D, seed=2)
  u = cell.project(p, x_D[:, None])
  carry = jnp.asarray(h_H[:, None]), jnp.zeros((H, 1))
  (drive,), weights = cell.drive, cell.weights(p, False)
  packed_GB = jnp.concatenate(drive(weights, carry, u, (), None))
  apart = [
    w_HD @ x_D + u_HH @ h_H
    for w_HD, u_HH in zip(
      np.split(p["w_GD"], 4), np.split(p["u_GH"], 4), strict=True
    )
  ]
  said = "u = W_h h + W_x x in R^4H is four maps: difference"
  found = difference(packed_GB[:, 0], np.concatenate(apart))
  yield Row(said, SYSTEMS, 0.0, found)
  shapes = " ".join("x".join(map(str, p[n].shape)) for n in ("u_GH", "w_GD"))
  said = "the shapes of W_h and W_x, H = 3, D = 2"
  yield Row(said, SYSTEMS, "12x3 12x2", shapes)
  swapped = schemes.reorder(p["u_GH"], "ifqo", "iofq")
  said = "two gates swapped: do the shapes show it?"
  same = swapped.shape == p["u_GH"].shape
  yield Row(said, SYSTEMS, "no", "no" if same else "yes")
  there = schemes.reorder(swapped, "iofq", "ifqo")
  said = "swapped back by their declared order: difference"
  yield Row(said, SYSTEMS, 0.0, difference(there, p["u_GH"]), 0)


def _starts():
  draw = schemes.make("chrono", t_max=500.0).draw
  keep_H = jax.jit(draw, static_argnums=1)(jax.random.key(0), 100_000)
  said = "keep logits for memories of up to 500 steps: the largest"
  yield Row(said, SYSTEMS, math.log(499), float(keep_H.max()), 1e-3)
  init = jax.jit(lambda key: nn.init("orthogonal", key, 8, 8, blocks=4))
  blocks = np.split(np.asarray(init(jax.random.key(0))), 4)
  off = max(difference(b.T @ b, np.eye(8)) for b in blocks)
  said = "orthogonal, gate by gate: Q'Q and the identity"
  yield Row(said, NLP, 0.0, off, 1e-5)
