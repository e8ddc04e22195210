"""Long dependencies as products of Jacobians."""

import jax
import jax.numpy as jnp
import numpy as np

from rnnlab import cells, layers, optim, scan
from rnnlab.analysis import jacobians, path, products, sensitivity
from rnnlab.ledger import NLP, SYSTEMS, Row, difference, normal, parameters


def linear(factors, steps):
  """|dh_T/dh_{T-d}| of h_t = a h_{t-1}, for every a and d = 1 .. steps."""
  cell = cells.make("rnn", hidden=1, activation="relu", bias=False)
  x_BTD = jnp.zeros((len(factors), steps, 1))

  def one(factor, x_TD):
    params = {"w_GD": jnp.zeros((1, 1)), "u_GH": factor[None, None]}
    return path.follow(
      layers.Recurrence("scalar", cell, params, x_TD[None], jnp.ones((1, 1)))
    )

  @jax.jit
  def log_TB(factors_B):
    logs = jax.vmap(lambda a, x: products.log_gradients(one(a, x))[:, 0])
    return logs(factors_B, x_BTD)

  return np.exp(log_TB(jnp.asarray(factors)))


def rows():
  yield from _scalar()
  yield from _tanh()
  yield from _matrices()
  yield from _clipping()


def _scalar():
  found = linear([0.9, 1.1, 0.8, 1.2], 100)
  said = "a derivative of {} at each of {} steps"
  yield Row(said.format(0.9, 50), NLP, 0.00515378, found[0, 49], 5e-9)
  yield Row(said.format(1.1, 50), NLP, 117.39085, found[1, 49], 5e-6)
  yield Row(said.format(0.8, 100), SYSTEMS, 2.03704e-10, found[2, 99], 5e-16)
  yield Row(said.format(1.2, 100), SYSTEMS, 8.28180e7, found[3, 99], 50)


def _tanh():
  cell = cells.make("rnn", hidden=1, bias=False)
  x_BTD = jnp.zeros((1, 10, 1))

  def last(u_GH, h_BH):
    params = {"w_GD": jnp.zeros((1, 1)), "u_GH": u_GH}
    run = scan.unroll(cell, params, x_BTD, h_BH)[0]
    return run[0, 0]

  start = jnp.full((1, 1), 2.0), jnp.zeros((1, 1))
  dw, dh = jax.jit(jax.grad(last, argnums=(0, 1)))(*start)
  said = "h = tanh(2h) along the zero path, 10 steps: "
  yield Row(said + "dh_T/dh_0", SYSTEMS, 1024.0, dh.item())
  yield Row(said + "the weight's gradient", SYSTEMS, 0.0, dw.item(), 0)
  params = {"w_GD": jnp.zeros((1, 1)), "u_GH": start[0]}
  long = layers.Recurrence("tanh", cell, params, jnp.zeros((1, 1000, 1)))
  log = jax.jit(lambda: products.log_singular_values(path.follow(long)))()
  said = "the same over 1000 steps: largest Lyapunov exponent"
  yield Row(said, SYSTEMS, 0.6931471805599453, log.item() / 1000)
  # A unit whose weight is large, at the end of its range.
  params = {"w_GD": jnp.zeros((1, 1)), "u_GH": jnp.full((1, 1), 10.0)}
  held = layers.Recurrence(
    "held", cell, params, jnp.zeros((1, 5, 1)), jnp.ones((1, 1))
  )
  found = jax.jit(lambda: sensitivity.activity(path.follow(held)))()
  said = "a saturated tanh, weight 10: "
  yield Row(said + "the share with |h| > .99", NLP, 1.0, found[0].item())
  yield Row(
    said + "the derivative of its tanh", NLP, 0.0, found[1].item(), 1e-8
  )


def _matrices():
  H, D, T = 4, 3, 6
  cell = cells.make("rnn", hidden=H)
  params = parameters(lambda key: cell.init(key, D))
  contracting = params | {"u_GH": 0.9 * np.linalg.qr(params["u_GH"])[0]}
  x_BTD = normal(1, T, D)

  @jax.jit
  def found(params):
    own = path.follow(layers.Recurrence("tanh", cell, params, x_BTD))
    step = own.at(3)
    ct_NB = jnp.ones((H, 1))
    for t in reversed(range(T)):
      ct_NB = path.pull(own, own.at(t), ct_NB[None])[0]
    j_TNN = jnp.stack([path.jacobian(own, own.at(t))[0] for t in range(T)])
    on_paper = jacobians.rnn(params, step.state_NB[:, 0], step.inputs[:, 0])
    norms = products.step_norms(own)[:, 0]
    largest = products.log_singular_values(own)[0, 0]
    return j_TNN, on_paper, ct_NB[:, 0], norms, jnp.exp(largest)

  j_TNN, on_paper, pulled_H, *_ = found(params)
  said = "J_t = diag(1 - h_t^2) W_h: difference"
  yield Row(said, NLP, 0.0, difference(j_TNN[3], on_paper))
  product = np.linalg.multi_dot(j_TNN[::-1])
  said = "a loss pulls back by the transposed product: difference"
  yield Row(said, NLP, 0.0, difference(pulled_H, product.T @ np.ones(H)))
  *_, norm_T, largest = found(contracting)
  said = "|J_t| <= .9: what the product exceeds "
  over = max(0.0, float(largest) - float(np.prod(norm_T)))
  yield Row(said + "the product of norms by", NLP, 0.0, over)
  over = max(0.0, float(np.prod(norm_T)) - 0.9**T)
  yield Row("and that exceeds .9^T by", NLP, 0.0, over)
  yield from _misleading()


def _misleading():
  u_HH = jnp.array([[0.5, 3.0], [0.0, 0.5]])
  cell = cells.make("rnn", hidden=2, activation="relu", bias=False)
  params = {"w_GD": jnp.zeros((2, 1)), "u_GH": u_HH}
  r = layers.Recurrence(
    "two units", cell, params, jnp.zeros((1, 2, 1)), jnp.ones((1, 2))
  )

  @jax.jit
  def found():
    own = path.follow(r)
    log_BN = products.log_singular_values(own)
    return sensitivity.spectral_radius(own, own.at(0), 1000), log_BN[0, 0]

  radius, log = found()
  said = "[[.5, 3], [0, .5]]: "
  yield Row(said + "its spectral radius", NLP, 0.5, radius.item(), 5e-3)
  # (3 + sqrt(9.25)) / 2, of [[.25, 3], [0, .25]].
  said += "the norm of two steps, where .5^2 says .25"
  yield Row(said, NLP, 3.02069, np.exp(log), 5e-6)


def _clipping():
  tx = optim.clip_by_global_norm(1.0)
  g = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}
  clipped, _ = tx.update(g, tx.init(g))
  said = "clipping (3, 4) at 1: the norm, and the direction"
  computed = optim.global_norm(clipped), clipped["a"][0] / clipped["b"][0]
  yield Row(said, SYSTEMS, (1.0, 0.75), [float(c) for c in computed])
  zero, _ = tx.update(jax.tree.map(jnp.zeros_like, g), tx.init(g))
  said = "a zero gradient stays zero: its norm"
  yield Row(said, SYSTEMS, 0.0, float(optim.global_norm(zero)), 0)
  bad = {"a": jnp.array([jnp.nan, 0.0]), "b": jnp.array([4.0])}
  *_, applied, _ = optim.apply(tx, 0.1, bad, g, tx.init(g))
  said = "clipping is no check for finite values: is NaN applied?"
  yield Row(said, SYSTEMS, "no", "yes" if applied else "no")
