"""Compiled updates: what moves, what must not, and exact evaluation."""

import collections
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from rnnlab import metrics, optim
from rnnlab.metrics import Mean
from rnnlab.tasks import Task
from rnnlab.update import Counted, evaluate, init_state, make_train_steps

STOP = np.int32(2**31 - 1)
CLOCK = np.float32(0)


def toy():
  """(w - t)^2 a token; the carry counts the batches it has seen."""

  def loss(params, carry, batch, key):
    noise = Mean(jax.random.uniform(key), 1)
    mean = Mean.of((params["w"] - batch["t_BT"]) ** 2, batch["mask_BT"])
    return mean, (carry + 1, {"nll": mean, "noise": noise})

  blank = Task(*[None] * len(Task._fields))
  return blank._replace(
    init=lambda key: {"w": jnp.zeros(())},
    carry=lambda params: jnp.int32(0),
    loss=loss,
  )


def toy_batches(*batches):
  """Batches of one row of 4 tokens each; the None are padding."""
  t_KBT = np.array([[[0 if t is None else t for t in b]] for b in batches])
  mask_KBT = np.array([[[t is not None for t in b]] for b in batches])
  return {"t_BT": t_KBT.astype(np.float32), "mask_BT": mask_KBT}


def start(task, seed=0, **opt):
  """(train_steps, the state it starts from, the optimiser)."""
  optimizer = optim.make(**{"lr": 0.01} | opt)
  init = jax.jit(functools.partial(init_state, task, optimizer))
  state = init(jax.random.key(seed))
  steps = jax.jit(make_train_steps(task, optimizer))

  def train_steps(*args):
    return steps(*args, optimizer.numbers)

  return train_steps, state, optimizer


def lm(tmp_path, **changes):
  return tiny.task(tiny.config(tmp_path, **changes))


def stacked(batches):
  return jax.tree.map(lambda *rows: np.stack(rows), *batches)


def first(task, n):
  return list(itertools.islice(task.train_batches(0), n))


def bits_of(tree):
  """The bytes of every leaf, without the key of a run."""
  leaves = jax.tree.leaves(tree)
  keys = jax.dtypes.prng_key
  leaves = [leaf for leaf in leaves if not jnp.issubdtype(leaf.dtype, keys)]
  return [np.asarray(leaf).tobytes() for leaf in leaves]


def test_one_batch_is_learnt_by_heart(tmp_path):
  # Of 4 names with 4 first letters, nothing but that letter is uncertain.
  names = ["abcabc", "bcdeed", "caaaab", "dededc", "eabdca"]
  (tmp_path / "names.txt").write_text("\n".join(names), encoding="utf-8")
  task = lm(tmp_path, **{"task.batch_size": 4, "model.dropout": 0.0})
  assert task.per_epoch == 1
  train_steps, state, _ = start(task, lr=0.03)
  batches_K = stacked(first(task, 1) * 50)
  for _ in range(6):
    state, updates = train_steps(state, batches_K, STOP, CLOCK)
  last = jax.tree.map(lambda sums_K: sums_K[-1], updates.metrics)
  assert last["nll"].count == 4 * 7
  floor = math.log(4) / 7
  assert floor - 1e-4 <= last["nll"].value() < floor + 0.01


def test_the_gradient_is_that_of_the_mean_over_tokens():
  # Of each row's mean, and of those the mean, it would be -5.
  train_steps, state, _ = start(toy(), name="sgd", lr=1.0)
  batch = toy_batches([4.0, None, None, None], [1.0, 1.0, 1.0, None])
  batch = jax.tree.map(lambda x_KBT: x_KBT.reshape(1, 2, 4), batch)
  new, updates = train_steps(state, batch, STOP, CLOCK)
  np.testing.assert_allclose(new.params["w"], 3.5)
  np.testing.assert_allclose(updates.grad_norm_K, [3.5])


def test_k_updates_in_one_call_are_k_calls_of_one(tmp_path):
  task = lm(tmp_path)
  opt = {"schedule": "cosine", "warmup": 4, "steps": 20, "clip": 1.0}
  train_steps, state, _ = start(task, **opt)
  batches, states, single = first(task, 6), [state], []
  for batch in batches:
    state, update = train_steps(states[-1], stacked([batch]), STOP, CLOCK)
    states.append(state)
    single.append(update)
  at_once, updates = train_steps(states[0], stacked(batches), STOP, CLOCK)
  assert bits_of(at_once) == bits_of(states[6])
  single = jax.tree.map(lambda *parts: jnp.concatenate(parts), *single)
  assert bits_of(updates) == bits_of(single)

  # Past the stop nothing is done and nothing is told.
  stopped, updates = train_steps(
    states[0], stacked(batches), np.int32(4), CLOCK
  )
  assert bits_of(stopped) == bits_of(states[4])
  assert stopped.step == 4
  assert updates.done_K.tolist() == [True] * 4 + [False] * 2
  tokens = [int(batch["mask_BT"].sum()) for batch in batches[:4]] + [0, 0]
  assert updates.metrics["nll"].count.tolist() == tokens


