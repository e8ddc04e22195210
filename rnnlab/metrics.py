"""Sums and counts travel; the division happens once, at the end.

An average of batch averages weighs a short batch like a long one. So a metric
is a `Mean`, a total and a count: adding two of them is exact whatever the
batching was, and only `value()` divides.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct


@struct.dataclass
class Mean:
  """A total and how many numbers are in it.

  On the device: an array of float32 (or wider) and an int32 array. On the host,
  after `to_host`: a Python float and a Python int, so that a long evaluation is
  added in float64 and its count has no limit.
  """

  total: jax.Array | float
  count: jax.Array | int

  @classmethod
  def of(cls, x, mask=None):
    """The sum of x where mask is True, and how many that are.

    x: any shape and number type, added in float32 or wider. mask: bool, of the
    shape of x; None takes all. What x holds where mask is False, NaN included,
    reaches neither the total nor the gradient with respect to x. Raises
    ValueError where the mask is not bool or has another shape.
    """
    x = _at_least_float32(x)
    if mask is None:
      return cls(jnp.sum(x), jnp.asarray(x.size, jnp.int32))
    mask = jnp.asarray(mask)
    if mask.dtype != jnp.bool_ or mask.shape != x.shape:
      raise ValueError(
        f"mask must be bool of shape {x.shape}, got {mask.dtype} of shape "
        f"{mask.shape}"
      )
    return cls(jnp.sum(jnp.where(mask, x, 0)), jnp.sum(mask, dtype=jnp.int32))

  def __add__(self, other):
    return Mean(self.total + other.total, self.count + other.count)

  def value(self, name="mean"):
    """total / count as a Python float; on the host only.

    Raises ValueError with the name where nothing was counted.
    """
    if int(self.count) == 0:
      raise ValueError(f"{name}: there is nothing to average, the count is 0")
    return float(self.total) / int(self.count)


def to_host(metrics):
  """A tree of `Mean` on the device -> the same tree of Python numbers.

  One transfer for the whole tree. Leading axes, such as the updates of one
  compiled call, are added up: totals in float64, counts as Python ints.
  """
  return jax.tree.map(
    lambda mean: Mean(
      float(np.sum(mean.total, dtype=np.float64)),
      int(np.sum(mean.count, dtype=np.int64)),
    ),
    jax.device_get(metrics),
    is_leaf=lambda node: isinstance(node, Mean),
  )


def cross_entropy(logits, targets):
  """-log softmax(logits)[target], in nats.

  logits: [..., V], -inf where a symbol is excluded. targets: [...], integers in
  [0, V). Returns [...] in float32 or wider. A position that a mask will drop
  may hold any finite logits; NaN there must be cleared before it comes here,
  because the gradient would be 0 * NaN. Raises ValueError where the shapes
  differ.
  """
  logits = _at_least_float32(logits)
  if logits.shape[:-1] != targets.shape:
    raise ValueError(
      f"logits of shape {logits.shape} need targets of shape "
      f"{logits.shape[:-1]}, got {targets.shape}"
    )
  return optax.softmax_cross_entropy_with_integer_labels(logits, targets)


def edit_distance(a_BU, a_length_B, b_BT, b_length_B):
  """Insertions, deletions and substitutions from a to b, row by row: int32.

  Rows are read up to their length; either may be 0. Levenshtein's recurrence,
  one row of the table a step; the insertions along a row are a running minimum.
  """
  B, T = b_BT.shape
  j_1 = jnp.arange(T + 1)[None]

  def row(above_BJ, a_B):
    differs_BT = a_B[:, None] != b_BT
    down_BJ = above_BJ + 1
    diagonal_BT = above_BJ[:, :-1] + differs_BT
    best_BJ = down_BJ.at[:, 1:].min(diagonal_BT)
    row_BJ = jax.lax.cummin(best_BJ - j_1, axis=1) + j_1
    return row_BJ, row_BJ

  first_BJ = jnp.broadcast_to(j_1, (B, T + 1))
  _, rows_UBJ = jax.lax.scan(row, first_BJ, a_BU.T)
  table = jnp.concatenate([first_BJ[None], rows_UBJ])
  return table[a_length_B, jnp.arange(B), b_length_B]


def perplexity(nll):
  """exp(nll) of a mean in nats, a Python float; inf where it overflows."""
  try:
    return math.exp(nll)
  except OverflowError:
    return math.inf


def bits(nll):
  """A mean in nats as bits."""
  return nll / math.log(2)


def wilson(share, n, z=1.96):
  """The 95 % interval of a share of n, by Wilson's score: (low, high)."""
  centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
  half = (
    z / (1 + z**2 / n) * np.sqrt(share * (1 - share) / n + z**2 / (4 * n**2))
  )
  return np.maximum(centre - half, 0), np.minimum(centre + half, 1)


def notebook_average(means, n_examples, batch_size):
  """The batch means, added and divided by n_examples // batch_size.

  A common way to print a validation loss, kept only to audit such numbers; it
  is wrong twice. The last, short batch has a mean of its own in the sum but no
  share in the floored divisor, so the result is too high, more so the larger
  the batch. And a mean over batches weighs tokens unequally. Use `Mean`. Raises
  ValueError where no batch is full, as the divisor is 0.
  """
  if n_examples < batch_size:
    raise ValueError(
      f"n_examples // batch_size is 0: {n_examples} examples, batches of "
      f"{batch_size}"
    )
  return sum(means) / (n_examples // batch_size)


def _at_least_float32(x):
  return jnp.asarray(x, jnp.result_type(x, jnp.float32))
