"""How gates start: a scheme gives a keep logit to every unit.

The keep logit is the pre-activation, at zero input and state, of the
coefficient that multiplies the old state. One name, `keep`, means one thing in
every gated cell: more of it remembers longer. The cell places it in its own
convention (LSTM: b_f = keep; a GRU whose z replaces: b_z = -keep).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rnnlab import settings


class Keep(NamedTuple):
  """A scheme: `draw(key, hidden) -> keep_H`, and whether input opposes it.

  Where `opposes` is True, a cell with a separate input gate starts it at the
  negative of the keep logit (b_i = -b_f), so that what is kept and what is
  written sum to one.
  """

  draw: Any
  opposes: bool = False


def make(kind, **hparams) -> Keep:
  """The scheme of that name: constant, half_life, chrono or uniform."""
  schemes = {
    "constant": constant,
    "half_life": half_life,
    "chrono": chrono,
    "uniform": uniform,
  }
  if kind not in schemes:
    raise ValueError(
      f"model.cell.keep.kind is one of {list(schemes)}, not {kind!r}"
    )
  return schemes[kind](
    **settings.bind(schemes[kind], "model.cell.keep", hparams)
  )


def constant(value: float) -> Keep:
  """Every unit starts at the keep logit `value` (the classic forget bias)."""
  if not abs(value) <= 1e4:
    raise ValueError(
      f"model.cell.keep.value must be in -1e4 .. 1e4, not {value}"
    )
  return Keep(lambda key, hidden: jnp.full(hidden, float(value)))


def half_life(steps: float) -> Keep:
  """Every unit halves what it holds in `steps` steps: f = 0.5^(1/steps)."""
  if not 0.01 <= steps <= 1e9:
    raise ValueError(
      f"model.cell.keep.steps must be in 0.01 .. 1e9 steps, not {steps}"
    )
  # logit(f) = -log(1/f - 1), and 1/f = 2^(1/steps): exact for long lives too.
  logit = -math.log(math.expm1(math.log(2) / steps))
  return Keep(lambda key, hidden: jnp.full(hidden, logit))


def chrono(t_max: float) -> Keep:
  """Keep logits log U(1, t_max - 1), for dependencies of up to t_max steps.

  Source: Tallec and Ollivier, "Can recurrent neural networks warp time?", 2018.
  """
  if not 2 < t_max <= 1e9:
    raise ValueError(f"model.cell.keep.t_max must be in 2 .. 1e9, not {t_max}")
  return Keep(
    lambda key, hidden: jnp.log(
      jax.random.uniform(key, (hidden,), minval=1.0, maxval=t_max - 1.0)
    ),
    opposes=True,
  )


def uniform() -> Keep:
  """Keep probabilities uniform in (0, 1): every time scale is there."""
  tiny = jnp.finfo(jnp.float32).eps

  def draw(key, hidden):
    p_H = jax.random.uniform(key, (hidden,), minval=tiny, maxval=1 - tiny)
    return jnp.log(p_H) - jnp.log1p(-p_H)

  return Keep(draw)


def reorder(packed, order, to, axis=0):
  """Moves packed gate blocks from one declared order to another.

  `reorder(w_GD, "ifgo", "ifog")`: `order` and `to` hold the same letters, one a
  block along `axis`. Nothing in a packed array shows its order, so it has to be
  said. Raises ValueError where the letters differ or the axis does not divide.
  """
  if sorted(order) != sorted(to) or len(set(order)) != len(order):
    raise ValueError(f"gate order {order!r} cannot become {to!r}")
  if packed.shape[axis] % len(order):
    raise ValueError(
      f"{packed.shape[axis]} rows do not split into the {len(order)} gates of "
      f"{order!r}"
    )
  blocks = jnp.split(packed, len(order), axis)
  return jnp.concatenate([blocks[order.index(gate)] for gate in to], axis)
