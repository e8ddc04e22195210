"""Logits -> token: greedy, temperature, top-k, top-p.

    probs_BV = probabilities(logits_BV, temperature=.8, top_k=10)
    keys_B = row_keys(key, rows_B)
    token_B = pick(probs_BV, uniforms(keys_B, t))

Temperature is applied first, then top-k, then top-p on what top-k left. A draw
depends on the key, the number of the row and the time step alone, so a row is
the same alone or in company, and continuing equals never having stopped.
"""

import math
import numbers

import jax
import jax.numpy as jnp

from rnnlab import backend, shapes

# A mass is a float32 sum: p counts as reached within its rounding.
_MASS_ROUNDING = 1e-6


def check(temperature=1.0, top_k=0, top_p=1.0):
  """Raises ValueError unless the three are Python numbers in their range.

  temperature: finite, >= 0; 0 is greedy. top_k: an int >= 0; 0 is off, and so
  is anything from V up. top_p: in (0, 1]; 1 is off.
  """
  if not 0 <= temperature < math.inf:
    raise ValueError(
      f"temperature must be finite and >= 0, got {temperature!r}"
    )
  whole = isinstance(top_k, numbers.Integral) and not isinstance(top_k, bool)
  if not (whole and top_k >= 0):
    raise ValueError(f"top_k must be an int >= 0 (0: off), got {top_k!r}")
  if not 0 < top_p <= 1:
    raise ValueError(f"top_p must be in (0, 1] (1: off), got {top_p!r}")


def probabilities(logits_BV, *, temperature=1.0, top_k=0, top_p=1.0):
  """The distribution that is sampled from: probs_BV, float32, rows sum to 1.

  Temperature 0 is the argmax, whatever top_k and top_p are. top_k keeps exactly
  k symbols, top_p the smallest set of the most likely whose mass reaches p, at
  least one. Ties go to the lower id everywhere. Rows that `failed` marks hold
  no distribution. Raises ValueError as `check` does.
  """
  check(temperature, top_k, top_p)
  vocab = shapes.check(logits_BV=logits_BV)["V"]
  logits_BV = logits_BV.astype(jnp.float32)
  # Dividing by less than the smallest normal float32 would be dividing by 0.
  if temperature < jnp.finfo(jnp.float32).tiny:
    return jax.nn.one_hot(
      jnp.argmax(logits_BV, axis=-1), vocab, dtype=jnp.float32
    )
  # The maximum goes first, so that a small temperature cannot overflow it.
  z_BV = logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)
  probs_BV = jnp.exp(z_BV / temperature)
  probs_BV /= jnp.sum(probs_BV, axis=-1, keepdims=True)
  if not 0 < top_k < vocab and top_p == 1:
    return probs_BV
  # Ranked by logit, since small probabilities may have become equal.
  order_BV = jnp.argsort(-logits_BV, axis=-1, stable=True)
  rank_BV = jnp.argsort(order_BV, axis=-1)
  if 0 < top_k < vocab:
    probs_BV = _keep(probs_BV, rank_BV < top_k)
  if top_p < 1:
    sorted_BV = jnp.take_along_axis(probs_BV, order_BV, axis=-1)
    before_BV = jnp.cumsum(sorted_BV, axis=-1) - sorted_BV
    kept_BV = before_BV < top_p - _MASS_ROUNDING
    kept_BV = kept_BV.at[:, 0].set(True)
    probs_BV = _keep(probs_BV, jnp.take_along_axis(kept_BV, rank_BV, axis=-1))
  return probs_BV


def pick(probs_BV, uniform_B):
  """Inverse CDF: the first id whose cumulated probability exceeds u: token_B.

  uniform_B: in [0, 1). Returns int32, never an id of probability 0.
  """
  shapes.check(probs_BV=probs_BV, uniform_B=uniform_B)
  cdf_BV = backend.cumulated(probs_BV)
  positive_BV = probs_BV > 0
  # A parallel cumsum may rise by rounding where the probability is 0.
  hit_BV = (cdf_BV > uniform_B[:, None] * cdf_BV[:, -1:]) & positive_BV
  # u * total may round up to the total: then it is the last possible id.
  V = probs_BV.shape[-1]
  first_B = jnp.min(jnp.where(hit_BV, jnp.arange(V), V), axis=-1)
  last_B = jnp.max(jnp.where(positive_BV, jnp.arange(V), 0), axis=-1)
  return jnp.minimum(first_B, last_B).astype(jnp.int32)


def row_keys(key, rows_B):
  """A key a row, for `uniforms`; made once for all steps.

  rows_B: the number each row has among all samples asked for, not its place in
  this batch.
  """
  return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows_B)


def uniforms(keys_B, t):
  """One number in [0, 1) a row: uniform_B, float32, of (row's key, t) alone.

  t: the time step, counted from the first symbol of the sample.
  """

  def draw(key):
    return jax.random.uniform(jax.random.fold_in(key, t), (), jnp.float32)

  return jax.vmap(draw)(keys_B)


def failed(logits_BV):
  """True for a row with a NaN or +inf logit, or with no finite one: bool_B.

  Such a row has no distribution; the caller reports it instead of a token.
  """
  shapes.check(logits_BV=logits_BV)
  # The largest of them says all three: it is NaN, +inf or -inf.
  return ~jnp.isfinite(jnp.max(logits_BV, axis=-1))


def _keep(probs_BV, keep_BV):
  probs_BV = jnp.where(keep_BV, probs_BV, 0)
  return probs_BV / jnp.sum(probs_BV, axis=-1, keepdims=True)
