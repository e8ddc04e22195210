"""Slow points of a recurrence that runs by itself, and what happens near them.

  v(s) = |F(s, u) - s|         the speed, in state per step, for an input held

Where v is 0 the state stays; where it is small, it stays long. Close by, the
state moves by J = dF/ds: along an eigenvector of J it shrinks or grows by
|lambda| a step, and a fixed point that remembers has some |lambda| near 1.
Source: Sussillo and Barak, "Opening the black box", 2013.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rnnlab import scan
from rnnlab.analysis import path


class Points(NamedTuple):
  """Slow points, the slowest first, as numpy arrays."""

  state_PN: Any  # the whole carry as one vector
  speed_P: Any  # state per step
  starts_P: Any  # how many searches ended there
  eigenvalues_PN: Any  # of J there, complex, by size
  visited_MN: Any  # the states that the recurrence was in, on its real inputs


def find(recurrence, *, starts=64, steps=1000, rate=0.03, x_D=None) -> Points:
  """Searches for slow points, from states that were visited.

  x_D: the input that is held; None is zeros. starts: how many searches, from
  states drawn among the visited ones; those that end together are one point.
  Each is `steps` of Adam, whose rate falls along a cosine, and then of
  Levenberg and Marquardt's method, which tells what is at rest from what is
  slow. Raises ValueError for a recurrence that reads a memory, which has no
  such points, and one with no real step.
  """
  r = recurrence
  if r.memory is not None:
    raise ValueError(
      f"{r.name}: every step reads a memory (attention, a context), so it does "
      "not run by itself and has no fixed points"
    )
  table = r.x.table_VD if isinstance(r.x, scan.Lookup) else r.x
  x_D = jnp.zeros(table.shape[-1]) if x_D is None else jnp.asarray(x_D)

  @jax.jit
  def visit(params):
    found = path.follow(r._replace(params=params)).steps
    return found.state_NB, found.real_B

  state_TNB, real_TB = jax.device_get(visit(r.params))
  visited_MN = np.moveaxis(state_TNB, 1, 2)[real_TB]
  if not len(visited_MN):
    raise ValueError(f"{r.name}: there is no real step to start from")
  rng = np.random.default_rng(0)
  chosen = rng.choice(len(visited_MN), starts, replace=len(visited_MN) < starts)

  @jax.jit
  def search(params, s_NP):
    own = path.follow(r._replace(params=params))
    u = jax.tree.map(
      lambda u_H1: jnp.broadcast_to(u_H1, (len(u_H1), s_NP.shape[1])),
      r.cell.project(params, x_D[:, None]),
    )

    def move(s_NP):
      return own.update(s_NP, own.drive(s_NP, u))

    def slowness(s_NP):
      # Columns have nothing to do with each other, nor have their gradients.
      return jnp.sum((move(s_NP) - s_NP) ** 2) / 2

    adam = optax.adam(optax.cosine_decay_schedule(rate, steps))

    def body(state, _):
      s_NP, opt_state = state
      updates, opt_state = adam.update(jax.grad(slowness)(s_NP), opt_state)
      return (optax.apply_updates(s_NP, updates), opt_state), None

    (s_NP, _), _ = jax.lax.scan(body, (s_NP, adam.init(s_NP)), length=steps)
    s_NP = _settle(move, s_NP)
    speed_P = jnp.linalg.norm(move(s_NP) - s_NP, axis=0)
    return s_NP.T, speed_P, _jacobians(move, s_NP)

  starts_NP = visited_MN[chosen].T
  found = jax.device_get(search(r.params, starts_NP))
  state_PN, speed_P, j_PNN = found
  first, starts_P = _distinct(state_PN, speed_P, visited_MN)
  values_PN = np.linalg.eigvals(j_PNN[first])
  by_size = np.argsort(-np.abs(values_PN), axis=1)
  return Points(
    state_PN[first],
    speed_P[first],
    starts_P,
    np.take_along_axis(values_PN, by_size, axis=1),
    visited_MN,
  )


def _jacobians(move, s_NP):
  """J_PNN of every column."""
  _, jvp = jax.linearize(move, s_NP)
  return jnp.transpose(jax.vmap(jvp)(path.basis(s_NP)), (2, 1, 0))


def _settle(move, s_NP, steps=50):
  """Levenberg and Marquardt's steps on |F(s) - s|^2, a damping for each."""

  def off(s_NP):
    return (move(s_NP) - s_NP).T[..., None]  # as columns of a product

  def body(state, _):
    s_NP, damping_P11 = state
    off_PN1, eye_NN = off(s_NP), jnp.eye(len(s_NP), dtype=s_NP.dtype)
    a_PNN = _jacobians(move, s_NP) - eye_NN[None]
    normal_PNN = a_PNN.mT @ a_PNN + damping_P11 * eye_NN[None]
    step_PN1 = jnp.linalg.solve(normal_PNN, a_PNN.mT @ off_PN1)
    tried_NP = s_NP - step_PN1[..., 0].T
    better_P = jnp.sum(off(tried_NP) ** 2, (1, 2)) < jnp.sum(off_PN1**2, (1, 2))
    s_NP = jnp.where(better_P[None], tried_NP, s_NP)
    factor_P = jnp.where(better_P, 0.3, 4.0)
    return (s_NP, damping_P11 * factor_P[:, None, None]), None

  damping_P11 = jnp.full((s_NP.shape[1], 1, 1), 1e-2, s_NP.dtype)
  return jax.lax.scan(body, (s_NP, damping_P11), length=steps)[0][0]


def _distinct(state_PN, speed_P, visited_MN):
  """The slowest of all that lie together, and how many these are."""
  # Together: within a hundredth of how far the visited states are spread.
  spread = np.sqrt(np.sum(np.var(visited_MN, axis=0)))
  within = 0.01 * max(spread, 1e-3)
  kept, counts = [], []
  for p in np.argsort(speed_P):
    away = [np.linalg.norm(state_PN[p] - state_PN[k]) for k in kept]
    if away and min(away) < within:
      counts[int(np.argmin(away))] += 1
    else:
      kept.append(int(p))
      counts.append(1)
  return kept, np.array(counts)
