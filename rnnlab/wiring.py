"""Which way layers read, and so what an output may read.

Forward, backward, both ways joined, one way on top of the other, or forward
with a look ahead: each declares its `Context`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rnnlab import scan
from rnnlab.layers import Recurrence, width


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
  """What the top of `unroll` may read, below it a `window`.

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


def init(stack, key, d_in, direction):
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


def unroll(stack, params, x, *, between=None, **options):
  """Runs layers whose directions are those of `params`, joined at each layer.

  Every layer above the first reads all directions of the one below. Returns
  (carries, h_BTD): the final carries as a dict a layer (that of the backward
  direction has read the first step last), and the top outputs, directions side
  by side. Options as in `layers.unroll`.
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
  """Every direction of every layer that `unroll` would run."""
  found = []
  for layer, cell in enumerate(stack):
    for name in sorted(params[layer], reverse=True):  # forward, then backward
      turn = _turned if name == "backward" else lambda x: x
      read = Recurrence(f"{layer}/{name}", cell, params[layer][name], turn(x))
      found.append(read._replace(mask_BT=turn(mask_BT)))
    below = [cell], params[layer : layer + 1], x
    _, x = unroll(*below, mask_BT=mask_BT)
  return found


def _turned(x):
  """The last step first."""
  if isinstance(x, scan.Lookup):
    return x._replace(tokens_BT=x.tokens_BT[:, ::-1])
  return None if x is None else x[:, ::-1]
