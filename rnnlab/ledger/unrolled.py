"""The unrolled graph: gradients through time, storage, truncation."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rnnlab import cells, scan, stepping
from rnnlab.ledger import NLP, SYSTEMS, Row, difference, normal, parameters

H, D, T = 4, 3, 6


def rows():
  cell = cells.make("rnn", hidden=H)
  params = parameters(lambda key: cell.init(key, D))
  x_BTD, r_TH = normal(1, T, D), normal(T, H, seed=1)
  yield from _by_hand(cell, params, x_BTD, r_TH)
  yield from _uses(cell, params, x_BTD, r_TH)
  yield from _boundaries(cell, params, x_BTD)


def _loss(cell, x_BTD, r_TH, **options):
  """sum_t r_t . h_t: r_t is the gradient that arrives from the output at t."""

  def loss(params):
    _, h_BTH = scan.unroll(cell, params, x_BTD, **options)
    return jnp.sum(h_BTH[0] * r_TH)

  return loss


def _by_hand(cell, params, x_BTD, r_TH):
  @jax.jit
  def run(params):
    grads = jax.grad(_loss(cell, x_BTD, r_TH))(params)
    kept = jax.grad(_loss(cell, x_BTD, r_TH, chunk=4))(params)
    return scan.unroll(cell, params, x_BTD)[1][0], grads, kept

  h_TH, grads, kept = run(params)
  h_TH = np.concatenate([np.zeros((1, H)), h_TH])
  delta_H, dw, du = np.zeros(H), np.zeros((H, D)), np.zeros((H, H))
  for t in reversed(range(T)):
    delta_H = r_TH[t] + params["u_GH"].T @ delta_H
    delta_H = delta_H * (1 - h_TH[t + 1] ** 2)
    dw += np.outer(delta_H, x_BTD[0, t])
    du += np.outer(delta_H, h_TH[t])
  said = "delta_t = (r_t + W_h' delta_{t+1}) (1 - h_t^2): "
  yield Row(said + "dL/dW_h", SYSTEMS, 0.0, difference(grads["u_GH"], du))
  yield Row(said + "dL/dW_x", SYSTEMS, 0.0, difference(grads["w_GD"], dw))
  said = "states recomputed from chunks of 4: the gradient's difference"
  yield Row(said, SYSTEMS, 0.0, difference(kept, grads))


def _uses(cell, params, x_BTD, r_TH):
  def untied(params_T):
    h_HB, total = cell.carry(params_T[0], 1), 0.0
    for t, own in enumerate(params_T):
      u_GB = cell.project(own, x_BTD[:, t].T)
      h_HB, _ = stepping.step(cell, own, h_HB, u_GB)
      total += jnp.sum(h_HB[:, 0] * r_TH[t])
    return total

  @jax.jit
  def both(params):
    uses = jax.grad(untied)([params] * T)
    summed = jax.tree.map(lambda *g: sum(g), *uses)
    return summed, jax.grad(_loss(cell, x_BTD, r_TH))(params)

  said = "one weight gathers the gradients of all its uses: difference"
  yield Row(said, NLP, 0.0, difference(*both(params)))


def _boundaries(cell, params, x_BTD):
  """What is handed on at the middle: value and graph, value alone, neither."""
  half = T // 2

  def run(h0_BH, at_border):
    first_BH, _ = scan.unroll(cell, params, x_BTD[:, :half], h0_BH)
    last_BH, _ = scan.unroll(cell, params, x_BTD[:, half:], at_border(first_BH))
    return jnp.sum(last_BH), last_BH

  kinds = {
    "whole": lambda h: h,
    "detached": lax.stop_gradient,
    "reset": lambda h: None,
  }

  @jax.jit
  def found(h0_BH):
    out = {}
    for name, at_border in kinds.items():
      grad = jax.grad(lambda h, at=at_border: run(h, at), has_aux=True)
      out[name] = grad(h0_BH)
    alone = scan.unroll(cell, params, x_BTD[:, half:])[0]
    return out, scan.unroll(cell, params, x_BTD, h0_BH)[0], alone

  out, one_pass, alone = found(normal(1, H, seed=2))
  said = "a state carried over a border: difference to one pass"
  yield Row(said, SYSTEMS, 0.0, difference(out["whole"][1], one_pass))
  said = "detached there: difference of the value"
  yield Row(said, SYSTEMS, 0.0, difference(out["detached"][1], one_pass))
  said = "detached there: the gradient of what came before"
  zero = np.zeros((1, H))
  yield Row(said, SYSTEMS, 0.0, difference(out["detached"][0], zero), 0)
  said = "reset there: difference to the second part alone"
  yield Row(said, SYSTEMS, 0.0, difference(out["reset"][1], alone))