@pytest.mark.parametrize(
  "opt",
  [
    {},
    {"name": "adamw", "weight_decay": 0.1},
    {"name": "sgd", "momentum": 0.9},
  ],
)
def test_a_batch_with_nothing_supervised_moves_nothing(opt):
  train_steps, state, _ = start(toy(), **opt)
  good = toy_batches([1.0, 2.0, None, None])
  state, _ = train_steps(state, good, STOP, CLOCK)
  empty = toy_batches([None] * 4)
  new, updates = train_steps(state, empty, STOP, CLOCK)
  for part in ("params", "opt_state", "carry"):
    assert bits_of(getattr(new, part)) == bits_of(getattr(state, part))
  assert (updates.metrics["nll"].total, updates.metrics["nll"].count) == (0, 0)
  assert updates.grad_norm_K == 0
  assert (new.step, new.skipped, new.streak) == (2, 1, 0)


def test_every_update_of_every_seed_has_a_key_of_its_own():
  draws = []
  for seed in (0, 1):
    train_steps, state, _ = start(toy(), seed)
    batches = toy_batches(*[[1.0] * 4] * 3)
    _, updates = train_steps(state, batches, STOP, CLOCK)
    draws += updates.metrics["noise"].total.tolist()
  assert len(set(draws)) == 6


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_update_that_is_not_finite_is_refused_whole_and_counted(bad):
  opt = {"schedule": "cosine", "warmup": 4, "steps": 12, "clip": 1.0, "lr": 1}
  train_steps, state, _ = start(toy(), **opt)
  good, poison = [1.0, 2.0, None, None], [1.0, bad, 2.0, None]
  batches = [good, good, poison, poison, good, poison, good]
  states, updates = [state], []
  for batch in batches:
    state, update = train_steps(states[-1], toy_batches(batch), STOP, CLOCK)
    states.append(state)
    updates.append(update)
  for i in (2, 3, 5):
    for part in ("params", "opt_state", "carry"):
      old, new = (getattr(states[j], part) for j in (i, i + 1))
      assert bits_of(old) == bits_of(new)
  assert [int(s.skipped) for s in states] == [0, 0, 0, 1, 2, 2, 3, 3]
  assert [int(s.streak) for s in states] == [0, 0, 0, 1, 2, 0, 1, 0]
  assert [int(s.carry) for s in states] == [0, 1, 2, 2, 2, 3, 3, 4]
  assert [int(s.step) for s in states] == list(range(8))
  # The schedule counts what was applied.
  rates = [float(update.rate_K[0]) for update in updates]
  assert rates == [0, 0.25, 0.5, 0.5, 0.5, 0.75, 0.75]
  finite = [bool(jnp.isfinite(u.metrics["nll"].total[0])) for u in updates]
  assert finite == [batch is good for batch in batches]
  # As if the refused ones had never been.
  want, _ = train_steps(states[0], toy_batches(*[good] * 4), STOP, CLOCK)
  for part in ("params", "opt_state", "carry"):
    assert bits_of(getattr(want, part)) == bits_of(getattr(state, part))


def test_the_rate_that_is_told_is_the_one_that_was_used():
  opt = {"name": "sgd", "lr": 1.0, "schedule": "cosine", "warmup": 4}
  train_steps, state, _ = start(toy(), **opt, steps=12)
  want = [0, 0.25, 0.5, 0.75, 1, 0.961940, 0.853553, 0.691342, 0.5]
  want += [0.308658, 0.146447, 0.038060, 0]
  told, used = [], []
  for _ in range(13):
    # A mean error of 1 has the gradient 2 * (w - t) = 1 at t = w - 1/2.
    t = float(state.params["w"]) - 0.5
    new, updates = train_steps(state, toy_batches([t] * 4), STOP, CLOCK)
    used.append(float(state.params["w"] - new.params["w"]))
    told.append(float(updates.rate_K[0]))
    state = new
  np.testing.assert_allclose(told, want, atol=1e-6)
  np.testing.assert_allclose(used, want, atol=1e-5)


