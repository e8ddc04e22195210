"""Compiled updates and exact evaluation: what the trainer's loop calls."""

import collections
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from rnnlab import optim
from rnnlab.metrics import Mean, to_host


@struct.dataclass
class TrainState:
  """All that the next update depends on, besides the batch of its number.

  The key is folded with the step, never split on, so it is the run's own
  throughout. `skipped` counts the updates that were refused, `streak` the last
  ones in a row that were not finite.
  """

  step: Any
  params: Any
  opt_state: Any
  carry: Any
  key: Any
  skipped: Any
  streak: Any


class Updates(NamedTuple):
  """What K updates report; where `done_K` is False the run had ended."""

  metrics: Any  # {name: Mean of arrays of K}
  rate_K: Any
  grad_norm_K: Any
  skipped_K: Any
  streak_K: Any
  done_K: Any


def init_params(task, key):
  """(the first parameters of a run with this key, the key of its updates)."""
  key_init, key = jax.random.split(key)
  return task.init(key_init), key


def init_state(task, optimizer, key) -> TrainState:
  """The state before the first update."""
  params, key = init_params(task, key)
  # Three buffers, since none may be donated twice.
  step, skipped, streak = (jnp.zeros((), jnp.int32) for _ in range(3))
  return TrainState(
    step=step,
    params=params,
    opt_state=optimizer.tx(optimizer.numbers).init(params),
    carry=task.carry(params),
    key=key,
    skipped=skipped,
    streak=streak,
  )


def make_train_steps(task, optimizer):
  """K updates as one function of (state, batches_K, stop, elapsed, numbers).

  batches_K is a batch whose arrays have a leading axis of K. Updates from
  number `stop` on are left out, so that the last call of a run compiles
  nothing new. elapsed is the used share of the wall-clock budget. numbers are
  those of an optimizer of the same make. Returns (state, Updates).

  The gradient is that of total / count over the whole batch. An update with a
  non-finite element is refused: parameters, optimiser state, carry and the
  schedule's count stay as they were. So is one whose batch supervises nothing.
  """

  def update(state, batch, elapsed, numbers):
    def total(params):
      key = jax.random.fold_in(state.key, state.step)
      mean, aux = task.loss(params, state.carry, batch, key)
      return mean.total, (mean.count, *aux)

    grads, (count, carry, metrics) = jax.grad(total, has_aux=True)(state.params)
    grads = jax.tree.map(lambda g: g / jnp.maximum(count, 1), grads)
    count_applied = state.step - state.skipped
    rate = optimizer.rate(numbers, count_applied, elapsed)
    params, opt_state, applied, grad_norm = optim.apply(
      *(optimizer.tx(numbers), rate, grads, state.params, state.opt_state),
      when=count > 0,
    )
    state = state.replace(
      step=state.step + 1,
      params=params,
      opt_state=opt_state,
      carry=jax.tree.map(
        lambda new, old: jnp.where(applied, new, old), carry, state.carry
      ),
      skipped=state.skipped + ~applied,
      streak=jnp.where(applied | (count == 0), 0, state.streak + 1),
    )
    done = jnp.asarray(True)
    return state, Updates(
      metrics, rate, grad_norm, state.skipped, state.streak, done
    )

  def train_steps(state, batches_K, stop, elapsed, numbers):
    def body(state, batch):
      def run(state):
        return update(state, batch, elapsed, numbers)

      def rest(state):
        _, out = jax.eval_shape(run, state)
        return state, jax.tree.map(lambda o: jnp.zeros(o.shape, o.dtype), out)

      return jax.lax.cond(state.step < stop, run, rest, state)

    return jax.lax.scan(body, state, batches_K)

  return train_steps


def evaluate(report, params, carry, batches) -> dict[str, Mean]:
  """Adds up `report` over batches, in float64 on the host: {name: Mean}.

  The sums do not depend on how the examples were cut into batches.
  """
  sums = collections.defaultdict(lambda: Mean(0.0, 0))
  for batch in batches:
    carry, metrics = report(params, carry, batch)
    for name, mean in to_host(metrics).items():
      sums[name] += mean
  return dict(sums)


def counted(name, function, counts, **options):
  """`jax.jit` that counts in counts[name] how often it compiles."""

  def traced(*args):
    counts[name] += 1  # runs when jax traces, and at no other time
    return function(*args)

  return jax.jit(traced, **options)
