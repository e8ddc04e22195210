"""The scan over a segment of time, and its backward pass: by JAX, or fused.

Left to JAX, the backward loop would add a weight gradient of the weights' full
size at every step. Fused, it carries the cotangent of the carry alone and emits
those of the pre-activations; the weight gradients are then products over all
steps at once (dU = sum_t da_t h_{t-1}^T).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from rnnlab import backend, stepping


def autodiff(cell, reverse, unroll, params, memory, table, start, carry, steps):
  """All `steps` of a segment, left to JAX: the final carry and the outputs.

  start: what a reset restores. table: a projected table, or None where `steps`
  hold vectors. carry and outputs are columns, the outputs with the time first.
  """
  weights = cell.weights(params, False)

  def body(carry, step):
    carry, out, *_ = stepping.masked_step(
      cell, weights, memory, table, start, carry, step
    )
    return carry, out

  if table is None:
    steps = steps._replace(x=stepping.project(cell, params, steps.x))
  return lax.scan(body, carry, steps, reverse=reverse, unroll=unroll)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def fused(cell, reverse, unroll, params, memory, table, start, carry, steps):
  """`autodiff` with a backward pass of its own.

  What of a carry is the output as well is stored once (a tenth of row W4).
  """
  args = (params, memory, table, start, carry, steps)
  return autodiff(cell, reverse, unroll, *args)


def _fwd(cell, reverse, unroll, params, memory, table, start, carry, steps):
  weights, traced = cell.weights(params, False), {}

  def body(carry, step):
    new, out, entry, a, twice = stepping.masked_step(
      cell, weights, memory, table, start, carry, step
    )
    traced.update(twice=twice, out=jax.tree.structure(out))
    after, out, entry = map(stepping.numbered, (new, out, entry))
    for i, at in twice.items():
      del out[at], entry[i]
    return new, ({i: after[i] for i in twice}, out, entry, a)

  xs = steps
  if table is None:
    xs = steps._replace(x=stepping.project(cell, params, steps.x))
  last, (after, out, entry, a) = lax.scan(
    body, carry, xs, reverse=reverse, unroll=unroll
  )
  first, restored = stepping.numbered(carry), stepping.numbered(start)
  for i, at in traced["twice"].items():
    entry[i] = _before(first[i], after[i], reverse)
    if steps.reset_TB is not None:
      reset = jax.vmap(stepping.where, (0, None, 0))
      entry[i] = reset(steps.reset_TB, restored[i], entry[i])
    out[at] = jax.vmap(stepping.where, (0, 0, None))(steps.mask_TB, after[i], 0)
  out = traced["out"].unflatten(out[i] for i in sorted(out))
  entry = jax.tree.structure(carry).unflatten(entry[i] for i in sorted(entry))
  return (last, out), (params, memory, table, start, steps, entry, a)


def _before(first, c_THB, reverse):
  """What every step reads of a carry, from what it leaves and the first."""
  if reverse:
    return jnp.concatenate([c_THB[1:], first[None]])
  return jnp.concatenate([first[None], c_THB[:-1]])


def _bwd(cell, reverse, unroll, saved, cotangents):
  params, memory, table, start, steps, entries, activations = saved

  def inputs(params, table, x):
    if table is None:
      return stepping.project(cell, params, x)
    return jax.vmap(partial(stepping.read, table))(x)

  # A stage only adds u, so any value of it gives the same derivatives.
  u_T = jax.tree.map(
    lambda u: jnp.zeros(u.shape, u.dtype),
    jax.eval_shape(inputs, params, table, steps.x),
  )
  weights, pull_weights = jax.vjp(
    lambda params: cell.weights(params, backend.gate_by_gate()), params
  )
  dcarry, dstart, da_T, dupdate_T = _back_in_time(
    cell, reverse, unroll, weights, u_T, saved, cotangents
  )

  def steps_at_once(weights, memory, u_T):
    def stage(i, entry, u, earlier):
      return cell.drive[i](weights, entry, u, earlier, memory)

    a = tuple(
      jax.vmap(partial(stage, i))(entries, u_T, activations[:i])
      for i in range(len(cell.drive))
    )
    if memory is None:
      return a, None
    update = jax.vmap(lambda e, a: cell.update(e, a, memory))
    return a, update(entries, activations)

  _, pull = jax.vjp(steps_at_once, weights, memory, u_T)
  dweights, dmemory, du_T = pull((da_T, dupdate_T))
  (dparams,) = pull_weights(dweights)
  if table is None:
    _, pull = jax.vjp(lambda params: inputs(params, None, steps.x), params)
    dparams = jax.tree.map(jnp.add, dparams, *pull(du_T))
    restored = _transpose(_flip(params))
    _, pull = jax.vjp(lambda x: inputs(restored, None, x), steps.x)
    (dtable, (dx,)) = None, pull(du_T)
  else:
    _, pull = jax.vjp(lambda table: inputs(params, table, steps.x), table)
    (dtable,), dx = pull(du_T), None
  return dparams, dmemory, dtable, dstart, dcarry, stepping.Steps(dx)


def _back_in_time(cell, reverse, unroll, weights, u_T, saved, cotangents):
  """The backward loop: cotangents of the first carry, of what resets restore,
  of all pre-activations and, where there is a memory, of all updates."""
  _, memory, _, start, steps, entries, activations = saved
  dcarry, dout = cotangents
  # Or the compiler would turn it twice, once into its own order (3 % of W4).
  dout = jax.tree.map(backend.materialised, dout)
  u = jax.tree.map(lambda u: jnp.zeros(u.shape[1:], u.dtype), u_T)
  flipped, T = _flip(weights), len(steps.x)

  def body(cotangent, xs):
    dcarry, dstart, a, slots = cotangent
    t, dout, step, entry = xs
    dpass, dnew = None, dcarry
    if step.mask_TB is not None:
      zero = stepping.zeros((dcarry, dout))
      dpass = stepping.where(step.mask_TB, zero[0], dcarry)
      dnew, dout = stepping.where(step.mask_TB, (dcarry, dout), zero)
    dentry, da = _back_one_step(
      cell, _transpose(flipped), memory, u, entry, a, (dnew, dout)
    )
    if dpass is not None:
      dentry = jax.tree.map(jnp.add, dentry, dpass)
    dcarry = dentry
    if step.reset_TB is not None:
      zero = stepping.zeros(dentry)
      dcarry = stepping.where(step.reset_TB, zero, dentry)
      dfired = stepping.where(step.reset_TB, dentry, zero)
      dstart = jax.tree.map(jnp.add, dstart, dfired)
    # What was stored of a step makes room for its cotangent. The next step's
    # is read after that, or the compiler would copy all slots at every step.
    slots = jax.tree.map(partial(put, t), slots, da)
    a = at(t + 1 if reverse else t - 1, slots)
    # Only where there is a memory are the update's cotangents needed later.
    dupdate = None if memory is None else (dnew, dout)
    return (dcarry, dstart, a, slots), dupdate

  # Both clamp t, where indices would be compared and selected by at every step.
  how = {"axis": 0, "allow_negative_indices": False}

  def put(t, slot, d):
    return lax.dynamic_update_index_in_dim(slot, d, t, **how)

  def at(t, slots):
    one = partial(lax.dynamic_index_in_dim, index=t, keepdims=False, **how)
    return jax.tree.map(one, slots)

  last = at(0 if reverse else T - 1, activations)
  (dcarry, dstart, _, da_T), dupdate_T = lax.scan(
    body,
    (dcarry, stepping.zeros(start), last, activations),
    (jnp.arange(T), dout, steps._replace(x=None), entries),
    reverse=not reverse,
    unroll=unroll,
  )
  return dcarry, dstart, da_T, dupdate_T


def _back_one_step(cell, weights, memory, u, entry, a, cotangents):
  """The cotangents of what a step read of the carry, and of its stages."""
  _, pull = jax.vjp(lambda e, a: cell.update(e, a, memory), entry, a)
  dentry, da = pull(cotangents)
  for i in reversed(range(len(cell.drive))):

    def stage(entry, earlier, i=i):
      return cell.drive[i](weights, entry, u, earlier, memory)

    _, pull = jax.vjp(stage, entry, a[:i])
    more, dearlier = pull(da[i])
    dentry = jax.tree.map(jnp.add, dentry, more)
    da = (*jax.tree.map(jnp.add, da[:i], dearlier), *da[i:])
  return dentry, da


def _flip(weights):
  """The transposed matrices, as the backward pass multiplies by them.

  XLA:CPU would transpose them at every step; this way it happens once.
  """
  return jax.tree.map(backend.materialised, _transpose(weights))


def _transpose(weights):
  return jax.tree.map(lambda w: w.T if w.ndim == 2 else w, weights)


fused.defvjp(_fwd, _bwd)
