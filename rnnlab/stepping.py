"""One step of a cell: what it reads, and what a mask and a reset do to it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rnnlab import backend


class Steps(NamedTuple):
  """What a segment of time reads, time first: inputs and flags."""

  x: Any  # x_TBD (projected: u of every step), or tokens_TB into a table
  mask_TB: Any = None
  reset_TB: Any = None


def step(cell, params, carry, u, memory=None):
  """One step of `cell` on columns, for loops of a caller's own: carry, out."""
  a = drive(cell, cell.weights(params, False), memory, carry, u)
  return cell.update(carry, a, memory)


def masked_step(cell, weights, memory, table, start, carry, step):
  """One step with its flags: (carry, out, entry, a, twice).

  entry is the carry after a reset. twice says of the carry's leaves that are
  leaves of the output as well which ones: {number: number there}.
  """
  entry = carry
  if step.reset_TB is not None:
    entry = where(step.reset_TB, start, carry)
  u = step.x if table is None else read(table, step.x)
  a = drive(cell, weights, memory, entry, u)
  new, out = cell.update(entry, a, memory)
  shown = {id(leaf): at for at, leaf in numbered(out).items()}
  twice = {
    i: shown.pop(id(leaf))
    for i, leaf in numbered(new).items()
    if id(leaf) in shown
  }
  if step.mask_TB is not None:
    new, out = where(step.mask_TB, (new, out), (entry, zeros(out)))
  return new, out, entry, a, twice


def numbered(tree):
  """The leaves of a tree by their number."""
  return dict(enumerate(jax.tree.leaves(tree)))


def project(cell, params, x_TBD):
  """One product for all steps of a segment: u, time first."""
  T, B, D = x_TBD.shape
  x_DN = backend.materialised(x_TBD.reshape(T * B, D).T)
  u = cell.project(params, x_DN)
  return jax.tree.map(
    lambda u_HN: jnp.swapaxes(u_HN.reshape(len(u_HN), T, B), 0, 1), u
  )


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


def drive(cell, weights, memory, entry, u):
  """The pre-activations of all stages of a step."""
  a = ()
  for stage in cell.drive:
    a += (stage(weights, entry, u, a, memory),)
  return a


def where(flag_B, new, old):
  """Leaf by leaf; the batch is last, so the flags broadcast as they stand."""
  if flag_B is None:
    return new
  return jax.tree.map(
    lambda n, o: jnp.where(flag_B.reshape((1,) * (n.ndim - 1) + (-1,)), n, o),
    new,
    old,
  )


def zeros(tree):
  return jax.tree.map(jnp.zeros_like, tree)