def test_the_clock_moves_the_rate_where_it_is_ahead():
  opt = {"lr": 1.0, "schedule": "cosine", "steps": 100, "budget": True}
  train_steps, state, _ = start(toy(), **opt)
  batches = toy_batches(*[[1.0] * 4] * 3)
  for clock, want in ((0.0, [1, 0.999753, 0.999013]), (0.5, [0.5] * 3)):
    _, updates = train_steps(state, batches, STOP, np.float32(clock))
    np.testing.assert_allclose(updates.rate_K, want, atol=1e-6)


def padded(batch, columns):
  """The batch with padding columns, whose contents are arbitrary."""
  wide = {}
  for name, x_BT in batch.items():
    fill = False if name == "mask_BT" else 3
    pads = ((0, 0), (0, columns))
    wide[name] = np.pad(x_BT, pads, constant_values=fill)
  return wide


def test_evaluation_depends_on_neither_batching_nor_padding(tmp_path):
  task = lm(tmp_path)
  report = jax.jit(task.report)
  params = task.init(jax.random.key(1))

  # Each name alone, of its own length, added in float64.
  total, count = 0.0, 0
  for row in task.eval_batches("train", 1):
    n = int(row["mask_BT"].sum())
    short = jax.tree.map(lambda x_BT, n=n: x_BT[:, :n], row)
    total += float(report(params, (), short)[1]["nll"].total)
    count += n

  for size, columns in [(1, 0), (8, 0), (64, 0), (8, 7)]:
    batches = (padded(b, columns) for b in task.eval_batches("train", size))
    sums = evaluate(report, params, task.carry(params), batches)
    assert sums["nll"].count == count
    np.testing.assert_allclose(sums["nll"].total, total, rtol=1e-6)


def test_sums_are_added_in_float64_and_nothing_to_add_is_no_zero():
  def report(params, carry, batch):
    del params
    return carry + 1, {"nll": Mean(jnp.float32(batch), carry)}

  sums = evaluate(report, None, 1, [2.0**24, 1.0, 1.0])
  assert (sums["nll"].total, sums["nll"].count) == (2.0**24 + 2, 1 + 2 + 3)
  sums = evaluate(lambda *args: (0, {"nll": Mean(0.0, 0)}), None, 0, [0.0])
  with pytest.raises(ValueError, match="val/nll"):
    sums["nll"].value("val/nll")


def test_the_notebook_average_of_a_real_report_is_too_high(tmp_path):
  task = lm(tmp_path)
  report, params = jax.jit(task.report), task.init(jax.random.key(0))
  n = len(task.texts["train"])
  exact, printed = [], []
  for size in (5, 10, 20):
    sums = [
      metrics.to_host(report(params, (), batch)[1]["nll"])
      for batch in task.eval_batches("train", size)
    ]
    assert len(sums) == -(-n // size)
    means = [mean.value() for mean in sums]
    printed.append(metrics.notebook_average(means, n, size))
    assert printed[-1] == sum(means) / (n // size)
    exact.append(sum(sums[1:], sums[0]).value())
  np.testing.assert_allclose(exact, exact[0], rtol=1e-6)
  assert exact[0] < printed[0] < printed[1] < printed[2]
  # The short last batch weighs as a whole one, but is not divided by.
  np.testing.assert_allclose(printed[2], exact[0] * 3 / 2, rtol=0.03)


def test_how_often_it_compiles(tmp_path):
  tasks = [
    lm(tmp_path, **{"model.cell": {"name": "gru", "keep": keep}})
    for keep in (
      {"kind": "constant", "value": 0.0},
      {"kind": "constant", "value": 2.0},
      {"kind": "chrono", "t_max": 9.0},
    )
  ]
  counts = collections.Counter()
  optimizer = optim.make(lr=0.01)
  train_steps = Counted(
    "steps", make_train_steps(tasks[0], optimizer), counts, donate_argnums=0
  )
  report = Counted("report", tasks[0].report, counts)
  # Seeds and the start of the gates are spent in init.
  for seed, task in enumerate(tasks):
    state = init_state(task, optimizer, jax.random.key(seed))
    for stop in (2, 4, 5):
      batches_K = stacked(first(task, 2))
      state, _ = train_steps(
        state, batches_K, np.int32(stop), CLOCK, optimizer.numbers
      )
    assert state.step == 5
    sums = evaluate(report, state.params, (), task.eval_batches("train"))
    assert sums["nll"].count > 0
  assert counts == {"steps": 1, "report": 1}
