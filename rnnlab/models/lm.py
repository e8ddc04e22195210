"""The recurrent language model: embedding, stacked cells, readout.

  p(x_{t+1} | x_<=t) = softmax(W_o h_t + b_o)

The model reads a token before it predicts the next one, so targets are the
inputs moved on by one position; the caller makes them.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rnnlab import backend, cells, metrics, nn, sampling, scan, stepping
from rnnlab import layers as stacks
from rnnlab.analysis import memory
from rnnlab.models import check_rates, check_sizes, drops


class LM(NamedTuple):
  """A language model: functions of params. See the functions in `make`."""

  init: Any  # (key) -> params
  carry: Any  # (params, rows) -> the carry that a text starts from
  apply: Any  # (params, tokens_BT, carry, **options) -> carry, logits_BTV
  read: Any  # (params, tokens_BT, length_B) -> Cursor, logprob_B
  generate: Any  # (params, key, cursor, **how) -> Generated
  recurrence: Any  # (params, tokens_BT, targets_BT) -> layers.Recurrence


class Cursor(NamedTuple):
  """Where generation stands: all that is needed to go on, O(H) a row."""

  carry: Any  # the cells' carry, as columns, before `token_B` is read
  token_B: Any  # the last token, not yet read
  end_B: Any  # RUNNING, STOPPED or FAILED
  t: Any  # how many tokens were drawn before


class Generated(NamedTuple):
  """Texts: `tokens_BU` with the pad after a row's end, and how each ended.

  length_B counts the tokens before the stop symbol. logprob_B is the model's
  own log-probability (nats, temperature 1, nothing cut off) of what was drawn,
  stop included. A row still RUNNING has reached the limit.
  """

  tokens_BU: Any
  length_B: Any
  logprob_B: Any
  cursor: Cursor


RUNNING, STOPPED, FAILED = 0, 1, 2
ENDS = {RUNNING: "limit", STOPPED: "stop", FAILED: "failed"}
HOW = ("limit", "temperature", "top_k", "top_p")
# Steps of generation whose random numbers are drawn at once: at every step for
# itself, that took a tenth of the time (W7x64).
AHEAD = 64


def make(
  *,
  vocab_size: int,
  never: tuple = (),
  embed: int,
  hidden: int,
  layers: int = 1,
  tied: bool = False,
  norm: bool = False,
  residual: bool = False,
  dropout: float = 0.0,
  locked: bool = False,
  out_dropout: float | None = None,
  embed_dropout: float = 0.0,
  state_dropout: float = 0.0,
  weight_dropout: float = 0.0,
  chunk: int | str | None = None,
  cell: dict,
) -> LM:
  """Builds the model.

  never: ids that are not predicted (the pad): their logits are masked out.
  cell: settings of `cells.make`, the name included. tied: the readout uses the
  embedding's table, which needs embed == hidden. norm, residual: see
  `layers.Join`. chunk: that of `scan.unroll`: less memory for the backward
  pass, for some recomputation; or "auto:512MiB", the longest that a training
  step has room for.

  Dropout acts in training alone (when a key is given): dropout, on every
  layer's output, with a draw a step or, if locked, a row; out_dropout, in its
  place on the top layer's; embed_dropout, of whole symbols; state_dropout, on
  what a cell's products read of the state, a draw a row; weight_dropout, of
  recurrent weights, a draw an update. Sources: Gal and Ghahramani, 2016; Merity
  et al., 2017.
  """
  memory.budget_of(chunk)
  check_sizes(embed=embed, hidden=hidden, layers=layers)
  rates = {
    "dropout": dropout,
    "out_dropout": dropout if out_dropout is None else out_dropout,
    "embed_dropout": embed_dropout,
    "state_dropout": state_dropout,
    "weight_dropout": weight_dropout,
  }
  check_rates(**rates)
  if tied and embed != hidden:
    raise ValueError(
      f"model.tied needs model.embed == model.hidden, not {embed} and {hidden}"
    )
  join = stacks.Join(norm, residual)
  stack = tuple(cells.make(hidden=hidden, **cell) for _ in range(layers))
  cell_of_stack = stacks.as_cell(stack, join)
  dropped = tuple(map(cells.dropping, stack)) if state_dropout else stack
  allowed_V = np.isin(np.arange(vocab_size), never, invert=True)

  def init(key):
    key_e, key_c, key_o = jax.random.split(key, 3)
    params = {
      "embed_VD": jax.random.normal(key_e, (vocab_size, embed)),
      "cells": stacks.init(stack, key_c, embed),
      "out": nn.linear(key_o, vocab_size, hidden),
    }
    if tied:
      # One table serves both sides; it starts at the readout's scale.
      params["embed_VD"] = params["out"].pop("w_VH")
    return params

  def carry(params, rows):
    columns = cell_of_stack.carry(params["cells"], rows)
    return jax.tree.map(lambda c: jnp.moveaxis(c, -1, 0), columns)

  def output_weight(params):
    return params["embed_VD"] if tied else params["out"]["w_VH"]

  def finish(params, logits):
    """Adds the bias and leaves out what is never predicted."""
    logits += jnp.broadcast_to(params["out"]["b_V"], logits.shape)
    if allowed_V.all():
      return logits
    allowed = jnp.broadcast_to(allowed_V, logits.shape)
    return jnp.where(allowed, logits, jnp.finfo(logits.dtype).min)

  def readout(params, h_BTH):
    """logits_BTV of h_BTH."""
    # In the order of the scan: turning its output takes one pass less (W4).
    h_TBH = jnp.swapaxes(h_BTH, 0, 1)
    logits_TBV = finish(params, nn.product(h_TBH, output_weight(params).T))
    return jnp.swapaxes(logits_TBV, 0, 1)

  def apply(params, tokens_BT, carry=None, *, key=None, **options):
    """Reads tokens_BT from `carry` on: (carry, logits_BTV).

    tokens_BT: or vectors in their place, as in `layers.embedded`. key: draws
    the dropout; None is evaluation. options: those of `scan.unroll`.
    """

    draw = drops.Drops(key, rates, locked)
    x = stacks.embedded(draw.symbols(params["embed_VD"]), tokens_BT)
    own, beside = params["cells"], 4 * (2 * vocab_size + hidden)
    steps_at_once = memory.chunk_of(chunk, stack, own, x, beside)
    carry, h_BTH = stacks.unroll(
      stack if key is None else dropped,
      tuple(map(draw.weights, range(layers), params["cells"])),
      x,
      carry,
      between=partial(draw.outputs, layers),
      join=join,
      memories=draw.states(layers, hidden, len(tokens_BT)),
      **{"chunk": steps_at_once} | options,
    )
    return carry, readout(params, h_BTH)

  def read(params, tokens_BT, length_B):
    """Reads prompts, all but each row's last token: (Cursor, logprob_B).

    length_B >= 1 counts a row's tokens, the start symbol included. logprob_B is
    the log-probability of the tokens after the first.
    """
    prefix_BT = tokens_BT[:, :-1]
    mask_BT = scan.mask_of(length_B - 1, prefix_BT.shape[1])
    carry, logits_BTV = apply(params, prefix_BT, mask_BT=mask_BT)
    nll_BT = metrics.cross_entropy(logits_BTV, tokens_BT[:, 1:])
    logprob_B = -jnp.sum(jnp.where(mask_BT, nll_BT, 0), axis=1)
    last_B1 = jnp.take_along_axis(tokens_BT, length_B[:, None] - 1, axis=1)
    columns = jax.tree.map(lambda c: jnp.moveaxis(c, 0, -1), carry)
    end_B = jnp.full_like(length_B, RUNNING)
    return Cursor(columns, last_B1[:, 0], end_B, 0), logprob_B

  def recurrence(params, tokens_BT, targets_BT, carry=None, **flags):
    """All layers as one recurrence, for an analysis; no dropout.

    targets_BT: what its loss measures the readout against. flags: mask_BT and
    reset_BT of `scan.unroll`.
    """

    def loss(h_BTH):
      return metrics.cross_entropy(readout(params, h_BTH), targets_BT)

    return stacks.Recurrence(
      "stack",
      cell_of_stack,
      params["cells"],
      scan.Lookup(params["embed_VD"], tokens_BT),
      carry,
      loss=loss,
      **flags,
    )

  generate = _generating(cell_of_stack, output_weight, finish)
  return LM(init, carry, apply, read, generate, recurrence)


def _generating(cell, output_weight, finish):
  """`LM.generate` of a stack as one cell, and of a readout in two halves."""

  def generate(params, key, cursor, *, limit, stop, pad, **how) -> Generated:
    """Draws up to `limit` tokens a row, in one loop that ends when all have.

    how: temperature, top_k and top_p of `sampling.probabilities`. A row's draws
    depend on (key, its number, how many it drew before) alone: the same in any
    company, and going on from the returned cursor is the same as not stopping.
    """
    # Once, and not at every step: rows' keys, and the transposed weight.
    keys_B = sampling.row_keys(key, jnp.arange(cursor.token_B.shape[0]))
    w_HV = backend.materialised(output_weight(params).T)
    # At V rows, projecting the table once replaces a product in every step.
    table = stepping.project_table(cell, params["cells"], params["embed_VD"])

    def ahead(t, _):
      draw = partial(sampling.uniforms, keys_B)
      return jax.vmap(draw)(t + jnp.arange(AHEAD))

    def going(loop):
      cursor, *_ = loop
      running = jnp.any(cursor.end_B == RUNNING)
      return running & (cursor.t < start + limit)

    def draw(loop):
      cursor, out, uniform_SB, rows = loop
      i = (cursor.t - start) % AHEAD
      had = cursor.t, uniform_SB
      uniform_SB = lax.cond(i == 0, ahead, lambda t, old: old, *had)
      u = stepping.columns(rows)
      carry, h_HB = stepping.step(cell, params["cells"], cursor.carry, u)
      h_BH = backend.materialised(h_HB.T)
      logits_BV = finish(params, nn.product(h_BH, w_HV))
      probs_BV = sampling.probabilities(logits_BV, **how)
      token_B = sampling.pick(probs_BV, uniform_SB[i])
      running_B = cursor.end_B == RUNNING
      failed_B = running_B & sampling.failed(logits_BV)
      drawn_B = running_B & ~failed_B
      stopped_B = drawn_B & (token_B == stop)
      nll_B = metrics.cross_entropy(logits_BV, token_B)
      out = Generated(
        out.tokens_BU.at[:, cursor.t - start].set(
          jnp.where(drawn_B, token_B, pad)
        ),
        out.length_B + (drawn_B & ~stopped_B),
        out.logprob_B - jnp.where(drawn_B, nll_B, 0),
        None,
      )
      end_B = jnp.where(stopped_B, STOPPED, cursor.end_B)
      cursor = Cursor(
        jax.tree.map(
          lambda new, old: jnp.where(
            jnp.broadcast_to(running_B, new.shape), new, old
          ),
          carry,
          cursor.carry,
        ),
        jnp.where(drawn_B, token_B, cursor.token_B),
        jnp.where(failed_B, FAILED, end_B),
        cursor.t + 1,
      )
      # Looked up here for the next step: a twelfth of row W7x64.
      return cursor, out, uniform_SB, stepping.look_up(table, cursor.token_B)

    start = cursor.t
    shape = (cursor.token_B.shape[0], limit)
    out = Generated(
      jnp.full(shape, pad, jnp.int32),
      jnp.zeros(shape[0], jnp.int32),
      jnp.zeros(shape[0]),
      None,
    )
    cursor = cursor._replace(t=jnp.asarray(cursor.t))
    drawn_SB = jnp.zeros((AHEAD, shape[0]))
    rows = stepping.look_up(table, cursor.token_B)
    loop = cursor, out, drawn_SB, rows
    cursor, out, *_ = lax.while_loop(going, draw, loop)
    return out._replace(cursor=cursor)

  return generate


def continuing(model, *, stop, pad):
  """(params, key, tokens_BT, length_B, **how) -> how every prompt goes on.

  A list of (token ids, log-probability in nats of all after the prompt's first
  token, one of ENDS' words), by row. how: HOW, of `LM.generate`; each choice of
  them compiles anew.
  """

  @partial(jax.jit, static_argnames=HOW)
  def run(params, key, tokens_BT, length_B, **how):
    cursor, logprob_B = model.read(params, tokens_BT, length_B)
    texts = model.generate(params, key, cursor, stop=stop, pad=pad, **how)
    return texts, logprob_B

  def go_on(*args, **how):
    drawn, read_B = jax.device_get(run(*args, **how))
    return [
      (
        drawn.tokens_BU[b, : drawn.length_B[b]],
        float(read_B[b] + drawn.logprob_B[b]),
        ENDS[int(drawn.cursor.end_B[b])],
      )
      for b in range(len(read_B))
    ]

  return go_on
