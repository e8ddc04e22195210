"""`unroll`: the only scan over time. Masks, resets, checkpoints, fused BPTT."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rnnlab import backend, shapes


class Lookup(NamedTuple):
  """Inputs that are rows of a table: `x_BTD = table_VD[tokens_BT]`.

  Said this way, `unroll` may project the table instead of every position.
  """

  table_VD: Any
  tokens_BT: Any


class Trace(NamedTuple):
  """What happened at every step, as columns with the time first."""

  carry: Any  # the final carry, batch first
  out: Any  # out_BTH, as from `unroll`
  entries: Any  # the carry that a step reads, after a reset: h_THB
  inputs: Any  # the projected input, u of every step
  activations: Any  # all `a` of a step, where masked too


class Steps(NamedTuple):
  """What a segment of time reads, time first: inputs and flags."""

  x: Any  # x_TBD (projected: u of every step), or tokens_TB into a table
  mask_TB: Any = None
  reset_TB: Any = None


def unroll(
  cell,
  params,
  x,
  carry=None,
  *,
  memory=None,
  mask_BT=None,
  reset_BT=None,
  reverse=False,
  chunk=None,
  unroll=1,
  bptt="fused",
):
  """Runs `cell` over time. Returns the final carry and the outputs.

  x: x_BTD, or a Lookup. carry: the initial carry, batch first (`h_BH`, or the
  cell's pytree of them); numbers are broadcast; None starts from `cell.carry`.
  The final carry comes back in the same form, the outputs as `h_BTH` (or the
  cell's pytree), aligned with the inputs whatever the direction.

  mask_BT: True where a step is real. Elsewhere nothing happens: the carry
  passes through, resets included, the output is 0, and what stands there, NaN
  included, reaches no value and no gradient. So the final carry is that of the
  last real step, for any mask.
  reset_BT: True where the carry becomes `cell.carry` before the step.
  memory: what every step may read and none changes; differentiable.
  chunk: keep carries only at the borders of chunks of that many steps and
  recompute the inside for the backward pass (T need not divide).
  bptt: "fused" keeps the backward loop to the state's cotangent and takes the
  weights' gradients in one product over all steps after it; "autodiff" leaves
  the same scan to JAX, which forward-mode differentiation needs.

  Truncation is the caller's: pass the carry on (value and graph), pass
  `stop_gradient` of it (value alone), or pass None (neither).

  Raises ValueError where shapes disagree, or for `reset_BT` with `reverse`.
  """
  if bptt not in ("fused", "autodiff"):
    raise ValueError(f"bptt is 'fused' or 'autodiff', not {bptt!r}")
  if reverse and reset_BT is not None:
    raise ValueError("reset_BT says where a sequence starts: not with reverse")
  if chunk is not None and chunk < 1:
    raise ValueError(f"chunk must be at least 1 step, not {chunk}")
  table, steps, batch = _steps(cell, params, x, mask_BT, reset_BT)
  start = cell.carry(params, batch)
  carry = start if carry is None else _columns(carry, start)

  def segment(carry, steps):
    # Without a step there is nothing to fuse.
    scan = _fused if bptt == "fused" and len(steps.x) else _plain
    args = (params, memory, table, start, carry, steps)
    return scan(cell, reverse, unroll, *args)

  if chunk is None:
    carry, out = segment(carry, steps)
  else:
    carry, out = _chunked(segment, carry, steps, chunk, reverse)
  return _rows(carry), jax.tree.map(lambda o: jnp.moveaxis(o, -1, 0), out)


def mask_of(length_B, T):
  """mask_BT of rows that hold `length_B` real steps, padded on the right.

  Raises ValueError with the row for a length outside 0 .. T, where lengths are
  known (not inside jit).
  """
  length_B = jnp.asarray(length_B)
  if not isinstance(length_B, jax.core.Tracer):
    for row, length in enumerate(length_B.tolist()):
      if not 0 <= length <= T:
        raise ValueError(f"row {row} has the length {length}, T is {T}")
  return jnp.arange(T)[None] < length_B[:, None]


def step(cell, params, carry, u, memory=None):
  """One step of `cell` on columns, for loops of a caller's own: carry, out."""
  a = _drive(cell, cell.weights(params, False), memory, carry, u)
  return cell.update(carry, a, memory)


def project_table(cell, params, table_VD):
  """The input side of every row, as a table whose rows `read` looks up."""
  padding = ((0, 0), (0, backend.ROW_PADDING))
  u = cell.project(params, table_VD.T)
  return jax.tree.map(lambda u_HV: jnp.pad(u_HV.T, padding), u)


def read(table, tokens_B):
  """The projected input of one step, u as columns; tokens in 0 .. V - 1."""
  return columns(look_up(table, tokens_B))


def look_up(table, tokens_B):
  """The rows of a projected table, which `columns` turns; tokens as in `read`.

  A loop that carries them from the end of one step to the start of the next
  keeps XLA:CPU from gathering them element by element, in what reads them.
  """
  # Nothing is compared at every step.
  how = {"mode": "promise_in_bounds", "wrap_negative_indices": False}
  return jax.tree.map(lambda t: t.at[tokens_B].get(**how), table)


def columns(rows):
  """u of rows that `look_up` found."""
  return jax.tree.map(lambda r: r.T[: -backend.ROW_PADDING], rows)


def trace(
  cell, params, x, carry=None, *, memory=None, mask_BT=None, reset_BT=None
) -> Trace:
  """Runs `cell` as `unroll` does and returns all that the steps computed.

  Its arguments are those of `unroll`. It is O(T) memory, for looking at a run;
  `step` from an entry and its input is that step again. Differentiable in any
  mode.
  """
  table, steps, batch = _steps(cell, params, x, mask_BT, reset_BT)
  start = cell.carry(params, batch)
  carry = start if carry is None else _columns(carry, start)
  weights, xs = cell.weights(params, False), steps
  if table is None:
    xs = steps._replace(x=_project(cell, params, steps.x))

  def body(carry, step):
    carry, out, entry, a, _ = _step(
      cell, weights, memory, table, start, carry, step
    )
    u = step.x if table is None else read(table, step.x)
    return carry, (out, entry, u, a)

  carry, (out, *rest) = lax.scan(body, carry, xs)
  out = jax.tree.map(lambda o: jnp.moveaxis(o, -1, 0), out)
  return Trace(_rows(carry), out, *rest)


def _steps(cell, params, x, mask_BT, reset_BT):
  """Cleans and turns time first: (projected table or None, Steps, batch)."""
  if isinstance(x, Lookup):
    table_VD, x = x.table_VD, x.tokens_BT
    sizes = shapes.check(
      table_VD=table_VD, tokens_BT=x, mask_BT=mask_BT, reset_BT=reset_BT
    )
  else:
    table_VD = None
    sizes = shapes.check(x_BTD=x, mask_BT=mask_BT, reset_BT=reset_BT)
  for name, flags in (("mask_BT", mask_BT), ("reset_BT", reset_BT)):
    if flags is not None and flags.dtype != bool:
      raise ValueError(f"{name} must be of bool, not {flags.dtype}")
  if mask_BT is not None:
    # Before the projection: a masked output alone would leave NaN in the
    # weights' gradient, as 0 * NaN.
    real = mask_BT if table_VD is not None else mask_BT[..., None]
    x = jnp.where(real, x, 0)
    if reset_BT is not None:
      reset_BT = reset_BT & mask_BT
  table = None
  if table_VD is not None:
    if sizes["V"] <= sizes["B"] * sizes["T"]:
      if mask_BT is not None:
        # Rows that only padding names are projected too: clean them as well.
        used_V = jnp.zeros(sizes["V"], bool).at[x].max(mask_BT)
        table_VD = jnp.where(used_V[:, None], table_VD, 0)
      table = project_table(cell, params, table_VD)
      # What an index means to jax, once for all steps.
      V, x = sizes["V"], x.astype(jnp.promote_types(x.dtype, jnp.int32))
      x = jnp.clip(jnp.where(x < 0, x + V, x), 0, V - 1)
    else:
      x = table_VD[x]
  steps = jax.tree.map(
    lambda a: jnp.swapaxes(a, 0, 1), Steps(x, mask_BT, reset_BT)
  )
  return table, steps, sizes["B"]


def _project(cell, params, x_TBD):
  """One product for all steps of a segment: u, time first."""
  T, B, D = x_TBD.shape
  x_DN = backend.materialised(x_TBD.reshape(T * B, D).T)
  u = cell.project(params, x_DN)
  return jax.tree.map(
    lambda u_HN: jnp.swapaxes(u_HN.reshape(len(u_HN), T, B), 0, 1), u
  )


def _columns(carry, start):
  """A caller's carry, batch first, as columns of the cell's own types."""
  if jax.tree.structure(carry) != jax.tree.structure(start):
    raise ValueError(
      f"the carry has the structure {jax.tree.structure(carry)}, but that of "
      f"the cell is {jax.tree.structure(start)}"
    )

  def column(given, own):
    given = jnp.asarray(given, own.dtype)
    rows = (own.shape[-1], *own.shape[:-1])
    if given.ndim and given.shape != rows:
      raise ValueError(
        f"the carry has the shape {given.shape}, but the cell needs {rows}"
      )
    return jnp.moveaxis(jnp.broadcast_to(given, rows), 0, -1)

  return jax.tree.map(column, carry, start)


def _rows(carry):
  return jax.tree.map(lambda c: jnp.moveaxis(c, -1, 0), carry)


def _chunked(segment, carry, steps, chunk, reverse):
  """Scans checkpointed segments of `chunk` steps."""
  T, B = steps.x.shape[:2]
  tail = -T % chunk
  if tail and steps.mask_TB is None:
    steps = steps._replace(mask_TB=jnp.ones((T, B), bool))

  def fold(a):
    # Masked steps keep the carry, so the tail of the last chunk is harmless.
    a = jnp.pad(a, [(0, tail)] + [(0, 0)] * (a.ndim - 1))
    return a.reshape(-1, chunk, *a.shape[1:])

  carry, out = lax.scan(
    jax.checkpoint(segment), carry, jax.tree.map(fold, steps), reverse=reverse
  )
  return carry, jax.tree.map(lambda o: o.reshape(-1, *o.shape[2:])[:T], out)


def _where(flag_B, new, old):
  """Leaf by leaf; the batch is last, so the flags broadcast as they stand."""
  if flag_B is None:
    return new
  return jax.tree.map(
    lambda n, o: jnp.where(flag_B.reshape((1,) * (n.ndim - 1) + (-1,)), n, o),
    new,
    old,
  )


def _zeros(tree):
  return jax.tree.map(jnp.zeros_like, tree)


def _drive(cell, weights, memory, entry, u):
  a = ()
  for stage in cell.drive:
    a += (stage(weights, entry, u, a, memory),)
  return a


def _step(cell, weights, memory, table, start, carry, step):
  """One step: (carry, out, entry, a, twice).

  entry is the carry after a reset. twice says of the carry's leaves that are
  leaves of the output as well which ones: {number: number there}.
  """
  entry = carry
  if step.reset_TB is not None:
    entry = _where(step.reset_TB, start, carry)
  u = step.x if table is None else read(table, step.x)
  a = _drive(cell, weights, memory, entry, u)
  new, out = cell.update(entry, a, memory)
  shown = {id(leaf): at for at, leaf in _numbered(out).items()}
  twice = {
    i: shown.pop(id(leaf))
    for i, leaf in _numbered(new).items()
    if id(leaf) in shown
  }
  if step.mask_TB is not None:
    new, out = _where(step.mask_TB, (new, out), (entry, _zeros(out)))
  return new, out, entry, a, twice


def _plain(cell, reverse, unroll, params, memory, table, start, carry, steps):
  weights = cell.weights(params, False)

  def body(carry, step):
    carry, out, *_ = _step(cell, weights, memory, table, start, carry, step)
    return carry, out

  if table is None:
    steps = steps._replace(x=_project(cell, params, steps.x))
  return lax.scan(body, carry, steps, reverse=reverse, unroll=unroll)


# The fused BPTT. Left to JAX, the backward loop would add a weight gradient of
# the weights' full size at every step. Here it carries the cotangent of the
# carry alone and emits those of the pre-activations; the weight gradients are
# then products over all steps at once (dU = sum_t da_t h_{t-1}^T). What of a
# carry is the output as well is stored once (a tenth of row W4).
@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _fused(cell, reverse, unroll, params, memory, table, start, carry, steps):
  args = (params, memory, table, start, carry, steps)
  return _plain(cell, reverse, unroll, *args)


def _fused_fwd(
  cell, reverse, unroll, params, memory, table, start, carry, steps
):
  weights, traced = cell.weights(params, False), {}

  def body(carry, step):
    new, out, entry, a, twice = _step(
      cell, weights, memory, table, start, carry, step
    )
    traced.update(twice=twice, out=jax.tree.structure(out))
    after, out, entry = map(_numbered, (new, out, entry))
    for i, at in twice.items():
      del out[at], entry[i]
    return new, ({i: after[i] for i in twice}, out, entry, a)

  xs = steps
  if table is None:
    xs = steps._replace(x=_project(cell, params, steps.x))
  last, (after, out, entry, a) = lax.scan(
    body, carry, xs, reverse=reverse, unroll=unroll
  )
  first, restored = _numbered(carry), _numbered(start)
  for i, at in traced["twice"].items():
    entry[i] = _before(first[i], after[i], reverse)
    if steps.reset_TB is not None:
      reset = jax.vmap(_where, (0, None, 0))
      entry[i] = reset(steps.reset_TB, restored[i], entry[i])
    out[at] = jax.vmap(_where, (0, 0, None))(steps.mask_TB, after[i], 0)
  out = traced["out"].unflatten(out[i] for i in sorted(out))
  entry = jax.tree.structure(carry).unflatten(entry[i] for i in sorted(entry))
  return (last, out), (params, memory, table, start, steps, entry, a)


def _numbered(tree):
  return dict(enumerate(jax.tree.leaves(tree)))


def _before(first, c_THB, reverse):
  """What every step reads of a carry, from what it leaves and the first."""
  if reverse:
    return jnp.concatenate([c_THB[1:], first[None]])
  return jnp.concatenate([first[None], c_THB[:-1]])


def _fused_bwd(cell, reverse, unroll, saved, cotangents):
  params, memory, table, start, steps, entries, activations = saved

  def inputs(params, table, x):
    if table is None:
      return _project(cell, params, x)
    return jax.vmap(partial(read, table))(x)

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
  return dparams, dmemory, dtable, dstart, dcarry, Steps(dx)


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
      zero = _zeros((dcarry, dout))
      dpass = _where(step.mask_TB, zero[0], dcarry)
      dnew, dout = _where(step.mask_TB, (dcarry, dout), zero)
    dentry, da = _back_one_step(
      cell, _transpose(flipped), memory, u, entry, a, (dnew, dout)
    )
    if dpass is not None:
      dentry = jax.tree.map(jnp.add, dentry, dpass)
    dcarry = dentry
    if step.reset_TB is not None:
      zero = _zeros(dentry)
      dcarry = _where(step.reset_TB, zero, dentry)
      dfired = _where(step.reset_TB, dentry, zero)
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
    (dcarry, _zeros(start), last, activations),
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


_fused.defvjp(_fused_fwd, _fused_bwd)
