"""How a late loss depends on an early state, measured along real inputs.

  ds_T / ds_{T-d} = J_T ... J_{T-d+1}          the last d steps

Its norm is what a gradient can gain or lose over d steps. Beside it stand what
is often read in its place, and is not it: the product of the norms of the steps
(a bound), the power of their spectral radius (no bound at all: a product may
grow first, or for good), and the direct path of the gates (one term of many).
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rnnlab.analysis import products, retention
from rnnlab.analysis.path import basis, follow, push

# Beyond it, a tanh is called saturated.
SATURATED = 0.99
TERMS = ("direct", "gate", "candidate")


def distances(T, points=16) -> np.ndarray:
  """1 .. T, at most `points` of them, spaced by an equal ratio."""
  return np.unique(np.round(np.geomspace(1, T, points)).astype(int))


def measure(recurrence, points=16, samples=8) -> dict:
  """Everything below of one recurrence; logs are natural, NaN is "no such".

  distance_D        `distances` of its T
  log_gain_DBK      of leading singular values of the last d steps' product,
                    the norm first, at every distance
  log_bound_DB      of the product of their norms
  log_gradient_DB   of |dL/ds_{T-d}|, as `products.log_gradients` has it
  log_direct_DB     of the direct path: the unit of the gates that keeps most
  exponent_BK       leading singular values of a row's whole path, a step: its
                    finite-time Lyapunov exponents
  norm_B, radius_B  of J, geometric means over all steps and over samples
  share_B3          of the TERMS of J in the sum of their norms: `terms`
  saturated_B, slope_B   of a cell without gates: `activity`; else None

  samples: so many steps, evenly spread, where a measure would take too long at
  all. Traceable.
  """
  path = follow(recurrence)
  T, length_B = path.steps.real_B.shape[0], path.length_B
  distance_D = jnp.asarray(distances(T, points))
  there_DB = distance_D[:, None] <= length_B[None]

  def at_distance(log_TB):
    """Sums over the last d steps, from the steps."""
    log_TB = jnp.cumsum(log_TB[::-1], axis=0)
    return jnp.where(there_DB, log_TB[distance_D - 1], jnp.nan)

  def gain(distance):
    return products.log_singular_values(path, 4, distance=distance)

  gain_DBK = lax.map(gain, distance_D)
  log_norm_TB = jnp.log(products.step_norms(path))
  direct_TB = direct_path(path)
  chosen_S = jnp.linspace(T - jnp.min(length_B), T - 1, samples).astype(int)
  steps = path.at(chosen_S)
  radius_SB = lax.map(lambda at: spectral_radius(path, at), steps)
  share_SB3 = lax.map(lambda at: _shares(path, at), steps)
  saturated_B = slope_B = None
  if path.gates is None:
    saturated_B, slope_B = activity(path)
  return {
    "distance_D": distance_D,
    "length_B": length_B,
    "log_gain_DBK": jnp.where(there_DB[..., None], gain_DBK, jnp.nan),
    "log_bound_DB": at_distance(log_norm_TB),
    "log_gradient_DB": products.log_gradients(path)[distance_D - 1],
    "log_direct_DB": None if direct_TB is None else direct_TB[distance_D - 1],
    "exponent_BK": gain_DBK[-1] / length_B[:, None],
    "norm_B": jnp.exp(jnp.sum(log_norm_TB, axis=0) / length_B),
    "radius_B": jnp.exp(jnp.mean(jnp.log(radius_SB), axis=0)),
    "share_B3": jnp.mean(share_SB3, axis=0),
    "saturated_B": saturated_B,
    "slope_B": slope_B,
  }


def terms(path, at) -> dict:
  """J of one step as three terms, each J_BNN; their sum is all of it.

    direct     through the old state that is blended in, all gates held
    gate       through the gate that keeps or replaces it
    candidate  through everything else: the candidate, other gates

  For h' = (1-z) h + z c these are diag(1-z), diag(c-h) dz/dh and diag(z) dc/dh.
  """

  def drive(s_NB):
    return path.drive(s_NB, at.inputs)

  a = at.activations
  _, moved = jax.linearize(drive, at.state_NB)
  _, by_state = jax.linearize(lambda s: path.update(s, a), at.state_NB)
  _, by_a = jax.linearize(lambda a: path.update(at.state_NB, a), a)

  def of(ds_NB):
    da = moved(ds_NB)
    gate = _of_keep(path.gates, a, da)
    rest = jax.tree.map(jnp.subtract, da, gate)
    return {
      "direct": by_state(ds_NB),
      "gate": by_a(gate),
      "candidate": by_a(rest),
    }

  columns = jax.vmap(of)(basis(at.state_NB))
  return jax.tree.map(lambda x_NNB: jnp.transpose(x_NNB, (2, 1, 0)), columns)


def _of_keep(gates, a, da):
  """The part of da that belongs to the gates of the direct path."""
  if gates is None:
    return jax.tree.map(jnp.zeros_like, da)
  _, read = jax.linearize(gates, a)
  mine = {
    name: x if retention.keep_logits(name, x) is not None else jnp.zeros_like(x)
    for name, x in read(da).items()
  }
  # Rows of a as they stand: the transpose puts them back in their places.
  return jax.linear_transpose(read, a)(mine)[0]


def _shares(path, at):
  parts = terms(path, at)
  norms = [jnp.linalg.norm(parts[name], axis=(1, 2)) for name in TERMS]
  norm_B3 = jnp.stack(norms, axis=1)
  return norm_B3 / jnp.sum(norm_B3, axis=1, keepdims=True)


def direct_path(path):
  """log of the direct path's largest multiplier, log_TB[d - 1] by distance.

  The product over the last d steps of what the gates keep, of the unit for
  which it is largest: sum_t log k_t. None where nothing is gated; NaN beyond a
  row's steps.
  """
  if path.gates is None:
    return None
  gates = jax.vmap(path.gates)(path.steps.activations)
  keeps = [retention.keep_logits(*gate) for gate in gates.items()]
  log_THB = jnp.concatenate(
    [jax.nn.log_sigmoid(k_THB) for k_THB in keeps if k_THB is not None], axis=1
  )
  log_THB = jnp.where(path.steps.real_B[:, None], log_THB, 0)[::-1]
  distance_T1 = jnp.arange(len(log_THB))[:, None] + 1
  log_TB = jnp.max(jnp.cumsum(log_THB, axis=0), axis=1)
  return jnp.where(distance_T1 <= path.length_B[None], log_TB, jnp.nan)


def spectral_radius(path, at, steps=100):
  """The largest |eigenvalue| of J of one step, radius_B, by power iteration.

  The growth of a random direction over `steps` applications, after as many
  unmeasured: within about 1 % where steps is 100, a rotating pair included.
  """

  def body(i, loop):
    v_NB, log_B = loop
    v_NB, more_B = products.unit(push(path, at, v_NB[None])[0])
    return v_NB, log_B + jnp.where(i < steps, 0, more_B)

  (v_NB,) = products.directions(at.state_NB)
  start = v_NB, jnp.zeros_like(v_NB[0])
  return jnp.exp(lax.fori_loop(0, 2 * steps, body, start)[1] / steps)


def activity(path):
  """Of a cell without gates: two things that need separate looks, by row.

  saturated_B: the share of units and steps with |h| > SATURATED after the step;
  slope_B: the mean derivative of h by its own pre-activation, 1 - h^2 of a
  tanh.
  """

  def of(at):
    def update(a):
      return path.update(at.state_NB, a)

    ones = jax.tree.map(jnp.ones_like, at.activations)
    return jax.jvp(update, (at.activations,), (ones,))

  def mean(x_TNB):
    x_TB = jnp.mean(x_TNB, axis=1)
    x_TB = jnp.where(path.steps.real_B, x_TB, 0)
    return jnp.sum(x_TB, axis=0) / path.length_B

  h_TNB, slope_TNB = jax.vmap(of)(path.steps)
  saturated_TNB = (jnp.abs(h_TNB) > SATURATED).astype(h_TNB.dtype)
  return mean(saturated_TNB), mean(slope_TNB)
