"""Compiled updates and exact evaluation: what the trainer's loop calls."""

import collections
import itertools
import threading
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from rnnlab import optim
from rnnlab.metrics import Mean, to_host


@struct.dataclass
class TrainState:
  """All that the next update depends on, besides the batch of its number.

  The key is folded with the step, never split on, so it is the run's own
  throughout. `skipped` counts the updates that were refused, `streak` the last
  ones in a row that were not finite. `average` is that of the parameters over
  past updates, () where none is kept.
  """

  step: Any
  params: Any
  opt_state: Any
  carry: Any
  key: Any
  skipped: Any
  streak: Any
  average: Any = ()


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
    average=jax.tree.map(jnp.copy, params) if _averages(optimizer) else (),
  )


def _averages(optimizer):
  return "average" in optimizer.numbers


def accumulating(task, n, epochs=None):
  """The task whose batches are n of the task's, side by side on axis 1.

  An update learns from all of them at once and holds the activations of one at
  a time. epochs: what the run was asked for. Raises ValueError where an epoch
  would end inside a batch, or the batches differ in shape.
  """
  if n == 1:
    return task
  per_epoch = task.per_epoch
  if epochs and per_epoch and per_epoch % n:
    raise ValueError(
      f"train.accumulate={n} does not divide the {per_epoch} batches of an "
      "epoch, and no update is made of fewer; train.steps needs no epochs"
    )

  def joined(batches):
    shapes = [jax.tree.map(np.shape, batch) for batch in batches]
    if any(shape != shapes[0] for shape in shapes):
      raise ValueError(
        f"train.accumulate={n} needs batches of one shape, found {shapes}"
      )
    return jax.tree.map(
      lambda *x: np.stack(x, axis=min(1, np.ndim(x[0]))), *batches
    )

  def train_batches(start):
    batches = task.train_batches(start * n)
    while True:
      yield joined(list(itertools.islice(batches, n)))

  whole = per_epoch and per_epoch % n == 0
  return task._replace(
    train_batches=train_batches,
    per_epoch=per_epoch // n if whole else None,
    accumulated=n,
  )


def _gradient(task, params, carry, batch, key):
  """Sums over a batch, undivided: (grads, count), (carry, metrics)."""

  def total(params):
    mean, aux = task.loss(params, carry, batch, key)
    return mean.total, (mean.count, aux)

  grads, (count, aux) = jax.grad(total, has_aux=True)(params)
  return (grads, count), aux


def _gradients(task, params, carry, batch, key):
  """The same over all batches that stand in one."""
  n = task.accumulated or 1
  if n == 1:
    return _gradient(task, params, carry, batch, key)
  batches = jax.tree.map(
    lambda x: jnp.moveaxis(x, min(1, x.ndim - 1), 0), batch
  )

  def body(loop, each):
    carry, sums = loop
    i, batch = each
    own = jax.random.fold_in(key, i)
    more, (carry, metrics) = _gradient(task, params, carry, batch, own)
    return (carry, jax.tree.map(jnp.add, sums, more)), metrics

  # The first alone has the types of the sums.
  first, rest = (
    jax.tree.map(lambda x, part=part: x[part], (jnp.arange(n), batches))
    for part in (0, slice(1, None))
  )
  sums, (carry, metrics) = _gradient(
    task, params, carry, first[1], jax.random.fold_in(key, 0)
  )
  (carry, sums), more = lax.scan(body, (carry, sums), rest)
  metrics = jax.tree.map(lambda one, x: one + x.sum(0), metrics, more)
  return sums, (carry, metrics)


def _averaged(average, params, applied, done, decay):
  """The average after one update more, or as it was where that was refused."""
  # Early on over fewer updates, so that the first parameters soon count
  # nothing: of the last tenth of all at most.
  decay = jnp.minimum(decay, (1 + done) / (10 + done))
  return jax.tree.map(
    lambda a, p: jnp.where(applied, a + (1 - decay) * (p - a), a),
    average,
    params,
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
    key = jax.random.fold_in(state.key, state.step)
    (grads, count), (carry, metrics) = _gradients(
      task, state.params, state.carry, batch, key
    )
    grads = jax.tree.map(lambda g: g / jnp.maximum(count, 1), grads)
    done = state.step - state.skipped
    rate = optimizer.rate(numbers, done, elapsed)
    params, opt_state, applied, grad_norm = optim.apply(
      *(optimizer.tx(numbers), rate, grads, state.params, state.opt_state),
      when=count > 0,
    )
    average = state.average
    if _averages(optimizer):
      decay = numbers["average"]
      average = _averaged(average, params, applied, done, decay)
    state = state.replace(
      step=state.step + 1,
      params=params,
      opt_state=opt_state,
      carry=jax.tree.map(
        lambda new, old: jnp.where(applied, new, old), carry, state.carry
      ),
      skipped=state.skipped + ~applied,
      streak=jnp.where(applied | (count == 0), 0, state.streak + 1),
      average=average,
    )
    return state, Updates(
      metrics,
      rate,
      grad_norm,
      state.skipped,
      state.streak,
      done_K=jnp.asarray(True),
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


class Counted:
  """`jax.jit` that counts in counts[name] how often it compiles.

  Threads that call it at the same time compile it once.
  """

  def __init__(self, name, function, counts, **options):
    def traced(*args):
      counts[name] += 1  # runs when jax traces, and at no other time
      return function(*args)

    self._jitted = jax.jit(traced, **options)
    self._compiled, self._lock = set(), threading.Lock()

  def __call__(self, *args):
    self.compile(*args)
    return self._jitted(*args)

  def compile(self, *args) -> None:
    """Compiles for such arguments, or shapes, unless that was done before."""
    leaves, tree = jax.tree.flatten(args)
    key = (
      tree,
      tuple(
        (getattr(leaf, "shape", ()), getattr(leaf, "dtype", type(leaf)))
        for leaf in leaves
      ),
    )
    if key in self._compiled:
      return
    with self._lock:
      if key not in self._compiled:
        self._jitted.lower(*args).compile()
        self._compiled.add(key)
