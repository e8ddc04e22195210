"""A recurrence along its trajectory: linear maps from state to state.

  s_t = F(s_{t-1}, u_t)        J_t = ds_t / ds_{t-1}, at the states that were

The state is the cell's whole carry as one vector s_N, an LSTM's h and c both.
Nothing here makes a Jacobian that nobody asks for: `push` applies J_t to
tangents and `pull` its transpose to cotangents, many at a time, for any cell.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Steps(NamedTuple):
  """Steps to be taken: one, or many with the time in front."""

  state_NB: Any  # the state before the step
  inputs: Any  # what it reads, projected
  activations: Any  # its `a`
  real_B: Any  # elsewhere nothing happens, and J is the identity


class Path(NamedTuple):
  """A recurrence that can be taken step by step, and where it went.

  All rows end at the last of the T steps, whatever mask they had: distances
  from the end are the same in all. A row's last reset is where it begins.
  """

  drive: Any  # (s_NB, u) -> a
  update: Any  # (s_NB, a) -> s_NB
  gates: Any  # (a) -> {name: logits_HB}, or None
  steps: Steps
  loss_NB: Any  # d(loss of the last step) / d(the state before it), or None

  @property
  def length_B(self):
    """How many steps there are, by row."""
    return jnp.sum(self.steps.real_B, axis=0)

  def at(self, t) -> Steps:
    """One step, or those of an array of indices."""
    return jax.tree.map(lambda x: x[t], self.steps)


def follow(recurrence, trace=None) -> Path:
  """The path that a `layers.Recurrence` takes; trace: its own, if at hand."""
  r, trace = recurrence, trace or recurrence.trace()
  T, _, B = jax.tree.leaves(trace.entries)[0].shape
  like = jax.tree.map(lambda e: e[0], trace.entries)
  mask_TB = jnp.ones((T, B), bool) if r.mask_BT is None else r.mask_BT.T
  real_TB = mask_TB
  if r.reset_BT is not None:
    fired_TB = r.reset_BT.T & mask_TB
    real_TB &= ~_any_later(fired_TB)
  # False first, each group in its order.
  order_TB = jnp.argsort(real_TB, axis=0, stable=True)

  def aligned(x):
    order = order_TB.reshape(T, *[1] * (x.ndim - 2), B)
    return jnp.take_along_axis(x, order, axis=0)

  weights = r.cell.weights(r.params, False)

  def drive(s_NB, u):
    carry, a = _tree(s_NB, like), ()
    for stage in r.cell.drive:
      a += (stage(weights, carry, u, a, r.memory),)
    return a

  def update(s_NB, a):
    return _vector(r.cell.update(_tree(s_NB, like), a, r.memory)[0])

  def show(s_NB, u):
    a = drive(s_NB, u)
    return r.cell.update(_tree(s_NB, like), a, r.memory)[1]

  entries = jax.vmap(_vector)(trace.entries)
  found = Steps(entries, trace.inputs, trace.activations, real_TB)
  steps = jax.tree.map(aligned, found)
  loss_NB = None
  if r.loss is not None:
    last_TB = mask_TB & ~_any_later(mask_TB)
    dout = jax.grad(lambda o: jnp.sum(jnp.where(last_TB.T, r.loss(o), 0)))(
      trace.out
    )
    # All other steps of a row have no share in it.
    dout = jax.tree.map(lambda o: jnp.moveaxis(jnp.sum(o, 1), 0, -1), dout)
    s_NB, u = jax.tree.map(lambda x: x[-1], (steps.state_NB, steps.inputs))
    loss_NB = jax.vjp(lambda s_NB: show(s_NB, u), s_NB)[1](dout)[0]
  return Path(drive, update, r.cell.gates, steps, loss_NB)


def push(path, at, ds_RNB):
  """J of one step, on R tangents a row."""

  def step(s_NB):
    return path.update(s_NB, path.drive(s_NB, at.inputs))

  _, jvp = jax.linearize(step, at.state_NB)
  return jnp.where(at.real_B[None, None], jax.vmap(jvp)(ds_RNB), ds_RNB)


def pull(path, at, ct_RNB):
  """The transpose of J of one step, on R cotangents a row."""

  def step(s_NB):
    return path.update(s_NB, path.drive(s_NB, at.inputs))

  _, vjp = jax.vjp(step, at.state_NB)
  moved_RNB = jax.vmap(lambda ct_NB: vjp(ct_NB)[0])(ct_RNB)
  return jnp.where(at.real_B[None, None], moved_RNB, ct_RNB)


def jacobian(path, at):
  """J of one step as a matrix, J_BNN; for sizes that allow it."""
  columns_NNB = push(path, at, basis(at.state_NB))
  return jnp.transpose(columns_NNB, (2, 1, 0))


def basis(s_NB):
  """All unit vectors, as N tangents a row."""
  eye_NN1 = jnp.eye(len(s_NB), dtype=s_NB.dtype)[..., None]
  return jnp.broadcast_to(eye_NN1, (len(s_NB), *s_NB.shape))


def _any_later(flag_TB):
  """Where a flag stands at a later step of the row."""
  after_TB = jnp.cumsum(flag_TB[::-1], axis=0)[::-1] - flag_TB
  return after_TB > 0


def _vector(carry):
  """All leaves of a carry under one another: s_NB."""
  leaves = [c.reshape(-1, c.shape[-1]) for c in jax.tree.leaves(carry)]
  return jnp.concatenate(leaves)


def _tree(s_NB, like):
  leaves, tree = jax.tree.flatten(like)
  ends, start = [], 0
  for leaf in leaves:
    rows = leaf.size // leaf.shape[-1]
    ends.append(s_NB[start : start + rows].reshape(*leaf.shape[:-1], -1))
    start += rows
  return tree.unflatten(ends)
