"""A label for every step of a sequence, under a context that is declared.

  p(label_t | what step t may read) = softmax(W_o h_t + b_o)

Embedding, a stack of cells wired one way or another, readout. `direction` and
`lookahead` are what decides which steps h_t may read: all before it, some after
it, or all there are.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rnnlab import cells, nn, scan, wiring
from rnnlab import layers as stacks
from rnnlab.analysis import memory
from rnnlab.models import check_rates, check_sizes


class Tagger(NamedTuple):
  """A tagger: functions of params. See the functions in `make`."""

  init: Any  # (key) -> params
  apply: Any  # (params, x, mask_BT, key) -> logits_BTV
  context: Any  # wiring.Context: the steps that an output may read
  start: Any  # (params, batch) -> Stream
  feed: Any  # (params, stream, tokens_BT, mask_BT) -> Stream, logits, mask_BU
  recurrences: Any  # (params, tokens_BT, mask_BT) -> [layers.Recurrence]


class Stream(NamedTuple):
  """All that is needed to go on with a text: O(H + k) a row, however long."""

  carry: Any  # of every layer, batch first
  tokens_BK: Any  # read, not yet answered, at most the lookahead
  mask_BK: Any  # where one stands


def make(
  *,
  vocab_size: int,
  labels: int,
  embed: int,
  hidden: int,
  layers: int = 1,
  direction: str = "forward",
  lookahead: int = 0,
  dropout: float = 0.0,
  chunk: int | str | None = None,
  cell: dict,
) -> Tagger:
  """Builds the model.

  hidden: of one direction. direction: "forward"; "both", every layer both ways
  and joined; "alternating", a forward layer, a backward one on top, and so on;
  "backward". lookahead: the first layer reads so many steps more than its own,
  what is above it none. dropout: on the embedding and on every layer's output,
  during training alone. chunk: that of `scan.unroll`, or "auto:512MiB" as
  in `lm.make`. cell: settings of `cells.make`, the name included.
  """
  check_sizes(embed=embed, hidden=hidden, layers=layers)
  check_rates(dropout=dropout)
  memory.budget_of(chunk)
  if lookahead < 0:
    raise ValueError(f"model.lookahead must be at least 0, not {lookahead}")
  context = wiring.context(direction, layers, lookahead)
  stack = tuple(cells.make(hidden=hidden, **cell) for _ in range(layers))
  width = hidden * len(wiring.ways_of(direction, layers - 1))

  def init(key):
    key_e, key_c, key_o = jax.random.split(key, 3)
    seen = embed * (lookahead + 1)
    return {
      "embed_VD": jax.random.normal(key_e, (vocab_size, embed)),
      "layers": wiring.init(stack, key_c, seen, direction),
      "out": nn.linear(key_o, labels, width),
    }

  def inputs(params, x, mask_BT, key=None):
    """What the first layer reads."""
    x = stacks.embedded(params["embed_VD"], x)
    if isinstance(x, scan.Lookup):
      if lookahead == 0 and key is None:
        return x
      x = x.table_VD[x.tokens_BT]
    return wiring.window(drop(key, layers, x), lookahead, mask_BT)

  def drop(key, layer, x_BTD):
    k = None if key is None else jax.random.fold_in(key, layer)
    return nn.dropout(k, x_BTD, dropout)

  def readout(params, h_BTH):
    logits_BTV = nn.product(h_BTH, params["out"]["w_VH"].T)
    return logits_BTV + jnp.broadcast_to(params["out"]["b_V"], logits_BTV.shape)

  def apply(params, x, *, mask_BT=None, key=None):
    """Labels whole sequences: logits_BTV, V the labels.

    x: tokens_BT, or vectors in their place as in `layers.embedded`. mask_BT:
    True where a step is real; what stands elsewhere reaches no real step. key:
    draws the dropout; None is evaluation.
    """
    own, beside = params["layers"], 4 * (2 * labels + width)
    x = inputs(params, x, mask_BT, key)
    steps_at_once = memory.chunk_of(chunk, stack, own, x, beside)
    _, h_BTH = wiring.unroll(
      stack,
      own,
      x,
      between=functools.partial(drop, key),
      mask_BT=mask_BT,
      chunk=steps_at_once,
    )
    return readout(params, h_BTH)

  start, feed = _streaming(stack, direction, lookahead, inputs, readout)

  def recurrences(params, tokens_BT, mask_BT=None):
    """Every direction of every layer, for an analysis."""
    x = inputs(params, tokens_BT, mask_BT)
    return wiring.recurrences(stack, params["layers"], x, mask_BT)

  return Tagger(init, apply, context, start, feed, recurrences)


def _streaming(stack, direction, lookahead, inputs, readout):
  """`Tagger.start` and `Tagger.feed`: the same labels, as a text comes."""

  def forward(params):
    """The parameters of the stack, for what comes bit by bit."""
    if direction != "forward":
      raise ValueError(
        f"model.direction={direction!r} reads a sequence to its end before it "
        "labels the first step: it cannot stream, only 'forward' can"
      )
    return tuple(own["forward"] for own in params["layers"])

  def start(params, batch) -> Stream:
    """Before the first token of `batch` texts. Refused unless forward."""
    columns = tuple(
      cell.carry(own, batch)
      for cell, own in zip(stack, forward(params), strict=True)
    )
    return Stream(
      jax.tree.map(lambda c: jnp.moveaxis(c, -1, 0), columns),
      jnp.zeros((batch, lookahead), jnp.int32),
      jnp.zeros((batch, lookahead), bool),
    )

  def feed(params, stream, tokens_BT, mask_BT=None, *, last=False):
    """Reads more of the texts: (stream, logits_BUV, mask_BU).

    The answers are those that can be given, in order, those of a row from its
    first column on, where mask_BU: k steps late, k the lookahead. All the
    answers of a row are those of the whole text in `apply`. mask_BT: where a
    token is real, so rows may grow at their own pace. last: the texts end here,
    so all that is left is answered too (U is k wider).
    """
    own, K = forward(params), lookahead
    if mask_BT is None:
      mask_BT = jnp.ones(tokens_BT.shape, bool)
    tokens_BS = jnp.concatenate([stream.tokens_BK, tokens_BT], axis=1)
    mask_BS = jnp.concatenate([stream.mask_BK, mask_BT], axis=1)
    order_BS, _ = wiring.packing(mask_BS)
    tokens_BS = jnp.take_along_axis(tokens_BS, order_BS, axis=1)
    there_B = mask_BS.sum(1)
    ready_B = there_B if last else jnp.maximum(there_B - K, 0)
    U = tokens_BS.shape[1] - (0 if last else K)
    mask_BU = jnp.arange(U)[None] < ready_B[:, None]
    packed_BS = jnp.arange(K + tokens_BT.shape[1])[None] < there_B[:, None]
    x = inputs(params, tokens_BS, packed_BS)
    if isinstance(x, scan.Lookup):
      x = x._replace(tokens_BT=x.tokens_BT[:, :U])
    else:
      x = x[:, :U]
    carry, h_BUH = stacks.unroll(stack, own, x, stream.carry, mask_BT=mask_BU)
    left_BK = ready_B[:, None] + jnp.arange(K)[None]
    waiting_BK = left_BK < there_B[:, None]
    at_BK = jnp.where(waiting_BK, left_BK, 0)
    tokens_BK = jnp.take_along_axis(tokens_BS, at_BK, axis=1)
    return Stream(carry, tokens_BK, waiting_BK), readout(params, h_BUH), mask_BU

  return start, feed
