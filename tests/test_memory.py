"""The memory planner: predicted and compiled bytes, and the chunk that fits."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from rnnlab import cells
from rnnlab.analysis import memory
from rnnlab.models import lm, reader, tagger


def layer(settings, hidden=32, d_in=16):
  cell = cells.make(hidden=hidden, **settings)
  params = jax.eval_shape(lambda k: cell.init(k, d_in), jax.random.key(0))
  return cell, params, memory.step_of(cell, params, d_in)


def test_the_sizes_of_a_step():
  _, _, step = layer({"name": "lstm"})
  assert step.carry == 2 * 4 * 32 and step.activations == 4 * 4 * 32
  assert step.inputs == 4 * 4 * 32 and step.out == 4 * 32 and step.x == 4 * 16
  assert step.weights == 4 * 4 * 32 * 32
  assert step.params == step.weights + 4 * (4 * 32 * 16 + 4 * 32)
  assert step.kept == 15 * 4 * 32
  assert layer({"name": "gru"})[2].kept == 12 * 4 * 32


@pytest.mark.parametrize(
  "name, B, T, chunk",
  [
    ("gru", 8, 512, 16),
  ]
  + [
    pytest.param(name, B, T, chunk, marks=pytest.mark.slow)
    for name, B, T, chunk in (
      ("gru", 4, 512, 1),
      ("lstm", 64, 8192, 100),
    )
  ],
)
def test_what_is_predicted_is_what_is_compiled(name, B, T, chunk):
  cell, params, step = layer({"name": name}, 64, 64)
  said = memory.predict([step], B, T, chunk)
  found = memory.compiled(cell, params, B, T, 64, chunk)
  assert said == pytest.approx(found, rel=0.15)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["lstm", "gru"])
@pytest.mark.parametrize("hidden", [64, 256])
@pytest.mark.parametrize("T", [256, 2048, 8192])
def test_what_is_predicted_of_any_size_is_what_is_compiled(name, hidden, T):
  cell, params, step = layer({"name": name}, hidden, 64)
  for B, chunk in itertools.product((1, 8, 64), (None, 1, 16, 100, 128)):
    said = memory.predict([step], B, T, chunk)
    found = memory.compiled(cell, params, B, T, 64, chunk)
    assert said == pytest.approx(found, rel=0.15), (B, chunk)
    assert found <= 1.1 * said, (B, chunk)  # so a budget is kept to 10 %


def test_training_grows_with_the_steps_and_generating_does_not():
  cell, params, step = layer({"name": "lstm"})
  plain = [memory.predict([step], 4, T) for T in (64, 512)]
  assert plain[1] == 8 * plain[0]
  found = [memory.generating(cell, params, 4, T, 16) for T in (64, 4096)]
  assert found[0] == found[1] < plain[0]


@pytest.mark.parametrize("layers", [1, 3])
def test_the_plan_is_the_longest_chunk_that_fits(layers):
  B, T = 4, 96
  steps = [layer({"name": "lstm"}, 32, 32)[2]] * layers
  taken = {k: memory.predict(steps, B, T, k) for k in range(1, T + 1)}
  plain, least = memory.predict(steps, B, T), min(taken.values())
  assert memory.plan(steps, B, T, plain) == (None, plain, True)
  for budget in (plain - 1, least + 1000, least):
    chunk, used, fits = memory.plan(steps, B, T, budget)
    assert fits and used == taken[chunk] <= budget
    assert all(taken[k] > budget for k in range(chunk + 1, T + 1))
  chunk, used, fits = memory.plan(steps, B, T, least - 1)
  assert not fits and used == least == taken[chunk]


@pytest.mark.parametrize(
  "chunk, budget",
  [
    (None, None),
    (7, None),
    ("auto:512MiB", 512 * 2**20),
    ("auto:1.5GiB", 3 * 2**29),
    ("auto:64B", 64),
    ("auto:2KiB", 2048),
  ],
)
def test_a_budget_is_read(chunk, budget):
  assert memory.budget_of(chunk) == budget


MAKES = {
  "lm": (lm, {"vocab_size": 8, "embed": 4}),
  "reader": (reader, {"inputs": 8, "outputs": 3}),
  "tagger": (tagger, {"vocab_size": 8, "labels": 3, "embed": 4}),
}


def make(name, chunk, **settings):
  module, sizes = MAKES[name]
  settings = {"hidden": 16, "cell": {"name": "lstm"}} | settings
  return module.make(**sizes, chunk=chunk, **settings)


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize(
  "words, chunk",
  [
    ("not 'auto'", "auto"),
    ("not 'auto:5MB'", "auto:5MB"),
    ("at least 1, not 0", 0),
  ],
)
def test_a_chunk_that_is_none_is_refused(name, words, chunk):
  with pytest.raises(ValueError, match=f"model.chunk.*{words}"):
    make(name, chunk)


def shown(model, shape):
  params = jax.eval_shape(model.init, jax.random.key(0))
  tokens_BT = jax.ShapeDtypeStruct(shape, jnp.int32)
  return str(jax.make_jaxpr(model.apply)(params, tokens_BT))


@pytest.mark.parametrize("name", MAKES)
def test_a_model_takes_a_budget(name):
  assert "remat" not in shown(make(name, "auto:1GiB"), (4, 200))
  assert "remat" in shown(make(name, "auto:300KiB"), (4, 200))
  with pytest.raises(ValueError, match="'auto:1KiB': 4 rows of 200 steps take"):
    shown(make(name, "auto:1KiB"), (4, 200))


@pytest.mark.parametrize(
  "name, MiB, settings",
  [
    ("lm", 4, {}),
    ("tagger", 7, {"layers": 2, "direction": "both"}),
  ],
)
@pytest.mark.slow
def test_a_budget_is_kept(name, MiB, settings):
  budget, shape = MiB * 2**20, (8, 256)
  settings |= {"hidden": 64}
  model, plain = (
    make(name, f"auto:{MiB}MiB", **settings),
    make(name, None, **settings),
  )
  tokens_BT = jax.ShapeDtypeStruct(shape, jnp.int32)

  def taken(model):
    def loss(params, tokens_BT):
      out = jax.tree.leaves(model.apply(params, tokens_BT))[-1]
      return jnp.sum(jax.nn.logsumexp(out, axis=-1))

    params = jax.eval_shape(model.init, jax.random.key(0))
    lowered = jax.jit(jax.grad(loss)).lower(params, tokens_BT)
    return lowered.compile().memory_analysis().temp_size_in_bytes

  assert taken(model) <= 1.1 * budget < taken(plain)
