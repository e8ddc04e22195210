"""The recurrent encoder-decoder, with or without attention.

The encoder reads x_1 .. x_S; the decoder predicts y_u from y_<u and a context

  p(y_u | y_<u, x) = softmax(W_o [s_u c_u] + b_o)

which is one vector for all u (the last encoder state) or, with attention, a
mixture of the encoder states for every u. It may enter three ways, each a
switch: the decoder's first state, its recurrent update, its output layer.

Sources: Cho et al., 2014 (fixed context); Bahdanau et al., 2015 (attention
from the previous state, into the update); Luong et al., 2015 (from the current
state; input feeding).
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rnnlab import attention as attending
from rnnlab import cells, nn, scan, settings, wiring
from rnnlab import layers as stacks
from rnnlab.models import check_rates, check_sizes, context_cells


class Seq2Seq(NamedTuple):
  """An encoder-decoder: functions of params. See those in `make`."""

  init: Any  # (key) -> params
  encode: Any  # (params, tokens_BS, **masks) -> Encoded
  decode: Any  # (params, encoded, carry, tokens_BU) -> carry, logits, attended
  recurrences: Any  # (params, encoded, tokens_BS, inputs_BU) -> [Recurrence]


class Encoded(NamedTuple):
  """What the decoder gets of the source."""

  source: Any  # attention.Source; None without attention
  context_BC: Any  # the last encoder state, both directions side by side
  carry: Any  # the decoder's initial carry


@dataclasses.dataclass(frozen=True)
class Attention:
  """`model.attention`. Without a score the context is fixed.

  score, width: see `attention.make`. query: the "current" decoder state asks,
  or the "previous" one. project: it asks through a linear map.
  """

  score: str | None = None
  width: int | None = None
  query: str = "current"
  project: bool = False

  def __post_init__(self):
    if self.query not in ("current", "previous"):
      raise ValueError(
        f"model.attention.query is 'current' or 'previous', not {self.query!r}"
      )


@dataclasses.dataclass(frozen=True)
class Context:
  """`model.context`: where the context enters the decoder.

  init: its first state (else zeros). update: its recurrent update. output: its
  output layer. feed: the output layer's tanh(W [s c]) enters the next update
  (input feeding).
  """

  init: bool = True
  update: bool = False
  output: bool = True
  feed: bool = False


def make(
  *,
  vocab_size: int,
  embed: int,
  hidden: int,
  layers: int = 1,
  direction: str = "forward",
  decoder_hidden: int | None = None,
  dropout: float = 0.0,
  cell: dict,
  attention: dict | None = None,
  context: dict | None = None,
) -> Seq2Seq:
  """Builds the model. Source and target share one embedding.

  direction: the encoder's, of `wiring.DIRECTIONS`. decoder_hidden: the
  decoder's width, where it is not the encoder's. dropout: on the outputs of
  encoder layers and decoder. attention, context: settings of `Attention` and
  `Context`. Raises ValueError for combinations that mean nothing.
  """
  ask = Attention(
    **settings.bind(Attention, "model.attention", attention or {})
  )
  into = Context(**settings.bind(Context, "model.context", context or {}))
  d_width = hidden if decoder_hidden is None else decoder_hidden
  sizes = {
    "embed": embed,
    "hidden": hidden,
    "layers": layers,
    "decoder_hidden": d_width,
  }
  _check(ask, into, direction, sizes, dropout)
  c_width = hidden * len(wiring.ways_of(direction, layers - 1))
  encoder = [cells.make(hidden=hidden, **cell) for _ in range(layers)]
  decoder = [cells.make(hidden=d_width, **cell) for _ in range(layers)]
  inner = stacks.as_cell(decoder)
  score = None
  if ask.score:
    width = {} if ask.width is None else {"width": ask.width}
    score = attending.make(ask.score, **width)
  bridged = c_width != d_width
  per_step = score and (into.update or into.feed)

  def query(params, h):
    if not ask.project:
      return h
    return nn.product(h, params["query"]["w_VH"].T) + _row(
      params["query"]["b_V"], h.ndim
    )

  if into.feed:
    stepper = context_cells.feeding(inner, score, query)
  elif per_step:
    stepper = context_cells.attentive(inner, _top, score, query)
  elif into.update:
    stepper = context_cells.constant(inner)
  else:
    stepper = inner

  def init(key):
    keys = iter(jax.random.split(key, 9))
    params = {
      "embed_VD": jax.random.normal(next(keys), (vocab_size, embed)),
      "encoder": wiring.init(encoder, next(keys), embed, direction),
      "decoder": stacks.init(decoder, next(keys), embed),
    }
    u = jax.eval_shape(inner.project, params["decoder"], jnp.zeros((embed, 1)))
    gates = sum(len(leaf) for leaf in jax.tree.leaves(u))
    out_width = d_width + (c_width if into.output and not into.feed else 0)
    params["out"] = nn.linear(next(keys), vocab_size, out_width)
    if into.init and bridged:
      params["bridge"] = _init_bridge(next(keys), inner, params, c_width)
    if score:
      q_width = c_width if ask.project else d_width
      params["score"] = score.init(next(keys), q_width, c_width)
      if ask.project:
        params["query"] = nn.linear(next(keys), c_width, d_width)
    if into.update:
      params["w_GC"] = nn.init("xavier", next(keys), gates, c_width)
    if into.feed:
      key_f, key_m = jax.random.split(next(keys))
      params["w_GF"] = nn.init("xavier", key_f, gates, d_width)
      params["mix"] = nn.linear(key_m, d_width, d_width + c_width)
    return params

  def encode(params, tokens_BS, *, steps_BS=None, source_BS=None, key=None):
    """Reads the source: Encoded. tokens_BS: see `layers.embedded`.

    steps_BS: where the encoder steps; elsewhere its state passes through, so
    that the last state is that of the last real token. source_BS: what can be
    attended to. None: everywhere, padding included. key: draws the dropout.
    """
    x = stacks.embedded(params["embed_VD"], tokens_BS)
    ends, states_BSC = wiring.unroll(
      encoder,
      params["encoder"],
      x,
      mask_BT=steps_BS,
      between=_dropper(key, dropout),
    )
    context_BC = jnp.concatenate(
      [context_cells.visible(end) for end in ends[-1].values()], axis=-1
    )
    source = None
    if score:
      source = attending.source(
        score, params["score"], states_BSC, mask_BS=source_BS
      )
    batch = tokens_BS.shape[0]
    carry = inner.carry(params["decoder"], batch)
    carry = jax.tree.map(lambda c: jnp.moveaxis(c, -1, 0), carry)
    if into.init:
      carry = _bridge(params.get("bridge"), ends, carry)
    if into.feed:
      carry = carry, jnp.zeros((batch, d_width), params["w_GF"].dtype)
    return Encoded(source, context_BC, carry)

  def read(params, encoded):
    """The parameters and the memory of the decoder's cell."""
    if per_step:
      return params | {"cell": params["decoder"]}, encoded.source
    if into.update:
      memory = nn.product(params["w_GC"], encoded.context_BC.T)
      return params["decoder"], memory
    return params["decoder"], None

  def decode(params, encoded, carry, tokens_BU, *, mask_BU=None, key=None):
    """Reads tokens_BU from `carry` on: (carry, logits_BUV, attended).

    The same for all U at once, as in training, and for one step at a time.
    carry: at first `encoded.carry`. attended is None without attention.
    tokens_BU: see `layers.embedded`.
    """
    x = stacks.embedded(params["embed_VD"], tokens_BU)
    before_BH = _top(carry)
    own, memory = read(params, encoded)
    carry, h_BUH = scan.unroll(
      stepper, own, x, carry, memory=memory, mask_BT=mask_BU
    )
    attended, c_BUC = None, None
    if per_step:
      out, h_BUH = h_BUH, h_BUH["h_HB"]
      attended = attending.Attended(
        out["scores_SB"], out["weights_SB"], out["context_CB"]
      )
    elif score:
      asks_BUH = h_BUH
      if ask.query == "previous":
        asks_BUH = jnp.concatenate([before_BH[:, None], h_BUH[:, :-1]], axis=1)
      attended = attending.attend(
        score, params["score"], query(params, asks_BUH), encoded.source
      )
    h_BUH = _dropper(key, dropout)(layers, h_BUH)
    if into.output and not into.feed:
      c_BUC = (
        attended.context_BUD
        if score
        else jnp.broadcast_to(
          encoded.context_BC[:, None], (*h_BUH.shape[:2], c_width)
        )
      )
      h_BUH = jnp.concatenate([h_BUH, c_BUC], axis=-1)
    logits_BUV = nn.product(h_BUH, params["out"]["w_VH"].T)
    return carry, logits_BUV + _row(params["out"]["b_V"], 3), attended

  def recurrences(
    params, encoded, tokens_BS, inputs_BU, *, steps_BS=None, mask_BU=None
  ):
    """Every layer and direction of the encoder, and the decoder as a whole."""
    table_VD = params["embed_VD"]
    x = scan.Lookup(table_VD, tokens_BS)
    found = wiring.recurrences(encoder, params["encoder"], x, steps_BS)
    found = [r._replace(name=f"encoder/{r.name}") for r in found]
    own, memory = read(params, encoded)
    x = scan.Lookup(table_VD, inputs_BU)
    return found + [
      stacks.Recurrence(
        "decoder", stepper, own, x, encoded.carry, memory, mask_BU
      )
    ]

  return Seq2Seq(init, encode, decode, recurrences)


