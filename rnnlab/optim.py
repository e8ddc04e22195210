"""Optimisers: a chain without the learning rate, and the rate on its own.

    opt = make(name="adam", lr=1e-3, schedule="cosine", warmup=100, steps=5000)
    rate = opt.rate(opt.numbers, count, elapsed)
    params, opt_state, applied, grad_norm = apply(
      opt.tx(opt.numbers), rate, grads, params, opt_state
    )

The rate stands outside the chain, so that the logged rate is the one that was
used, and so that it can follow a wall-clock budget. The numbers stand outside
of both: they are data to the compiled update, and another value compiles
nothing.
"""

import collections
import math
import numbers
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax


class Optimizer(NamedTuple):
  """A gradient transformation without a rate, the rate, and their numbers.

  tx(numbers) is the transformation. rate(numbers, count, elapsed=0.0) is a
  float32, traceable: count is the number of updates applied so far, elapsed the
  used share of the wall-clock budget (0 without). Both take numbers as they
  stand here or traced; which there are is part of the program.
  """

  numbers: dict[str, float]
  tx: Callable
  rate: Callable


def make(
  *,
  name="adam",
  lr,
  schedule="constant",
  warmup=0,
  unit="update",
  steps=None,
  steps_per_epoch=None,
  budget=False,
  end=0.0,
  clip=None,
  weight_decay=0.0,
  momentum=0.0,
  b1=0.9,
  b2=0.999,
  eps=1e-8,
  average=None,
):
  """An Optimizer from hyper-parameters; ValueError by name for a wrong one.

  name: adam, adamw or sgd. weight_decay is for adamw and reaches all
  parameters, momentum is for sgd; clip is the largest global norm a gradient
  may have, None for no limit. average: the decay of an exponential average of
  the parameters, of which an update leaves this share (0.999 is over about
  1,000 updates; fewer at the start); None keeps none.

  The rate rises linearly from 0 over `warmup` updates to `lr`, then stays
  (schedule="constant") or falls to `end` along half a cosine ("cosine"), which
  is over when `steps` updates are done or, with budget=True, when the wall
  clock's budget is used, whichever comes first. unit="epoch" holds the count at
  the first update of each epoch, so a warm-up leaves the first epoch at 0.
  """
  rate_numbers, rate = _make_rate(
    lr, schedule, warmup, unit, steps, steps_per_epoch, budget, end
  )
  tx_numbers, tx = _make_tx(name, clip, weight_decay, momentum, b1, b2, eps)
  if average is not None:
    fits = _is_real(average) and 0 <= average and jnp.float32(average) < 1
    _require(fits, "average", average, "in [0, 1), in float32, or None")
    tx_numbers["average"] = average
  # Python's floats: as arguments of a compiled call they give way to the dtype
  # of what they meet, as constants do.
  numbers = {k: float(v) for k, v in (rate_numbers | tx_numbers).items()}
  return Optimizer(numbers, tx, rate)


def _make_tx(name, clip, weight_decay, momentum, b1, b2, eps):
  names = ("adam", "adamw", "sgd")
  _require(name in names, "name", name, f"one of {names}")
  if clip is not None:
    _require(_is_real(clip) and clip > 0, "clip", clip, "> 0, or None")
  for field, value in (("b1", b1), ("b2", b2), ("momentum", momentum)):
    fits = _is_real(value) and 0 <= value and jnp.float32(value) < 1
    _require(fits, field, value, "in [0, 1), in float32")
  _require(_is_real(eps) and eps > 0, "eps", eps, "> 0")
  decays = _is_real(weight_decay) and weight_decay >= 0
  _require(decays, "weight_decay", weight_decay, ">= 0")
  # A setting that would be left unused is a mistake somebody should hear of.
  fits = name == "adamw" or weight_decay == 0
  _require(fits, "weight_decay", weight_decay, f"0 with opt.name={name!r}")
  fits = name == "sgd" or momentum == 0
  _require(fits, "momentum", momentum, f"0 with opt.name={name!r}")

  numbers = {} if clip is None else {"clip": clip}
  if name == "sgd":
    numbers |= {"momentum": momentum} if momentum else {}
  else:
    numbers |= {"b1": b1, "b2": b2, "eps": eps}
  if name == "adamw":
    numbers |= {"weight_decay": weight_decay}

  def tx(numbers):
    parts = [optax.identity()]  # a chain of nothing would not be one
    if "clip" in numbers:
      parts += [clip_by_global_norm(numbers["clip"])]
    if "momentum" in numbers:
      parts += [optax.trace(numbers["momentum"])]
    if "b1" in numbers:
      adam = numbers["b1"], numbers["b2"], numbers["eps"]
      parts += [optax.scale_by_adam(*adam)]
    if "weight_decay" in numbers:
      parts += [optax.add_decayed_weights(numbers["weight_decay"])]
    return optax.chain(*parts)

  return numbers, tx


