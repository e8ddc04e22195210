"""How much memory a backward pass through time takes, and which chunk fits.

In numbers a step and row, by a cell's shapes alone: E of the carry, U of the
projected input, A of the pre-activations, O of the output, D of the input. With
W numbers in the weights that the loop reads and P in all parameters

  plain     B T (E + A + U + O) + max(B T U, W)
  chunks    B T (E / k + O + D) + max(B k (E + A + 2 U + O + D), W) + P

since with chunks of k steps the carries at their borders stay, and the steps of
one chunk at a time. The first falls with k and the second grows, so the least
memory is at k about sqrt(T E / (E + A + 2 U + O + D)).

The recomputation is one more forward pass for any k, so the chunk that costs
least is the longest that fits: fewer borders, and larger products.
"""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rnnlab import layers as stacks
from rnnlab import scan, stepping

UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
AUTO = re.compile(r"auto:(\d+(?:\.\d+)?)(B|KiB|MiB|GiB)")


class Step(NamedTuple):
  """The bytes of one step and row, and those of the weights."""

  carry: Any  # E
  activations: Any  # A
  inputs: Any  # U
  out: Any  # O
  x: Any  # D
  weights: Any  # W
  params: Any  # P
  arrays: Any  # of which the carry consists

  @property
  def kept(self):
    """What the backward pass through a step holds of it."""
    return self.carry + self.activations + 2 * self.inputs + self.out


class Plan(NamedTuple):
  """The chunk for a budget; None is the plain scan, which recomputes nothing.

  fits is False where even the least is more than the budget.
  """

  chunk: Any
  bytes: Any
  fits: Any


def step_of(cell, params, d_in) -> Step:
  """The sizes of a cell's step, by shape inference alone."""

  def run(params):
    x_DN = jnp.zeros((d_in, 1))
    carry, u = cell.carry(params, 1), cell.project(params, x_DN)
    weights, a = cell.weights(params, False), ()
    for stage in cell.drive:
      a += (stage(weights, carry, u, a, None),)
    return carry, a, u, cell.update(carry, a, None)[1], x_DN, weights, params

  shapes = jax.eval_shape(run, params)
  return Step(*map(_bytes, shapes), len(jax.tree.leaves(shapes[0])))


