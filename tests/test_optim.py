"""Schedules, clipping, and the refusal of what is not finite."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rnnlab import optim

WARMUP_COSINE = [0, 0.25, 0.5, 0.75, 1, 0.961940, 0.853553, 0.691342, 0.5] + [
  0.308658,
  0.146447,
  0.038060,
  0,
]


def rates(counts, elapsed=None, **opt):
  numbers, _, rate = optim.make(**opt)
  rate = jax.jit(jax.vmap(functools.partial(rate, numbers)))
  counts = jnp.asarray(counts)
  elapsed = jnp.zeros(len(counts)) if elapsed is None else jnp.asarray(elapsed)
  return rate(counts, elapsed)


def test_warm_up_then_cosine_then_the_end_value():
  opt = dict(lr=1, schedule="cosine", warmup=4, steps=12)
  got = rates(range(16), **opt)
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, WARMUP_COSINE + [0] * 3, atol=1e-6)
  got = rates([4, 12, 99], **opt, end=0.1)
  np.testing.assert_allclose(got, [1, 0.1, 0.1], atol=1e-6)


def test_the_rate_falls_by_update_or_by_epoch():
  opt = dict(lr=1.0, schedule="cosine", steps=30)
  got = rates([0, 9, 15, 29], **opt)
  np.testing.assert_allclose(got, [1, 0.793893, 0.5, 0.002739], atol=1e-6)
  got = rates([0, 9, 10, 19, 20, 29], **opt, unit="epoch", steps_per_epoch=10)
  np.testing.assert_allclose(got, [1, 1, 0.75, 0.75, 0.25, 0.25], atol=1e-6)


def test_ten_epochs():
  table = [1e-3, 9.7553e-4, 9.0451e-4, 7.9389e-4, 6.5451e-4, 5e-4, 3.4549e-4]
  table += [2.0611e-4, 9.5492e-5, 2.4472e-5]
  opt = dict(lr=1e-3, schedule="cosine", unit="epoch")
  got = rates(range(70), **opt, steps=70, steps_per_epoch=7)
  np.testing.assert_allclose(got, np.repeat(table, 7), atol=1e-8)


def test_a_constant_rate_with_and_without_warm_up():
  np.testing.assert_allclose(rates([0, 1, 10**6], lr=0.5), 0.5)
  got = rates(range(6), lr=1.0, warmup=4)
  np.testing.assert_allclose(got, [0, 0.25, 0.5, 0.75, 1, 1])


def test_a_wall_clock_budget_at_constant_speed_is_a_number_of_steps():
  opt = dict(lr=1.0, schedule="cosine", warmup=4)
  counts = jnp.arange(16)
  elapsed = jnp.minimum(counts / 12, 1)
  got = rates(counts, elapsed, **opt, budget=True)
  np.testing.assert_allclose(got, WARMUP_COSINE + [0] * 3, atol=1e-6)


def test_whichever_of_steps_and_budget_ends_first_ends_the_schedule():
  opt = dict(lr=1.0, schedule="cosine", warmup=4, steps=100, budget=True)
  slow = jnp.arange(16) / 12
  got = rates(jnp.arange(16), slow, **opt)
  np.testing.assert_allclose(got, WARMUP_COSINE + [0] * 3, atol=1e-6)
  got = rates([52, 100], [0.1, 0.2], **opt)
  np.testing.assert_allclose(got, [0.5, 0], atol=1e-6)


def test_a_budget_schedule_never_rises_after_warm_up_and_is_finite():
  rng = np.random.default_rng(0)
  elapsed = np.sort(rng.random(200).astype(np.float32) ** 3)
  elapsed[-20:] = 1
  for unit in ("update", "epoch"):
    opt = dict(lr=1.0, warmup=20, unit=unit, steps_per_epoch=8)
    got = rates(range(200), elapsed, schedule="cosine", budget=True, **opt)
    assert np.all(np.isfinite(got))
    after = 24 if unit == "epoch" else 20
    assert np.all(np.diff(got[after:]) <= 1e-6)
    np.testing.assert_allclose(got[-20:], 0, atol=1e-6)
  # The whole budget gone before the first update after the warm-up.
  opt = dict(lr=1.0, schedule="cosine", budget=True)
  np.testing.assert_allclose(rates([4], [1.0], warmup=4, **opt), 0)
  np.testing.assert_allclose(rates([0], [1.0], warmup=4, **opt), 0)
  np.testing.assert_allclose(rates([0, 0], [0.0, 1.0], **opt), [1, 0])


@pytest.mark.parametrize(
  ("field", "opt"),
  [
    ("name", {"name": "adagrad"}),
    ("schedule", {"schedule": "linear"}),
    ("unit", {"unit": "step"}),
    ("lr", {"lr": 0}),
    ("lr", {"lr": -1.0}),
    ("lr", {"lr": math.nan}),
    ("lr", {"lr": math.inf}),
    ("lr", {"lr": True}),
    ("lr", {"lr": "1e-3"}),
    ("warmup", {"warmup": -1}),
    ("warmup", {"warmup": True}),
    ("warmup", {"warmup": 2.0}),
    ("warmup", {"warmup": 12, "steps": 12}),
    ("warmup", {"warmup": 13, "steps": 12, "schedule": "cosine"}),
    ("steps", {"steps": 0}),
    ("steps", {"steps": 1.5}),
    ("steps", {"schedule": "cosine"}),
    ("steps_per_epoch", {"steps_per_epoch": 0}),
    ("steps_per_epoch", {"unit": "epoch"}),
    ("end", {"end": -0.1, "schedule": "cosine", "steps": 2}),
    ("end", {"end": 0.2, "schedule": "cosine", "steps": 2}),
    ("end", {"end": 0.05}),
    ("clip", {"clip": 0}),
    ("clip", {"clip": math.inf}),
    ("weight_decay", {"weight_decay": -0.1, "name": "adamw"}),
    ("weight_decay", {"weight_decay": 0.1}),
    ("momentum", {"momentum": 0.9}),
    ("momentum", {"momentum": 1.0, "name": "sgd"}),
    ("b1", {"b1": 1.0}),
    ("b2", {"b2": -0.1}),
    ("eps", {"eps": 0.0}),
  ],
)
def test_a_wrong_setting_is_refused_by_name(field, opt):
  with pytest.raises(ValueError, match=rf"opt\.{field} must") as error:
    optim.make(**{"lr": 0.1, **opt})
  assert repr(opt.get(field)) in str(error.value)


def test_another_number_is_the_same_program():
  base = dict(schedule="cosine", warmup=2, steps=9, end=1e-3, clip=1.0)
  pairs = [
    ({"lr": 0.1}, {"lr": 0.02}),
    (base | {"lr": 0.1}, base | {"lr": 0.2, "warmup": 3, "clip": 0.5}),
    ({"lr": 0.1, "b1": 0.5, "eps": 1e-3}, {"lr": 0.1, "b2": 0.9}),
    (
      {"lr": 0.1, "name": "adamw", "weight_decay": 0.1},
      {"lr": 0.1, "name": "adamw", "weight_decay": 0.0},
    ),
    (
      {"lr": 0.1, "name": "sgd", "momentum": 0.9},
      {"lr": 0.1, "name": "sgd", "momentum": 0.5},
    ),
  ]
  params = {"a": jnp.array([1.0, -2.0])}
  grads = {"a": jnp.array([0.3, 3.0])}
  for pair in pairs:
    one, other = (optim.make(**opt) for opt in pair)

    @jax.jit
    def step(params, opt_state, numbers, tx=one.tx, rate=one.rate):
      rate_3 = rate(numbers, 3)
      return optim.apply(tx(numbers), rate_3, grads, params, opt_state)

    for made in one, other:
      opt_state = made.tx(made.numbers).init(params)
      got = step(params, opt_state, made.numbers)
      rate_3 = made.rate(made.numbers, 3)
      want = optim.apply(
        made.tx(made.numbers), rate_3, grads, params, opt_state
      )
      np.testing.assert_allclose(got[0]["a"], want[0]["a"], rtol=1e-5)
    assert one.numbers != other.numbers
    assert step._cache_size() == 1


def test_a_misspelt_setting_is_refused():
  with pytest.raises(TypeError, match="warm_up"):
    optim.make(lr=0.1, warm_up=4)


# As ours are: b2 is then a float32 before it is taken from 1, and so 5e-5 of
# 1 - b2 off the constant's.
numbers_as_data = optax.inject_hyperparams


def loss(params, t):
  return jnp.sum((params["w"] * jnp.sin(t + params["b"]) - 1) ** 2)


@pytest.mark.parametrize(
  ("opt", "reference"),
  [
    ({"name": "adam"}, numbers_as_data(optax.adam)(0.05)),
    (
      {"name": "adam", "b1": 0.5, "b2": 0.9, "eps": 1e-3},
      numbers_as_data(optax.adam)(0.05, 0.5, 0.9, 1e-3),
    ),
    (
      {"name": "adamw", "weight_decay": 0.1},
      numbers_as_data(optax.adamw)(0.05, weight_decay=0.1),
    ),
    ({"name": "sgd"}, optax.sgd(0.05)),
    ({"name": "sgd", "momentum": 0.9}, optax.sgd(0.05, 0.9)),
    (
      {"name": "sgd", "momentum": 0.9, "clip": 0.5},
      optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.05, 0.9)),
    ),
  ],
)
def test_ten_updates_equal_optax(opt, reference):
  numbers, tx, rate = optim.make(lr=0.05, **opt)
  params = {"w": jnp.array([0.5, -2.0]), "b": jnp.array([0.1, 0.2])}
  want, want_state = params, reference.init(params)
  opt_state = tx(numbers).init(params)

  @jax.jit
  def step(params, opt_state, t, numbers):
    grads = jax.grad(loss)(params, t)
    rate_t = rate(numbers, t)
    return optim.apply(tx(numbers), rate_t, grads, params, opt_state)

  for t in range(10):
    params, opt_state, applied, grad_norm = step(params, opt_state, t, numbers)
    grads = jax.grad(loss)(want, t)
    assert applied
    np.testing.assert_allclose(grad_norm, optax.tree.norm(grads), rtol=1e-5)
    updates, want_state = reference.update(grads, want_state, want)
    want = optax.apply_updates(want, updates)
  for name in params:
    np.testing.assert_allclose(params[name], want[name], atol=1e-6)


@pytest.mark.parametrize(
  ("grads", "threshold", "want"),
  [
    ([3.0, 4.0], 1.0, [0.6, 0.8]),
    ([3.0, 4.0], 5.0, [3.0, 4.0]),
    ([0.0, 0.0], 1.0, [0.0, 0.0]),
    ([1e30, 1e30], 1.0, [0.707107, 0.707107]),
    ([-3e38, 3e38], 1.0, [-0.707107, 0.707107]),
    ([3e-30, 4e-30], 1e-30, [0.6e-30, 0.8e-30]),
  ],
)
def test_clipping_by_the_global_norm(grads, threshold, want):
  clip = optim.clip_by_global_norm(threshold)
  for tree in ({"a": jnp.array(grads)}, [jnp.array([g]) for g in grads]):
    clipped, _ = jax.jit(clip.update)(tree, clip.init(tree))
    got = jnp.concatenate(jax.tree.leaves(clipped))
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_the_norm_is_measured_in_float32():
  grads = {"a": jnp.ones(1000), "b": jnp.zeros((0, 3))}
  grads = jax.tree.map(lambda x: x.astype(jnp.bfloat16), grads)
  norm = optim.global_norm(grads)
  assert norm.dtype == jnp.float32
  np.testing.assert_allclose(norm, math.sqrt(1000), rtol=1e-6)
  np.testing.assert_allclose(
    optim.global_norm([jnp.full(2, 1e30)]), math.sqrt(2) * 1e30, rtol=1e-6
  )
  clip = optim.clip_by_global_norm(1.0)
  clipped, _ = clip.update(grads, clip.init(grads))
  assert clipped["a"].dtype == jnp.bfloat16
  assert optim.global_norm({"a": jnp.zeros(3)}) == 0


@pytest.mark.parametrize(
  "size", [1e-36, 1e-30, 2e-12, 5e-12, 1.0, 3e17, 1e18, 1e37]
)
def test_the_norm_is_right_where_its_squares_are_not(size):
  # The sum of 1,000 squares leaves float32 from 6e17 on, and the norm passes
  # the bound below which it is not trusted at 3e-12.
  draws = np.random.default_rng(0).standard_normal((2, 500))
  grads = {"a": jnp.float32(draws[0] * size), "b": jnp.float32(draws[1] * size)}
  want = np.linalg.norm(np.float64(jnp.concatenate([*grads.values()])))
  np.testing.assert_allclose(optim.global_norm(grads), want, rtol=1e-6)
  grads["b"] = grads["b"].at[7].set(jnp.inf)
  assert jnp.isnan(optim.global_norm(grads))
  grads["b"] = grads["b"].at[7].set(jnp.nan)
  assert jnp.isnan(optim.global_norm(grads))


def bits_of(tree):
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def one_update(opt, grads, params=None):
  """Takes a good step, then one with grads: before, after, applied."""
  numbers, tx, rate = optim.make(lr=0.1, **opt)
  tx, rate = tx(numbers), rate(numbers, 0)
  params = params or {"a": jnp.array([1.0, -0.0]), "b": jnp.array([3.0])}
  step = jax.jit(lambda grads, *state: optim.apply(tx, rate, grads, *state))
  good = jax.tree.map(jnp.ones_like, params)
  *before, applied, _ = step(good, params, tx.init(params))
  assert applied
  *after, applied, grad_norm = step(grads, *before)
  return before, after, applied, grad_norm


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
  "opt",
  [
    {},
    {"clip": 1.0},
    {"name": "adamw", "weight_decay": 0.1},
    {"name": "sgd"},
    {"name": "sgd", "momentum": 0.9, "clip": 1.0},
  ],
)
def test_a_gradient_that_is_not_finite_changes_nothing(opt, bad):
  grads = {"a": jnp.array([1.0, bad]), "b": jnp.array([2.0])}
  before, after, applied, grad_norm = one_update(opt, grads)
  assert not applied
  assert not jnp.isfinite(grad_norm)
  assert bits_of(after) == bits_of(before)
  assert jax.tree.structure(after) == jax.tree.structure(before)


def test_huge_gradients_are_clipped_or_refused_never_lost():
  grads = {"a": jnp.full(2, 1e30), "b": jnp.zeros(1)}
  opt = {"name": "sgd", "clip": 1.0}
  before, after, applied, grad_norm = one_update(opt, grads)
  assert applied
  np.testing.assert_allclose(grad_norm, math.sqrt(2) * 1e30, rtol=1e-6)
  np.testing.assert_allclose(
    after[0]["a"], before[0]["a"] - 0.0707107, atol=1e-6
  )
  # Adam's second moment overflows, and its update would be 0 for good.
  before, after, applied, _ = one_update({}, grads)
  assert not applied
  assert bits_of(after) == bits_of(before)
