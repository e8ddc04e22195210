"""Attention: scores, weights and context are three named things.

  e_us = score(q_u, k_s)         scores: any real number
  a_us = softmax of e_us over s  weights: sum to 1 over the source
  c_u  = sum_s a_us v_s          context

Arrays are B x U x S: target position, then source position. In the B x S x U
layout the same weights stand transposed, and the softmax runs over axis 1.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rnnlab import nn, settings, shapes


class Source(NamedTuple):
  """What can be attended to: made once, read at every target position."""

  keys_BSA: Any
  values_BSD: Any
  mask_BS: Any  # None: every position


class Attended(NamedTuple):
  """What `attend` computed, for every target position."""

  scores_BUS: Any  # raw
  weights_BUS: Any  # 0 where masked; a row sums to 1, or to 0 if all is masked
  context_BUD: Any


class Score(NamedTuple):
  """How a query is compared with a key.

  `keys` is the part of the work that needs the source alone.
  """

  init: Any  # (key, query width, key width) -> params
  keys: Any  # (params, k_BSD) -> keys_BSA
  apply: Any  # (params, q_BUD, keys_BSA) -> scores_BUS


def source(score, params, k_BSD, v_BSD=None, mask_BS=None) -> Source:
  """Keys and values for `attend`; without v_BSD the keys are the values.

  Whatever stands where mask_BS is False, NaN included, reaches no value and no
  gradient. Raises ValueError where shapes disagree.
  """
  v_BSD = k_BSD if v_BSD is None else v_BSD
  shapes.check(keys_BS=k_BSD[..., 0], values_BS=v_BSD[..., 0], mask_BS=mask_BS)
  if mask_BS is not None:
    if mask_BS.dtype != bool:
      raise ValueError(f"mask_BS must be of bool, not {mask_BS.dtype}")
    real_BS1 = mask_BS[..., None]
    k_BSD = jnp.where(real_BS1, k_BSD, 0)
    v_BSD = jnp.where(real_BS1, v_BSD, 0)
  return Source(score.keys(params, k_BSD), v_BSD, mask_BS)


def attend(score, params, q_BUD, source) -> Attended:
  """Looks up every query in the source.

  A masked position has weight exactly 0. A row with nothing to attend to has
  weights 0 and context 0.
  """
  scores_BUS = score.apply(params, q_BUD, source.keys_BSA)
  if source.mask_BS is None:
    weights_BUS = jax.nn.softmax(scores_BUS, axis=-1)
  else:
    weights_BUS = masked_softmax(scores_BUS, source.mask_BS[:, None, :])
  context_BUD = jnp.einsum("bus,bsd->bud", weights_BUS, source.values_BSD)
  return Attended(scores_BUS, weights_BUS, context_BUD)


def masked_softmax(scores, mask):
  """Softmax over the last axis where mask is True; 0 elsewhere and for none.

  mask: bool, broadcast to scores of as many axes.
  """
  z = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
  z = z - jax.lax.stop_gradient(jnp.max(z, axis=-1, keepdims=True))
  # Masked again: with nothing to attend to, z is 0 everywhere.
  e = jnp.where(mask, jnp.exp(z), 0)
  total = jnp.sum(e, axis=-1, keepdims=True)
  return e / jnp.where(total == 0, 1, total)


def make(name, **hparams) -> Score:
  """The score of that name: dot, scaled_dot, bilinear or additive."""
  scores = {
    "dot": dot,
    "scaled_dot": scaled_dot,
    "bilinear": bilinear,
    "additive": additive,
  }
  if name not in scores:
    raise ValueError(
      f"model.attention.score is one of {list(scores)}, not {name!r}"
    )
  bound = settings.bind(scores[name], "model.attention", hparams)
  return scores[name](**bound)


def dot() -> Score:
  """q . k, unscaled; query and key have one width."""
  return _dot(lambda width: 1.0)


def scaled_dot() -> Score:
  """q . k / sqrt(D), which keeps the scores' spread free of the width."""
  return _dot(lambda width: width**-0.5)


def _dot(scale):
  def init(key, d_query, d_key):
    if d_query != d_key:
      raise ValueError(
        f"a dot product needs query and key of one width, not {d_query} and "
        f"{d_key}; bilinear and additive scores take both"
      )
    return {}

  def apply(params, q_BUD, keys_BSD):
    scores_BUS = jnp.einsum("bud,bsd->bus", q_BUD, keys_BSD)
    return scores_BUS * scale(keys_BSD.shape[-1])

  return Score(init, lambda params, k_BSD: k_BSD, apply)


def bilinear() -> Score:
  """q . W k. Source: Luong, Pham and Manning, 2015 ("general")."""

  def init(key, d_query, d_key):
    return {"w_AD": nn.init("xavier", key, d_query, d_key)}

  def keys(params, k_BSD):
    return nn.product(k_BSD, params["w_AD"].T)

  def apply(params, q_BUA, keys_BSA):
    return jnp.einsum("bua,bsa->bus", q_BUA, keys_BSA)

  return Score(init, keys, apply)


def additive(width: int) -> Score:
  """w . tanh(W q + U k + b), in `width` units.

  Source: Bahdanau, Cho and Bengio, 2015, appendix A.1.2.
  """
  if width < 1:
    raise ValueError(f"model.attention.width must be at least 1, not {width}")

  def init(key, d_query, d_key):
    key_w, key_u, key_v = jax.random.split(key, 3)
    return {
      "w_AD": nn.init("xavier", key_w, width, d_query),
      "u_AD": nn.init("xavier", key_u, width, d_key),
      "b_A": jnp.zeros(width),
      "v_A": nn.init("uniform", key_v, 1, width)[0],
    }

  def keys(params, k_BSD):
    return nn.product(k_BSD, params["u_AD"].T) + params["b_A"][None, None]

  def apply(params, q_BUD, keys_BSA):
    q_BUA = nn.product(q_BUD, params["w_AD"].T)
    z_BUSA = jnp.tanh(q_BUA[:, :, None] + keys_BSA[:, None])
    return jnp.einsum("busa,a->bus", z_BUSA, params["v_A"])

  return Score(init, keys, apply)
