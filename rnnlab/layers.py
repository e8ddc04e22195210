"""Stacks of cells, and what their wiring lets an output read.

Layer by layer over time, in one direction or more, or as one cell step by step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rnnlab import cells, nn, scan


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
    return scan.step(cell, params, cell.carry(params, 1), u)[1]

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


class Context(NamedTuple):
  """Which steps an output may read: so many back and so many ahead of its own.

  None is no limit. Context(None, 0) is causal, Context(None, k) has a lookahead
  of k steps, Context() is the whole sequence.
  """

  back: int | None = None
  ahead: int | None = None

  def __str__(self):
    back, ahead = ("all" if n is None else n for n in self)
    names = {("all", 0): "causal", ("all", "all"): "full"}
    return names.get((back, ahead), f"{back} back, {ahead} ahead")

  def may_read(self, U, S) -> np.ndarray:
    """may_US: True where output u may read input s."""
    ahead_US = np.arange(S)[None] - np.arange(U)[:, None]
    may_US = np.ones((U, S), bool)
    if self.back is not None:
      may_US &= ahead_US >= -self.back
    if self.ahead is not None:
      may_US &= ahead_US <= self.ahead
    return may_US


CAUSAL, FULL = Context(None, 0), Context()

# By layer, over and over: which way it reads; True is from the end. Where both,
# their outputs stand side by side, so that both read both of the layer below.
DIRECTIONS = {
  "forward": [{"forward": False}],
  "backward": [{"backward": True}],
  "both": [{"forward": False, "backward": True}],
  "alternating": [{"forward": False}, {"backward": True}],
}


def context(direction, layers, lookahead=0) -> Context:
  """What the top of `unroll_directions` may read, below it a `window`.

  Raises ValueError with the setting for a direction that is none, and for
  layers or a lookahead that it would not use.
  """
  if direction not in DIRECTIONS:
    raise ValueError(
      f"model.direction is one of {list(DIRECTIONS)}, not {direction!r}"
    )
  if layers < len(DIRECTIONS[direction]):
    raise ValueError(
      f"model.direction={direction!r} needs model.layers of at least "
      f"{len(DIRECTIONS[direction])}, not {layers}"
    )
  if lookahead and direction != "forward":
    raise ValueError(
      f"model.lookahead={lookahead} is for model.direction='forward'; "
      f"{direction!r} reads to the end anyway"
    )
  ways = {name for n in range(layers) for name in ways_of(direction, n)}
  if len(ways) > 1:
    return FULL
  return Context(0, None) if "backward" in ways else Context(None, lookahead)


def ways_of(direction, layer) -> dict:
  """The directions of one layer: {name: whether it reads from the end}."""
  pattern = DIRECTIONS[direction]
  return pattern[layer % len(pattern)]


def init_directions(stack, key, d_in, direction):
  """Parameters of a stack that reads a whole sequence, a dict a layer."""
  params = []
  for layer, (cell, layer_key) in enumerate(
    zip(stack, jax.random.split(key, len(stack)), strict=True)
  ):
    names = ways_of(direction, layer)
    keys = jax.random.split(layer_key, len(names))
    own = {n: cell.init(k, d_in) for n, k in zip(names, keys, strict=True)}
    d_in = sum(width(cell, p, d_in) for p in own.values())
    params.append(own)
  return tuple(params)


def unroll_directions(stack, params, x, *, between=None, **options):
  """Runs layers whose directions are those of `params`, joined at each layer.

  Every layer above the first reads all directions of the one below. Returns
  (carries, h_BTD): the final carries as a dict a layer (that of the backward
  direction has read the first step last), and the top outputs, directions side
  by side. Options as in `unroll`.
  """
  finals = []
  for layer, (cell, own) in enumerate(zip(stack, params, strict=True)):
    ends, outs = {}, []
    for name in sorted(own, reverse=True):  # forward, then backward
      ends[name], out = scan.unroll(
        cell, own[name], x, reverse=name == "backward", **options
      )
      outs.append(out)
    finals.append(ends)
    x = jnp.concatenate(outs, axis=-1)
    x = x if between is None else between(layer, x)
  return tuple(finals), x


def embedded(table_VD, x):
  """What x stands for as an input of `unroll`.

  x: tokens_BT, or x_BTV in their place: one-hot vectors, or anything else that
  a derivative with respect to a token may be taken at.
  """
  if jnp.issubdtype(x.dtype, jnp.integer):
    return scan.Lookup(table_VD, x)
  return nn.product(x, table_VD)


def window(x_BTD, k, mask_BT=None):
  """Every step together with the k real ones after it: x_BTW, W = (k + 1) D.

  Past the last real step of a row the window holds zeros. Steps where mask_BT
  is False do not exist: they are in no window, whatever stands there, so a row
  with gaps reads what it would without them.
  """
  if k == 0:
    return x_BTD
  if mask_BT is None:
    return _ahead(x_BTD, k)
  order_BT, place_BT = packing(mask_BT)
  x_BTD = jnp.where(mask_BT[..., None], x_BTD, 0)
  x_BTW = _ahead(jnp.take_along_axis(x_BTD, order_BT[..., None], 1), k)
  return jnp.take_along_axis(x_BTW, place_BT[..., None], 1)


def packing(mask_BT):
  """Where to find the real steps of a row in order, the others after them.

  (order_BT, place_BT): x[order] is packed, packed[place] is in place again,
  where real.
  """
  order_BT = jnp.argsort(~mask_BT, axis=1, stable=True)
  return order_BT, jnp.maximum(jnp.cumsum(mask_BT, axis=1) - 1, 0)


def _ahead(x_BTD, k):
  T = x_BTD.shape[1]
  x_BSD = jnp.pad(x_BTD, ((0, 0), (0, k), (0, 0)))
  return jnp.concatenate([x_BSD[:, i : i + T] for i in range(k + 1)], axis=-1)


def recurrences(stack, params, x, mask_BT=None) -> list[Recurrence]:
  """Every direction of every layer that `unroll_directions` would run."""
  found = []
  for layer, cell in enumerate(stack):
    for name in sorted(params[layer], reverse=True):  # forward, then backward
      turn = _turned if name == "backward" else lambda x: x
      read = Recurrence(f"{layer}/{name}", cell, params[layer][name], turn(x))
      found.append(read._replace(mask_BT=turn(mask_BT)))
    below = [cell], params[layer : layer + 1], x
    _, x = unroll_directions(*below, mask_BT=mask_BT)
  return found


def _turned(x):
  """The last step first."""
  if isinstance(x, scan.Lookup):
    return x._replace(tokens_BT=x.tokens_BT[:, ::-1])
  return None if x is None else x[:, ::-1]


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