def predict(steps, B, T, chunk=None) -> int:
  """Bytes that the gradient of a stack's outputs takes besides its arguments.

  steps: of all layers, each reading the one below. What the layers keep adds
  up; what only the one at work needs does not. It is what XLA:CPU's own
  analysis says, to some percent.
  """
  weights, several = sum(s.weights for s in steps), len(steps) > 1
  if chunk is None:
    kept = sum(s.carry + s.activations + several * s.out for s in steps)
    inputs = max(s.inputs for s in steps)
    at_work = B * T * inputs + max(B * T * inputs, weights)
    return B * T * (kept + steps[-1].out) + at_work
  n, k = -(-T // chunk), min(chunk, T)
  whole = sum(n * s.carry + n * chunk * (s.out + s.x) for s in steps)
  # The chunk of one layer goes back before that of the one above is let go.
  inside = B * (1 + several) * max(k * (s.kept + s.x) for s in steps)
  most = max(s.params for s in steps)
  if chunk > 1:
    inside = max(inside, weights)
  elif B > 1:
    # With a step a chunk the compiler copies stored carries, before the sums of
    # the weights' gradients are there.
    most = max([most, *(B * n * s.carry for s in steps if s.arrays == 1)])
  if chunk == 1:
    most += max(s.out**2 // 4 for s in steps)  # a gate's matrix, turned
  at_work = inside + most
  if T % chunk:
    # Filling up the last chunk copies the inputs (half of the copy may stay);
    # of a single row also the outputs' cotangents.
    x = B * T * steps[0].x
    copied = x + (T * steps[-1].out if B == 1 else 0)
    at_work = max(at_work + x, copied)
  return B * whole + at_work


def plan(steps, B, T, budget, beside=0) -> Plan:
  """The chunk with the least recomputation that fits a budget in bytes.

  steps: of all layers. beside: bytes a step and row that something else takes
  (a readout), once all layers went forward and before they go back. The plain
  scan, if it fits; else the longest chunk that does; else what takes least.
  """

  def most(chunk):
    waiting = sum(s.carry + s.activations + s.out for s in steps) * T
    if chunk is not None:
      n = -(-T // chunk)
      waiting = sum(n * s.carry + T * (s.out + s.x) for s in steps)
    waiting += T * beside
    return max(predict(steps, B, T, chunk), B * waiting)

  plain = most(None)
  if plain <= budget:
    return Plan(None, plain, True)
  bytes_K = np.array([most(k) for k in range(1, T + 1)])
  fitting = np.flatnonzero(bytes_K <= budget)
  k = int(fitting[-1] if len(fitting) else bytes_K.argmin())
  return Plan(k + 1, int(bytes_K[k]), bool(len(fitting)))


def budget_of(chunk) -> int | None:
  """The bytes of "auto:512MiB"; None where `chunk` is a number or not set.

  Raises ValueError for a number below 1 and for other words.
  """
  if chunk is None or isinstance(chunk, int):
    if chunk is not None and chunk < 1:
      raise ValueError(f"model.chunk must be at least 1, not {chunk}")
    return None
  found = AUTO.fullmatch(chunk)
  if not found:
    raise ValueError(
      "model.chunk is a number of steps, or a budget as in 'auto:512MiB' (B, "
      f"KiB, MiB or GiB), not {chunk!r}"
    )
  return int(float(found[1]) * UNITS[found[2]])


def chunk_of(chunk, stack, params, x, beside=0):
  """The number of steps that `model.chunk` means for the input x of a stack.

  chunk: a number or None, which it is itself; or a budget as for `budget_of`.
  stack, params: cells, and theirs in the order of layers; a dict of directions
  counts each. x: x_BTD or a Lookup. beside: as for `plan`. Raises ValueError
  where nothing fits.
  """
  budget = budget_of(chunk)
  if budget is None:
    return chunk
  looked_up = isinstance(x, scan.Lookup)
  B, T = x.tokens_BT.shape if looked_up else x.shape[:2]
  V, d_in = x.table_VD.shape if looked_up else (0, x.shape[-1])
  steps = []
  for cell, own in zip(stack, params, strict=True):
    parts = own.values() if "forward" in own or "backward" in own else [own]
    steps += [step_of(cell, part, d_in) for part in parts]
    d_in = sum(stacks.width(cell, part, d_in) for part in parts)
  if looked_up and V <= B * T:
    # Rows of a table that is projected once: only their cotangents are kept.
    for i, step in enumerate(steps[: len(steps) // len(stack)]):
      steps[i] = step._replace(inputs=step.inputs // 2, x=0)
  found = plan(steps, B, T, budget, beside)
  if not found.fits:
    raise ValueError(
      f"model.chunk={chunk!r}: {B} rows of {T} steps take "
      f"{found.bytes / 2**20:.3g} MiB at least, with chunks of {found.chunk}"
    )
  return found.chunk


def compiled(cell, params, B, T, d_in, chunk=None) -> int:
  """The bytes that the compiled gradient of one layer takes besides arguments.

  Nothing is run. The gradient is that of the outputs, with respect to the
  parameters and the input.
  """

  def loss(params, x_BTD, c_BTH):
    carry, h_BTH = scan.unroll(cell, params, x_BTD, chunk=chunk)
    return jnp.vdot(h_BTH, c_BTH), carry

  x_BTD = jax.ShapeDtypeStruct((B, T, d_in), jnp.float32)
  width = stacks.width(cell, params, d_in)
  c_BTH = jax.ShapeDtypeStruct((B, T, width), jnp.float32)
  like = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
  run = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
  return _temporary(run.lower(like, x_BTD, c_BTH))


def generating(cell, params, B, T, d_in) -> int:
  """The bytes of T steps forward, each of which reads what the last one said.

  Nothing but the carry has to stay, so they do not grow with T.
  """

  def run(params, x_DB):
    def body(_, loop):
      carry, x_DB = loop
      u = cell.project(params, x_DB)
      carry, out_HB = stepping.step(cell, params, carry, u)
      return carry, jnp.resize(out_HB, x_DB.shape)

    return jax.lax.fori_loop(0, T, body, (cell.carry(params, B), x_DB))

  like = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), params)
  x_DB = jax.ShapeDtypeStruct((d_in, B), jnp.float32)
  return _temporary(jax.jit(run).lower(like, x_DB))


def _temporary(lowered):
  return lowered.compile().memory_analysis().temp_size_in_bytes


def _bytes(tree):
  return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