def _make_rate(lr, schedule, warmup, unit, steps, steps_per_epoch, budget, end):
  schedules, units = ("constant", "cosine"), ("update", "epoch")
  _require(schedule in schedules, "schedule", schedule, f"one of {schedules}")
  _require(unit in units, "unit", unit, f"one of {units}")
  fits = _is_real(lr) and jnp.float32(lr) > 0 and math.isfinite(jnp.float32(lr))
  _require(fits, "lr", lr, "finite and > 0 in float32")
  _require(_is_int(warmup) and warmup >= 0, "warmup", warmup, "an int >= 0")
  for field, value in (("steps", steps), ("steps_per_epoch", steps_per_epoch)):
    fits = value is None or (_is_int(value) and value > 0)
    _require(fits, field, value, "an int > 0, or None")
  if steps is not None:
    wanted = f"less than the {steps} updates of the run"
    _require(warmup < steps, "warmup", warmup, wanted)
  if unit == "epoch":
    fits = steps_per_epoch is not None
    _require(fits, "steps_per_epoch", None, "an int with opt.unit='epoch'")
  fits = schedule == "constant" or steps is not None or budget
  _require(fits, "steps", steps, "an int with 'cosine' and no budget")
  fits = _is_real(end) and 0 <= end <= lr
  _require(fits, "end", end, f"between 0 and opt.lr={lr}")
  fits = schedule == "cosine" or end == 0
  _require(fits, "end", end, f"0 with opt.schedule={schedule!r}")

  numbers = {"lr": lr, "warmup": warmup}
  if schedule == "cosine":
    numbers |= {"end": end} | ({} if steps is None else {"steps": steps})

  def rate(numbers, count, elapsed=0.0):
    lr, warmup = numbers["lr"], numbers["warmup"]
    count = jnp.asarray(count)
    if unit == "epoch":
      count = count // steps_per_epoch * steps_per_epoch
    count = count.astype(jnp.float32)
    rising = lr * count / jnp.maximum(warmup, 1)
    settled = jnp.float32(lr)
    if schedule == "cosine":
      done = jnp.asarray(elapsed, jnp.float32)
      if "steps" in numbers:
        done = jnp.maximum(done, count / numbers["steps"])
      done = jnp.clip(done, 0, 1)
      # Where the warm-up ended, had all updates taken the same share: without
      # a clock it is warmup / steps, so one formula serves both.
      start = warmup * done / jnp.maximum(count, 1)
      room = start < 1
      q = jnp.where(room, (done - start) / jnp.where(room, 1 - start, 1), 1)
      end = numbers["end"]
      settled = end + (lr - end) * 0.5 * (1 + jnp.cos(jnp.pi * q))
    return jnp.where(count < warmup, rising, settled)

  return numbers, rate


def apply(tx, rate, grads, params, opt_state, when=True):
  """One update, or none: (params, opt_state, applied, grad_norm).

  applied is a bool array. It is False where an element of the gradients, or of
  what the update would make of params or opt_state, is not finite (a gradient
  of 1e30 overflows Adam's second moment); then both come back bit for bit as
  they were. grad_norm is before clipping. when: False refuses the update too
  (a batch with nothing to learn from must not move a momentum).
  """
  scale, norm = _scaled_norm(grads)
  grad_norm = scale * norm
  updates, new_state = tx.update(grads, opt_state, params)
  updates = jax.tree.map(lambda update: -rate * update, updates)
  new = optax.apply_updates(params, updates), new_state
  # The scaled norm is finite where all gradients are.
  applied = when & jnp.isfinite(norm) & _all_finite(new)
  params, opt_state = jax.tree.map(
    lambda new, old: jnp.where(applied, new, old), new, (params, opt_state)
  )
  return params, opt_state, applied, grad_norm


def global_norm(tree):
  """The Euclidean norm over all leaves, in float32 or wider.

  It overflows only where the norm itself has no float32: the elements are
  divided by the largest magnitude before they are squared. NaN where an element
  is not finite.
  """
  largest, norm = _scaled_norm(tree)
  return largest * norm


def clip_by_global_norm(threshold):
  """Scales updates down to the threshold where their global norm exceeds it.

  As optax's, which it replaces because gradients of 1e30 have an infinite sum
  of squares and so would become 0. Not a check for finite values.
  """

  def update(updates, state, params=None):
    del params
    largest, norm = _scaled_norm(updates)
    small = largest * norm <= threshold

    def clip(x):
      clipped = x / largest * (threshold / norm)
      return jnp.where(small, x, clipped).astype(x.dtype)

    return jax.tree.map(clip, updates), state

  return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _scaled_norm(tree):
  """(scale, norm / scale): the scale is 1 unless squares would leave range.

  Then it is the largest magnitude. Another pass over all leaves, each a kernel
  or two, is a twentieth of a small model's update (row W4).
  """
  leaves = [
    x.astype(jnp.result_type(x, jnp.float32)) for x in jax.tree.leaves(tree)
  ]

  def norm_of(leaves):
    return jnp.sqrt(sum(jnp.sum(x * x) for x in leaves))

  def scaled(leaves):
    largest = [jnp.max(jnp.abs(x), initial=0) for x in leaves]
    largest = jnp.max(jnp.stack(largest))
    largest = jnp.where(largest == 0, 1, largest)
    return largest, norm_of([x / largest for x in leaves])

  norm = norm_of(leaves)
  # Below, what is lost of squares under the smallest float32 could count.
  fits = (norm > 1e-10) & jnp.isfinite(norm)
  one = jnp.ones_like(norm)
  return lax.cond(fits, lambda leaves: (one, norm), scaled, leaves)


def _all_finite(tree):
  # x * 0 is NaN where x is not finite, and so is a sum with it. XLA:CPU adds in
  # one fast pass, which leaves of one shape share, and compares in several slow
  # ones (a tenth of row W4).
  alike = collections.defaultdict(list)
  for x in jax.tree.leaves(tree):
    alike[x.shape, x.dtype].append(x * 0)
  zeros = [jnp.sum(sum(each)) for each in alike.values()]
  return jnp.all(jnp.isfinite(jnp.stack(zeros)))


def _require(ok, field, value, wanted):
  if not ok:
    raise ValueError(f"opt.{field} must be {wanted}, got {value!r}")


def _is_real(x):
  return (
    isinstance(x, numbers.Real) and not isinstance(x, bool) and math.isfinite(x)
  )


def _is_int(x):
  return isinstance(x, numbers.Integral) and not isinstance(x, bool)