def _check(ask, into, direction, sizes, dropout):
  check_sizes(**sizes)
  check_rates(dropout=dropout)
  wiring.context(direction, sizes["layers"])
  if not (into.init or into.update or into.output):
    raise ValueError(
      "model.context: with init, update and output all False the decoder "
      "would not see the source"
    )
  if into.feed and not (ask.score and into.output and ask.query == "current"):
    raise ValueError(
      "model.context.feed needs attention by the current state, and "
      "model.context.output"
    )
  if into.feed and into.update:
    raise ValueError(
      "model.context: feed brings the context into the update; not both"
    )
  if into.update and ask.score and ask.query == "current":
    raise ValueError(
      "model.context.update needs model.attention.query='previous': the "
      "current state does not exist before the update (feed brings it into "
      "the next one)"
    )
  if ask.score and not (into.update or into.output):
    raise ValueError(
      "model.attention: with context.update and output False what is found "
      "goes nowhere"
    )
  if not ask.score and (ask.project or ask.width or ask.query == "previous"):
    raise ValueError("model.attention: settings without a score")


def _row(b_V, rank):
  return b_V.reshape((1,) * (rank - 1) + (-1,))


def _dropper(key, rate):
  def between(layer, h):
    k = None if key is None else jax.random.fold_in(key, layer)
    return nn.dropout(k, h, rate)

  return between


