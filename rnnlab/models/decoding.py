"""Searching for likely answers of a model that is asked step by step.

  step(carry, token_B) -> carry, logits_BV, aux

A step reads one token a row and predicts the next. Every leaf of the carry and
of aux (attention weights, or ()) has the batch first. `greedy` takes the best
symbol at every step; `beam` keeps the K best beginnings and returns the N best
answers. Ids that are not allowed have probability 0. Log-probabilities are in
nats, float32 or wider; that of a symbol drawn where the logits are NaN is NaN.
Both run under jit, with one compilation for a shape.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rnnlab import metrics, shapes


class Decoded(NamedTuple):
  """One answer a row: what `greedy` returns."""

  tokens_BU: Any  # the stop symbol included, pad after it
  length_B: Any  # symbols before the stop
  ended_B: Any  # True: by the stop symbol; False: by the limit
  logprob_B: Any  # of all that was drawn, the stop included
  aux: Any  # the step's aux along axis 1: B, U, ...; 0 after the stop
  nll_BU: Any  # see `greedy`; None without targets


class Beams(NamedTuple):
  """The N best answers a row, best first: what `beam` returns."""

  tokens_BNU: Any  # the stop symbol included, pad after it
  length_BN: Any  # symbols before the stop
  score_BN: Any  # -inf where there is no such answer: length 0, only pad
  logprob_BN: Any  # of all that was drawn, the stop included
  ended_BN: Any  # True: by the stop symbol; False: by the limit


def greedy(
  step, carry, start_B, *, limit, stop, pad, allowed_V, targets_BU=None
) -> Decoded:
  """Takes the most likely symbol at every step; ties go to the lowest id.

  start_B: the tokens read first. limit: the most symbols a row may draw. The
  loop ends when all rows have stopped.

  targets_BU: measures the model on its own choices: nll_BU is -log p(target u)
  in the step's own softmax, nothing excluded, after the u symbols chosen
  before. A row that stopped reads its stop, and then whatever it would choose,
  so all U = limit steps are run; the other results stay the same. Raises
  ValueError for a limit below 1 or other than U, and where shapes disagree.
  """
  sizes = shapes.check(start_B=start_B, targets_BU=targets_BU)
  if sizes.get("U", limit) != limit:
    raise ValueError(f"limit is {limit}, but targets_BU has {sizes['U']} each")
  carry, start_B, dtype, aux = _begin(step, carry, start_B, limit, allowed_V)
  batch = start_B.shape[0]

  def going(loop):
    u, *_, out = loop
    return (u < limit) & ((targets_BU is not None) | ~jnp.all(out.ended_B))

  def draw(loop):
    u, carry, token_B, out = loop
    carry, logits_BV, aux = step(carry, token_B)
    token_B1, logp_B1 = _best_ids(logits_BV, allowed_V, 1)
    token_B, logp_B = token_B1[:, 0], logp_B1[:, 0]
    running_B = ~out.ended_B
    stops_B = token_B == stop

    def put(all_BU, new_B, otherwise):
      real = running_B.reshape(batch, *[1] * (new_B.ndim - 1))
      return all_BU.at[:, u].set(jnp.where(real, new_B, otherwise))

    nll_BU = None
    if targets_BU is not None:
      nll_B = metrics.cross_entropy(logits_BV, jnp.asarray(targets_BU)[:, u])
      nll_BU = out.nll_BU.at[:, u].set(nll_B)
    out = Decoded(
      put(out.tokens_BU, token_B, pad),
      out.length_B + (running_B & ~stops_B),
      out.ended_B | stops_B,
      out.logprob_B + jnp.where(running_B, logp_B, 0),
      jax.tree.map(lambda a, new: put(a, new, 0), out.aux, aux),
      nll_BU,
    )
    return u + 1, carry, token_B, out

  out = Decoded(
    jnp.full((batch, limit), pad, jnp.int32),
    jnp.zeros(batch, jnp.int32),
    jnp.zeros(batch, bool),
    jnp.zeros(batch, dtype),
    jax.tree.map(
      lambda a: jnp.zeros((batch, limit, *a.shape[1:]), a.dtype), aux
    ),
    None if targets_BU is None else jnp.zeros((batch, limit), dtype),
  )
  return lax.while_loop(going, draw, (0, carry, start_B, out))[-1]


def beam(
  step, carry, start_B, *, limit, stop, pad, allowed_V, width, alpha=0, n_best=1
) -> Beams:
  """Keeps the `width` best beginnings; returns the n_best answers a row.

  score = logprob / length**alpha, where the length counts the stop symbol (1
  for the empty answer): alpha 0 is the log-probability, 1 its mean. At every
  step the continuations of all beginnings, the stop symbol among them, compete
  for `width` places. What stops leaves the beam and stays comparable until no
  beginning can beat the n_best found. So width 1 is `greedy`.

  An unfinished answer has not paid for its stop, so it never outranks one that
  ended: at the limit it takes a place that those left free. Ties go to the
  answer found earlier, then to the better beginning, then to the lower id.

  The step sees B * width rows, and row r belongs to example r // width: what it
  reads of an example is in the carry, or repeated in that order. Raises
  ValueError for limit, width or n_best below 1, n_best above width, alpha
  negative or not finite, and where shapes disagree.
  """
  if width < 1:
    raise ValueError(f"width must be at least 1, not {width}")
  if not 1 <= n_best <= width:
    raise ValueError(f"n_best must be in [1, width {width}], not {n_best}")
  if not 0 <= alpha < math.inf:
    raise ValueError(f"alpha must be finite and >= 0, not {alpha}")
  if alpha * math.log10(max(limit, 1)) > 30:
    raise ValueError(
      f"alpha={alpha} is too large: limit**alpha, {limit}**{alpha}, has no "
      "float32"
    )
  carry, start_R, dtype, _ = _begin(
    step, carry, start_B, limit, allowed_V, width
  )
  batch = start_B.shape[0]
  divisor_U = jnp.asarray(np.arange(1.0, limit + 1) ** alpha, dtype)

  def going(loop):
    u, *_, logprob_BK, found = loop
    # A beginning of log-probability l <= 0 ends with l' <= l at a length
    # n <= limit: l' / n**alpha <= l / n**alpha <= l / limit**alpha, for every
    # alpha >= 0. Rounding is monotone, so this holds for the numbers computed,
    # and a row that is decided stays as it is while others go on.
    bound_B = jnp.max(logprob_BK, axis=1) / divisor_U[-1]
    return (u < limit) & ~jnp.all(found.score_BN[:, -1] >= bound_B)

  def advance(loop):
    u, carry, token_R, tokens_BKU, logprob_BK, found = loop
    carry, logits_RV, _ = step(carry, token_R)
    total_BK, token_BK, parent_BK = _grow(logprob_BK, logits_RV, allowed_V)
    tokens_BKU = _take(tokens_BKU, parent_BK).at[:, :, u].set(token_BK)
    row_R = (parent_BK + width * jnp.arange(batch)[:, None]).reshape(-1)
    carry = jax.tree.map(lambda leaf: leaf[row_R], carry)
    stops_BK = token_BK == stop
    score_BK = jnp.where(stops_BK, total_BK / divisor_U[u], -jnp.inf)
    length_BK = jnp.full((batch, width), u, jnp.int32)
    new = Beams(tokens_BKU, length_BK, score_BK, total_BK, stops_BK)
    found = _best(found, new, lambda x: x.score_BN)
    logprob_BK = jnp.where(stops_BK, -jnp.inf, total_BK)
    return u + 1, carry, token_BK.reshape(-1), tokens_BKU, logprob_BK, found

  def unended(tokens_BNU, logprob_BN, length) -> Beams:
    length_BN = jnp.full(logprob_BN.shape, length, jnp.int32)
    score_BN = logprob_BN / divisor_U[-1]
    ended_BN = jnp.zeros(logprob_BN.shape, bool)
    return Beams(tokens_BNU, length_BN, score_BN, logprob_BN, ended_BN)

  none_BK = jnp.full((batch, width), -jnp.inf, dtype)
  tokens_BKU = jnp.full((batch, width, limit), pad, jnp.int32)
  found = unended(tokens_BKU[:, :n_best], none_BK[:, :n_best], 0)
  # All rows of an example are the same yet: only the first is a beginning.
  loop = 0, carry, start_R, tokens_BKU, none_BK.at[:, 0].set(0), found
  *_, tokens_BKU, logprob_BK, found = lax.while_loop(going, advance, loop)
  cut = unended(tokens_BKU, logprob_BK, limit)
  # Ended answers, then unfinished ones, then free places, each in their order.
  return _best(
    found, cut, lambda x: jnp.where(x.ended_BN, 2, ~jnp.isneginf(x.score_BN))
  )


def _begin(step, carry, start_B, limit, allowed_V, width=1):
  """Checks, and makes `width` rows of each: carry, start_B, dtype, aux.

  The dtype is that of log-probabilities; aux is its shapes alone.
  """
  if limit < 1:
    raise ValueError(f"limit must be at least 1, not {limit}")
  batch = shapes.check(start_B=start_B)["B"]
  for leaf in jax.tree.leaves(carry):
    if leaf.shape[:1] != (batch,):
      raise ValueError(
        f"the batch comes first in a carry: start_B has {batch} rows, but a "
        f"leaf has the shape {leaf.shape}"
      )
  carry = jax.tree.map(lambda leaf: jnp.repeat(leaf, width, axis=0), carry)
  start_B = jnp.repeat(jnp.asarray(start_B, jnp.int32), width)
  _, logits_BV, aux = jax.eval_shape(step, carry, start_B)
  shapes.check(start_B=start_B, logits_BV=logits_BV, allowed_V=allowed_V)
  dtype = jnp.promote_types(logits_BV.dtype, jnp.float32)
  return carry, start_B, dtype, aux


def _grow(logprob_BK, logits_RV, allowed_V):
  """The K best continuations of K beginnings: total_BK, token_BK, parent_BK."""
  batch, width = logprob_BK.shape
  # Of one beginning at most K can be among them.
  per = min(width, logits_RV.shape[1])
  ids_RC, logp_RC = _best_ids(logits_RV, allowed_V, per)
  # A place without a beginning continues nothing, even if it reads NaN.
  old_R1 = logprob_BK.reshape(-1, 1)
  total_RC = jnp.where(jnp.isneginf(old_R1), old_R1, old_R1 + logp_RC)
  total_BC, ids_BC = (x.reshape(batch, -1) for x in (total_RC, ids_RC))
  at_BK = _top(total_BC, width)
  return _take(total_BC, at_BK), _take(ids_BC, at_BK), at_BK // per


def _best_ids(logits_BV, allowed_V, k):
  """The k most likely ids, best first, ties by id: ids_BK, logp_BK."""
  x_BV = logits_BV.astype(jnp.promote_types(logits_BV.dtype, jnp.float32))
  allowed_BV = jnp.broadcast_to(jnp.asarray(allowed_V, bool), x_BV.shape)
  logp_BV = jax.nn.log_softmax(x_BV, axis=-1, where=allowed_BV)
  # Ranked by logit, since log-probabilities may have become equal; what is not
  # allowed comes last, below a logit of -inf.
  rank_BV = jnp.maximum(x_BV, jnp.finfo(x_BV.dtype).min)
  ids_BK = _top(jnp.where(allowed_BV, rank_BV, -jnp.inf), k)
  return ids_BK, _take(logp_BV, ids_BK)


def _top(x_BN, k):
  """Where the k largest of a row are, the earlier first of ties; NaN is top.

  A sort, as lax.top_k takes -0. for less than 0. and NaN by its sign.
  """
  order_BN = jnp.argsort(x_BN, axis=1, stable=True, descending=True)
  return order_BN[:, :k].astype(jnp.int32)


def _take(x_BN, at_BK):
  """x[b, at[b]] for every b; axes after the second go along."""
  return jax.vmap(lambda x_N, at_K: x_N[at_K])(x_BN, at_BK)


def _best(beams, others, key) -> Beams:
  """As many as `beams` has, of both, by the key; ties to the earlier."""
  n_best = beams.score_BN.shape[1]
  both = jax.tree.map(lambda *x: jnp.concatenate(x, 1), beams, others)
  at_BN = _top(key(both), n_best)
  return jax.tree.map(lambda x_BN: _take(x_BN, at_BN), both)
