"""How any JAX library is timed: one jitted step, compiled ahead, donated."""

import time

import jax
import jax.numpy as jnp
import optax

from benchmarks import workloads


class Program:
  """A jitted function that is compiled ahead, once."""

  def __init__(self, function, *args, donate=()):
    self.function = jax.jit(function, donate_argnums=donate)
    self.args = args

  def prepare(self):
    began = time.perf_counter()
    self.call = self.function.lower(*self.args).compile()
    seconds = time.perf_counter() - began
    memory = self.call.memory_analysis()
    return workloads.Prepared(seconds, memory and memory.temp_size_in_bytes)


def build(work, params, logits, step, shared):
  """A Runner from what a library offers.

  logits(params, batch): [B, T, V]. step(params, carry, token_B): one step,
  (carry, logits_BV), from the carry `None` on. shared(grads): the gradients
  under the names of `workloads.weights`.
  """
  batch = jax.device_put(workloads.data(work))
  params = jax.tree.map(jnp.array, params)

  def loss(params, batch):
    each_BT = optax.softmax_cross_entropy_with_integer_labels(
      logits(params, batch), batch["targets_BT"]
    )
    return jnp.mean(each_BT)

  if work.kind == "evaluate":
    return evaluation(loss, params, batch)
  if work.kind == "generate":
    generate = _generate(work, step, batch["inputs_BT"][:, 0])
    return generation(generate, params, lambda: loss(params, batch))
  tx = optax.adam(workloads.LR)

  def update(params, opt_state, batch):
    value, grads = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value

  before = jax.tree.map(jnp.array, params)
  state = params, tx.init(params)
  program = Program(update, *state, batch, donate=(0, 1))

  def run(n):
    nonlocal state
    for _ in range(n):
      *state, value = program.call(*state, batch)
    jax.block_until_ready((state, value))

  def result():
    value, grads = jax.jit(jax.value_and_grad(loss))(before, batch)
    return float(value), shared(jax.device_get(grads))

  return workloads.Runner(result, program.prepare, run)


def evaluation(loss, params, batch, value=float):
  program = Program(loss, params, batch)

  def run(n):
    for _ in range(n):
      found = program.call(params, batch)
    jax.block_until_ready(found)

  def result():
    # Another function, so that the program below is not yet compiled.
    return value(jax.jit(lambda *args: loss(*args))(params, batch)), {}

  return workloads.Runner(result, program.prepare, run)


def generation(generate, params, loss):
  """generate(params, key) -> tokens; loss(): that of the same model on data."""
  key = jax.random.key(0)
  program = Program(generate, params, key)

  def run(n):
    for _ in range(n):
      program.call(params, key).block_until_ready()

  return workloads.Runner(lambda: (float(loss()), {}), program.prepare, run)


def _generate(work, step, first_B):
  """The usual loop: a scan that draws by `categorical` with a split key."""

  def generate(params, key):
    carry, logits_BV = step(params, None, first_B)

    def body(state, _):
      carry, logits_BV, key = state
      key, own = jax.random.split(key)
      token_B = jax.random.categorical(own, logits_BV)
      carry, logits_BV = step(params, carry, token_B)
      return (carry, logits_BV, key), token_B

    return jax.lax.scan(body, (carry, logits_BV, key), length=work.steps)[1]

  return generate