def _top(carry):
  """The state that a stack's carry shows, that of its top layer."""
  return context_cells.visible(carry[-1])


def _init_bridge(key, inner, params, c_width):
  """A linear map for every part of the decoder's carry, h and c apart."""
  carry = jax.eval_shape(lambda: inner.carry(params["decoder"], 1))
  leaves, tree = jax.tree.flatten(carry)
  keys = jax.random.split(key, len(leaves))
  return tree.unflatten(
    nn.linear(k, leaf.shape[0], c_width)
    for k, leaf in zip(keys, leaves, strict=True)
  )


def _bridge(params, ends, carry):
  """The encoder's final carries as the decoder's first, layer by layer.

  The directions stand side by side, part by part (an LSTM's h and c apart), and
  go through a linear map where the widths differ.
  """
  made = []
  for layer, own in enumerate(carry):
    parts = [jax.tree.leaves(end) for end in ends[layer].values()]
    joined = [jnp.concatenate(p, axis=-1) for p in zip(*parts, strict=True)]
    if params is not None:
      maps = jax.tree.leaves(
        params[layer], is_leaf=lambda n: isinstance(n, dict)
      )
      joined = [
        nn.product(j, m["w_VH"].T) + _row(m["b_V"], 2)
        for j, m in zip(joined, maps, strict=True)
      ]
    made.append(jax.tree.structure(own).unflatten(joined))
  return tuple(made)
