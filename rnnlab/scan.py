"""`unroll`: the only way over time. Masks, resets, checkpointed chunks."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rnnlab import shapes, stepping
from rnnlab.bptt import autodiff, fused


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
    scan = fused if bptt == "fused" and len(steps.x) else autodiff
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


def trace(
  cell, params, x, carry=None, *, memory=None, mask_BT=None, reset_BT=None
) -> Trace:
  """Runs `cell` as `unroll` does and returns all that the steps computed.

  Its arguments are those of `unroll`. It is O(T) memory, for looking at a run;
  `stepping.step` from an entry and its input is that step again. Differentiable
  in any mode.
  """
  table, steps, batch = _steps(cell, params, x, mask_BT, reset_BT)
  start = cell.carry(params, batch)
  carry = start if carry is None else _columns(carry, start)
  weights, xs = cell.weights(params, False), steps
  if table is None:
    xs = steps._replace(x=stepping.project(cell, params, steps.x))

  def body(carry, step):
    carry, out, entry, a, _ = stepping.masked_step(
      cell, weights, memory, table, start, carry, step
    )
    u = step.x if table is None else stepping.read(table, step.x)
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
      table = stepping.project_table(cell, params, table_VD)
      # What an index means to jax, once for all steps.
      V, x = sizes["V"], x.astype(jnp.promote_types(x.dtype, jnp.int32))
      x = jnp.clip(jnp.where(x < 0, x + V, x), 0, V - 1)
    else:
      x = table_VD[x]
  steps = jax.tree.map(
    lambda a: jnp.swapaxes(a, 0, 1), stepping.Steps(x, mask_BT, reset_BT)
  )
  return table, steps, sizes["B"]


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
