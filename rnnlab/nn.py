"""Affine maps, embeddings and initialisers: init -> params, and pure apply.

Weights are stored [out, in], as in the equations, so a product reads
`w_GD @ x_DN`.
"""

import math

import jax
import jax.numpy as jnp

INITIALISERS = ("orthogonal", "identity", "xavier", "lecun", "uniform")


def init(kind, key, out, width, blocks=1, bound=None):
  """Draws a weight [blocks * out, width], every block on its own.

  Args of note: `bound` is the half range of "uniform" (default 1/sqrt(width),
  PyTorch's for a linear layer). A packed recurrent weight is one block per
  gate, so that "orthogonal" makes each gate's block orthogonal, which one draw
  of the whole matrix would not. "identity" needs out == width.
  """
  draw = _drawer(kind, out, width, bound)
  keys = jax.random.split(key, blocks)
  return jnp.concatenate([draw(key, (out, width)) for key in keys])


def _drawer(kind, out, width, bound):
  of = jax.nn.initializers
  if kind == "orthogonal":
    return of.orthogonal()
  if kind == "xavier":
    return of.glorot_uniform(in_axis=-1, out_axis=-2)
  if kind == "lecun":
    return of.lecun_normal(in_axis=-1, out_axis=-2)
  if kind == "uniform":
    bound = 1 / math.sqrt(width) if bound is None else bound
    return lambda key, shape: jax.random.uniform(
      key, shape, minval=-bound, maxval=bound
    )
  if kind == "identity":
    if out != width:
      raise ValueError(f"identity needs a square weight, not {out} x {width}")
    return lambda key, shape: jnp.eye(out)
  raise ValueError(f"initialiser must be one of {INITIALISERS}, not {kind!r}")


def product(w_GH, h_HN, dtype=None):
  """`w @ h` with both sides in `dtype` (default: the weight's own).

  Sums run in float32 at least, and the result has that type: low precision is
  for the products alone.
  """
  dtype = w_GH.dtype if dtype is None else dtype
  return jnp.matmul(
    w_GH.astype(dtype),
    h_HN.astype(dtype),
    preferred_element_type=jnp.promote_types(dtype, jnp.float32),
  )


def linear(key, out, width, kind="uniform"):
  """The parameters of an affine map to `out` units: {"w_VH", "b_V"}."""
  return {"w_VH": init(kind, key, out, width), "b_V": jnp.zeros(out)}


def dropout(key, x_BTD, rate, locked=False):
  """Zeroes elements with probability `rate`, scales the rest by 1/(1-rate).

  `key` None means evaluation: x comes back as it is. Every step draws from a
  key of its own, so that what is dropped does not depend on the padding;
  locked: all steps of a row share one draw instead. Source of the latter: Gal
  and Ghahramani, 2016.
  """
  if key is None or rate == 0:
    return x_BTD
  B, T, D = x_BTD.shape
  if locked:
    return x_BTD * kept(key, (B, 1, D), rate, x_BTD.dtype)
  keys_T = jax.vmap(lambda t: jax.random.fold_in(key, t))(jnp.arange(T))
  keep_TBD = jax.vmap(lambda k: jax.random.bernoulli(k, 1 - rate, (B, D)))(
    keys_T
  )
  return jnp.where(jnp.swapaxes(keep_TBD, 0, 1), x_BTD / (1 - rate), 0)


def kept(key, shape, rate, dtype=jnp.float32):
  """Factors that drop: 0 with probability `rate`, otherwise 1/(1-rate)."""
  keep = jax.random.bernoulli(key, 1 - rate, shape)
  return keep.astype(dtype) / (1 - rate)
