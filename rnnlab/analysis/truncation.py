"""The gradient cut after K steps against the full one, for every K.

  L = sum_t L_t        g_K = sum_t sum_{d < K} dL_t / dparams at step t - d

g_K is what backpropagation gives that goes K steps back from every loss; g_T
is the gradient. The share of each distance is exact: the cotangents of all
losses are pulled back a step at a time, side by side, which takes T steps of a
T times larger batch and never a Jacobian.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rnnlab import scan, stepping


class Truncated(NamedTuple):
  """By K = 1 .. T, of the parameters of one recurrence, over all rows."""

  cosine_K: Any  # of g_K and g_T
  norm_K: Any  # |g_K| / |g_T|
  bias_K: Any  # |g_K - g_T| / |g_T|
  full: Any  # g_T


def measure(recurrence) -> Truncated:
  """Compares gradients of the summed loss of a `layers.Recurrence`.

  With respect to what acts in a step; inputs and a learned initial state are
  held. Masks and resets are those of the scan; a masked step counts as a step.
  Raises ValueError where there is no loss, or a memory.
  """
  r = recurrence
  if r.loss is None or r.memory is not None:
    what = "has no loss" if r.loss is None else "reads a memory at every step"
    raise ValueError(f"{r.name} {what}: no truncated gradient of it")
  trace, x_BTD = r.trace(), r.x
  if isinstance(x_BTD, scan.Lookup):
    x_BTD = x_BTD.table_VD[x_BTD.tokens_BT]
  B, T, _ = x_BTD.shape
  real_BT = jnp.ones((B, T), bool) if r.mask_BT is None else r.mask_BT
  reset_BT = jnp.zeros((B, T), bool) if r.reset_BT is None else r.reset_BT
  x_BTD = jnp.where(real_BT[..., None], x_BTD, 0)

  def loss(out):
    return jnp.sum(jnp.where(real_BT, r.loss(out), 0))

  def columns(x, time, row):
    """Steps and rows as one last axis, the rows of a step side by side."""
    x = jnp.moveaxis(x, (time, row), (-2, -1))
    return x.reshape(*x.shape[:-2], T * B)

  dout = jax.tree.map(lambda x: columns(x, 1, 0), jax.grad(loss)(trace.out))
  entries = jax.tree.map(lambda x: columns(x, 0, -1), trace.entries)
  x_DN, real_N, reset_N = (columns(x, 1, 0) for x in (x_BTD, real_BT, reset_BT))

  def back(d, dcarry, dout):
    """Every loss's cotangent a step further: d steps back to d + 1."""

    def at(x):  # what belongs to the step that is d before the loss's own
      return jnp.roll(x, d * B, axis=-1)

    def step(params, entry):
      u = r.cell.project(params, at(x_DN))
      return stepping.step(r.cell, params, entry, u)

    there_N = jnp.arange(T * B) >= d * B
    taken_N = there_N & at(real_N)
    _, pull = jax.vjp(step, r.params, jax.tree.map(at, entries))
    dparams, dentry = pull(_only(taken_N, (dcarry, dout)))
    # A step that is masked passes the state on, a reset takes no state.
    passed = _only(there_N & ~taken_N, dcarry)
    dentry = _only(taken_N & ~at(reset_N), dentry)
    return dparams, jax.tree.map(jnp.add, dentry, passed)

  def gradients(full):
    """Adds up distance by distance; with `full`, compares at each."""

    def body(loop, d):
      dcarry, dout, total = loop
      dparams, dcarry = back(d, dcarry, dout)
      total = jax.tree.map(jnp.add, total, dparams)
      compared = None
      if full is not None:
        rest = jax.tree.map(jnp.subtract, full, total)
        compared = _dot(total, full), _dot(total, total), _dot(rest, rest)
      # At distance 0 alone does a loss read its own output.
      return (dcarry, jax.tree.map(jnp.zeros_like, dout), total), compared

    zeros = (jax.tree.map(jnp.zeros_like, x) for x in (entries, r.params))
    (_, _, total), compared = lax.scan(
      body, (next(zeros), dout, next(zeros)), jnp.arange(T)
    )
    return total, compared

  full, _ = gradients(None)
  _, (dot_K, square_K, rest_K) = gradients(full)
  norm = jnp.sqrt(_dot(full, full))
  return Truncated(
    dot_K / jnp.sqrt(square_K) / norm,
    jnp.sqrt(square_K) / norm,
    jnp.sqrt(rest_K) / norm,
    full,
  )


def _only(flag_N, tree):
  return jax.tree.map(
    lambda x: jnp.where(jnp.broadcast_to(flag_N, x.shape), x, 0), tree
  )


def _dot(a, b):
  return sum(
    jnp.vdot(x, y)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
  )
