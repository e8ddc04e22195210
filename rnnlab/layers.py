"""Stacks of cells that read forward: layer by layer over all of time, or as one
cell step by step.

What reads in other directions, or ahead, is in `wiring`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from rnnlab import cells, nn, scan, stepping


class Recurrence(NamedTuple):
  """One recurrence of a model and what it read: what an analysis starts from.

  Time is the order of reading: a backward direction has its last step first.
  """

  name: Any
  cell: Any
  params: Any
  x: Any  # x_BTD, or a scan.Lookup
  carry: Any = None  # the initial carry, batch first; None is the cell's own
  memory: Any = None
  mask_BT: Any = None
  reset_BT: Any = None
  loss: Any = None  # (out) -> loss_BT of each step's output, in nats; or None

  def trace(self) -> scan.Trace:
    """Every step of it."""
    return scan.trace(
      self.cell,
      self.params,
      self.x,
      self.carry,
      memory=self.memory,
      mask_BT=self.mask_BT,
      reset_BT=self.reset_BT,
    )


def init(stack, key, d_in):
  """Parameters of a stack, one entry a layer; each reads the one below."""
  params = []
  keys = jax.random.split(key, len(stack))
  for cell, own_key in zip(stack, keys, strict=True):
    params.append(cell.init(own_key, d_in))
    d_in = width(cell, params[-1], d_in)
  return tuple(params)


def width(cell, params, d_in):
  """The width of a cell's output, by shape inference alone."""

  def out(params):
    u = cell.project(params, jnp.zeros((d_in, 1)))
    return stepping.step(cell, params, cell.carry(params, 1), u)[1]

  return jax.eval_shape(out, params).shape[0]


class Join(NamedTuple):
  """How a layer's output joins what it read; without either it replaces it.

  norm: an output has the mean 0 and the variance 1 over its units; a gain and a
  bias would be one with the affine map that reads it, so there are none.
  residual: above the first layer an output is added to what the layer read.
  """

  norm: bool = False
  residual: bool = False

  def output(self, out, axis):
    """A layer's output; axis: its units."""
    return normalised(out, axis) if self.norm else out

  def add(self, layer, below, out):
    """What the next layer reads."""
    return below + out if self.residual and layer else out


PLAIN = Join()


def normalised(x, axis):
  """Mean 0 and variance 1 along an axis, computed in float32 or wider."""
  wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
  wide -= jnp.mean(wide, axis, keepdims=True)
  variance = jnp.mean(wide * wide, axis, keepdims=True)
  return (wide * lax.rsqrt(variance + 1e-6)).astype(x.dtype)


def unroll(
  stack,
  params,
  x,
  carry=None,
  *,
  between=None,
  join=PLAIN,
  memories=None,
  **options,
):
  """Runs the layers one after another over all of time.

  Each layer's input product then covers all steps at once. `x`, the flags and
  `options` are those of `scan.unroll`; carry holds one entry a layer, or None.
  `between(layer, h_BTH) -> h_BTH` is applied to every layer's output (dropout)
  before it is joined with what the layer read. memories: one a layer. Returns
  (carry, h_BTH of the top layer). Every layer runs forward, so an output
  depends on its prefix alone.
  """
  carry = (None,) * len(stack) if carry is None else carry
  final = []
  for layer, cell in enumerate(stack):
    own = {} if memories is None else {"memory": memories[layer]}
    args = cell, params[layer], x, carry[layer]
    last, out = scan.unroll(*args, **own, **options)
    final.append(last)
    out = join.output(out, -1)
    out = out if between is None else between(layer, out)
    x = join.add(layer, x, out)
  return tuple(final), x


def embedded(table_VD, x):
  """What x stands for as an input of `unroll`.

  x: tokens_BT, or x_BTV in their place: one-hot vectors, or anything else that
  a derivative with respect to a token may be taken at.
  """
  if jnp.issubdtype(x.dtype, jnp.integer):
    return scan.Lookup(table_VD, x)
  return nn.product(x, table_VD)


def as_cell(stack, join=PLAIN) -> cells.Cell:
  """One cell of several layers, for loops that step through all of them.

  Its parameters and carry are tuples, one entry a layer, the same as those of
  `init` and `unroll`; its output is the top layer's. `memory` goes to all.
  """
  stack = tuple(stack)
  ends, drive = [], []

  def own(a, layer):
    return a[ends[layer] - len(stack[layer].drive) : ends[layer]]

  def stage(layer, i):
    first = len(drive) - i

    def run(weights, carry, u, a, memory):
      u = u if layer == 0 else a[first - 1]
      own_weights, _ = weights[layer]
      args = (own_weights, carry[layer], u, a[first : first + i], memory)
      return stack[layer].drive[i](*args)

    return run

  def rise(top, carry, a, memory):
    """The new carries of the layers up to `top`, and what it shows."""
    new, x = [], None
    for layer in range(top + 1):
      last, out = stack[layer].update(carry[layer], own(a, layer), memory)
      new.append(last)
      x = join.add(layer, x, join.output(out, 0))
    return tuple(new), x

  def entrance(layer):
    def run(weights, carry, u, a, memory):
      _, x = rise(layer - 1, carry, a, memory)
      return stack[layer].project(weights[layer][1], x)

    return run

  for layer, cell in enumerate(stack):
    if layer:
      drive.append(entrance(layer))
    for i in range(len(cell.drive)):
      drive.append(stage(layer, i))
    ends.append(len(drive))

  def carry(params, batch):
    return tuple(c.carry(p, batch) for c, p in zip(stack, params, strict=True))

  def project(params, x_DN):
    return stack[0].project(params[0], x_DN)

  def weights(params, apart):
    # The layers above the first project within the loop.
    return tuple(
      (cell.weights(own, apart), own if layer else None)
      for layer, (cell, own) in enumerate(zip(stack, params, strict=True))
    )

  def update(carry, a, memory):
    return rise(len(stack) - 1, carry, a, memory)

  def gates(a):
    return {
      f"{layer}/{name}": logits_HB
      for layer, cell in enumerate(stack)
      if cell.gates
      for name, logits_HB in cell.gates(own(a, layer)).items()
    }

  return cells.Cell(
    lambda key, d_in: init(stack, key, d_in),
    carry,
    project,
    tuple(drive),
    update,
    weights,
    gates if any(cell.gates for cell in stack) else None,
  )
