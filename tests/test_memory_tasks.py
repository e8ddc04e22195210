"""Copying and adding: what a batch holds and what is counted."""

import functools
import itertools
import math

import jax
import numpy as np
import pytest
from conftest import assert_close
from remembering import MODEL, TASKS, drawn, make

from rnnlab import metrics, update


@functools.cache
def ready(name):
  """(task, parameters, run(params, batch) -> mean, grads, sums), compiled."""
  task = make(name)

  @jax.jit
  def run(params, batch):
    def loss(params):
      mean, (carry, sums) = task.loss(params, (), batch, jax.random.key(0))
      assert carry == () and sums == {task.metric: mean}
      return mean.total, mean

    grads, mean = jax.grad(loss, has_aux=True)(params)
    return mean, grads, task.report(params, (), batch)[1]

  return task, drawn(task), run


def whole(task, split="validation"):
  (batch,) = task.eval_batches(split, len(task.texts[split]))
  return batch


def first(task, n=4, start=0):
  return list(itertools.islice(task.train_batches(start), n))


# Batches


def test_copying_reads_symbols_blanks_and_a_go_mark():
  task = make("copying", items=3, lag=4, symbols=5)
  batch = first(task, 1)[0]
  blank, go = 5, 6
  for inputs_T, targets_U in zip(
    batch["inputs_BT"].tolist(), batch["targets_BU"].tolist(), strict=True
  ):
    assert inputs_T == [*targets_U, *4 * [blank], go, blank, blank]
    assert set(targets_U) <= set(range(5))
  every = make("copying", items=3, lag=4, symbols=5, loss="all")
  other = first(every, 1)[0]
  np.testing.assert_array_equal(other["inputs_BT"], batch["inputs_BT"])
  targets_BU = np.pad(
    batch["targets_BU"], ((0, 0), (7, 0)), constant_values=blank
  )
  np.testing.assert_array_equal(other["targets_BU"], targets_BU)
  symbols = np.concatenate([b["targets_BU"].ravel() for b in first(task, 200)])
  # 3,600 draws of 5 symbols: 720 each, with a deviation of 24.
  assert np.all(np.abs(np.bincount(symbols) - 720) < 5 * 24)
  (one,) = first(make("copying", items=1, lag=0), 1)
  assert one["inputs_BT"][:, 1].tolist() == 6 * [go - 1]


@pytest.mark.parametrize("length", [2, 7, 100])
def test_adding_marks_one_value_in_each_half(length):
  task = make("adding", length=length)
  for batch in first(task, 50):
    value_BT, mark_BT = np.moveaxis(batch["inputs_BTD"], -1, 0)
    assert value_BT.min() >= 0 and value_BT.max() < 1
    assert set(np.unique(mark_BT)) <= {0, 1}
    half = length // 2
    assert np.all(mark_BT[:, :half].sum(1) == 1)
    assert np.all(mark_BT[:, half:].sum(1) == 1)
    sums_B = np.sum(value_BT * mark_BT, axis=1)
    np.testing.assert_array_equal(batch["targets_B"], sums_B)
  marks = np.concatenate([b["inputs_BTD"][..., 1] for b in first(task, 500)])
  # Every step is marked, and the first half's as often as the second's.
  assert np.all(marks.sum(0) > 0)


@pytest.mark.parametrize("name", TASKS)
def test_a_batch_is_a_function_of_seed_and_number_alone(name):
  want = first(make(name))
  other = {"validation": 3, "eval_batch_size": 1}
  other["model"] = {"hidden": 3, "layers": 2, "cell": {"name": "rnn"}}
  assert_close(first(make(name, **other)), want, atol=0)
  assert_close(first(make(name), 2, start=2), want[2:], atol=0)
  key = "inputs_BTD" if name == "adding" else "inputs_BT"
  seen = [b[key].tobytes() for b in want]
  seen += [b[key].tobytes() for b in first(make(name, seed=1))]
  assert len(set(seen)) == 8


@pytest.mark.parametrize("name", TASKS)
def test_the_sets_are_fixed_and_streams_of_their_own(name):
  task = make(name, batch_size=20)
  assert {s: len(r) for s, r in task.texts.items()} == {
    "validation": 20,
    "test": 12,
  }
  want = {split: whole(task, split) for split in task.texts}
  again = make(
    name, batch_size=2, eval_batch_size=3, model=MODEL | {"layers": 2}
  )
  for split, batch in want.items():
    parts = list(again.eval_batches(split))
    joined = {k: np.concatenate([p[k] for p in parts]) for k in batch}
    there_B = joined["example_B"]
    assert there_B.tolist() == sorted(there_B, reverse=True)
    assert_close({k: v[there_B] for k, v in joined.items()}, batch, atol=0)
  rows = [*first(task, 1), *want.values()]
  starts = [batch[min(batch.keys() - {"example_B"})][:12] for batch in rows]
  assert len({array.tobytes() for array in starts}) == 3
  assert again.facts == task.facts
  assert make(name, seed=1).facts["sha256"] != task.facts["sha256"]
  longer = whole(make(name, validation=40))
  assert_close(
    {k: v[:20] for k, v in longer.items()}, want["validation"], atol=0
  )


# Losses


@pytest.mark.parametrize("name", ["copying", "copying-all"])
def test_a_target_moves_the_loss_at_its_own_place_alone(name):
  task, params, run = ready(name)
  batch, steps = whole(task), 7 if name == "copying-all" else 2
  assert batch["targets_BU"].shape == (20, steps)
  assert params["out"]["w_VH"].shape == (4 + (name == "copying-all"), 5)
  mean, _, _ = run(params, batch)
  assert int(mean.count) == 20 * steps

  def moved(*places):
    targets_BU = batch["targets_BU"].copy()
    for place in places:
      targets_BU[place] = (targets_BU[place] + 1) % 4
    changed, _, _ = run(params, batch | {"targets_BU": targets_BU})
    assert int(changed.count) == int(mean.count)
    return float(changed.total - mean.total)

  # Every place has a part of its own, and the parts add up to the whole.
  places = list(itertools.product(range(2), range(steps)))
  parts = [moved(place) for place in places]
  assert min(map(abs, parts)) > 1e-3
  assert moved(*places) == pytest.approx(sum(parts), abs=1e-3)


def test_the_recall_reads_all_that_stands_before_it():
  task, params, run = ready("copying")
  batch = whole(task)
  mean, _, _ = run(params, batch)
  for t in range(7):
    inputs_BT = batch["inputs_BT"].copy()
    inputs_BT[:, t] = (inputs_BT[:, t] + 1) % 6
    changed, _, _ = run(params, batch | {"inputs_BT": inputs_BT})
    assert abs(float(changed.total - mean.total)) > 1e-3


def blind(params, constant=0.0):
  """Parameters whose readout is a constant whatever is read."""
  zeros = jax.tree.map(np.zeros_like, params["out"])
  return params | {"out": zeros | {"b_V": zeros["b_V"] + np.float32(constant)}}


def test_memoryless_is_the_loss_of_a_guess():
  task, params, run = ready("copying")
  mean, _, sums = run(blind(params), whole(task))
  assert metrics.to_host(sums)["nll"].value() == pytest.approx(math.log(4))
  assert task.facts["memoryless"] == math.log(4)
  # On all steps: certain of the blanks, a guess among the symbols after them.
  every = make("copying-all", items=3, symbols=8, lag=20)
  targets_BU = whole(every)["targets_BU"]
  logits_BUV = np.full((*targets_BU.shape, 9), -1e9, np.float32)
  logits_BUV[:, :-3, 8] = logits_BUV[:, -3:, :8] = 0
  level = float(metrics.cross_entropy(logits_BUV, targets_BU).mean())
  assert every.facts["memoryless"] == pytest.approx(level, rel=1e-6)
  assert level == pytest.approx(3 * math.log(8) / 26, rel=1e-6)


def test_memoryless_is_the_error_of_the_best_constant():
  task, params, run = ready("adding")
  batch = whole(task)
  _, _, sums = run(blind(params, 1.0), batch)
  error = float(np.square(batch["targets_B"] - 1).mean())
  assert metrics.to_host(sums)["mse"].value() == pytest.approx(error, rel=1e-5)
  sums_B = whole(make("adding", validation=20000))["targets_B"]
  errors = [float(np.square(sums_B - c).mean()) for c in (0.95, 1.0, 1.05)]
  assert task.facts["memoryless"] == 1 / 6
  # (sum - 1)^2 has a standard deviation of .197: five of those of the mean.
  assert errors[1] == pytest.approx(1 / 6, abs=5 * 0.197 / math.sqrt(20000))
  assert errors[1] == min(errors)


def test_the_gradient_of_a_regression_by_hand():
  cell = {"name": "rnn", "recurrent": "identity"}
  task = make("adding", model={"hidden": 1, "cell": cell}, length=2)
  params, batch = drawn(task), first(task, 1)[0]
  (own,), out = params["cells"], params["out"]
  w_D, u, b = own["w_GD"][0], float(own["u_GH"][0, 0]), float(own["b_G"][0])
  v, c = float(out["w_VH"][0, 0]), float(out["b_V"][0])
  total, dv, dc, du = 0.0, 0.0, 0.0, 0.0
  for x_TD, target in zip(batch["inputs_BTD"], batch["targets_B"], strict=True):
    h1 = math.tanh(w_D @ x_TD[0] + b)
    h2 = math.tanh(w_D @ x_TD[1] + u * h1 + b)
    error = v * h2 + c - target
    total, dv, dc = total + error**2, dv + 2 * error * h2, dc + 2 * error
    du += 2 * error * v * (1 - h2**2) * h1

  @jax.jit
  @functools.partial(jax.grad, has_aux=True)
  def grad(params):
    mean, _ = task.loss(params, (), batch, None)
    return mean.total, mean

  grads, mean = grad(params)
  assert (float(mean.total), int(mean.count)) == (pytest.approx(total), 6)
  assert float(grads["out"]["w_VH"][0, 0]) == pytest.approx(dv, rel=1e-4)
  assert float(grads["out"]["b_V"][0]) == pytest.approx(dc, rel=1e-4)
  assert float(grads["cells"][0]["u_GH"][0, 0]) == pytest.approx(du, rel=1e-4)


def test_a_chunked_scan_carries_a_long_lag_in_less_memory():
  def compiled(chunk):
    task = make(
      "copying", lag=600, batch_size=16, model=MODEL | {"chunk": chunk}
    )
    batch = first(task, 1)[0]

    def loss(params):
      return task.loss(params, (), batch, None)[0].total

    grad = jax.jit(jax.grad(loss)).lower(params := drawn(task)).compile()
    return grad(params), grad.memory_analysis().temp_size_in_bytes

  (plain, much), (chunked, little) = compiled(None), compiled(25)
  assert_close(chunked, plain, rtol=1e-4, atol=1e-6)
  assert little < much / 3


# Reports


@pytest.mark.parametrize("name", TASKS)
def test_evaluation_does_not_depend_on_batches_or_padding(name):
  task, params, run = ready(name)
  want = metrics.to_host(run(params, whole(task))[2])
  report = jax.jit(task.report)
  for how in ((7,), (8, 5)):
    batches = task.eval_batches("validation", *how)
    found = update.evaluate(report, params, (), batches)
    assert found.keys() == want.keys()
    for metric, mean in found.items():
      assert mean.count == want[metric].count
      assert mean.total == pytest.approx(want[metric].total, rel=1e-5)
  # The first 5 are 5, whatever the batches.
  parts = list(task.eval_batches("validation", 4, 0, 5))
  there_B = np.concatenate([part["example_B"] for part in parts])
  assert there_B.tolist() == 5 * [True] + 3 * [False]


@pytest.mark.parametrize("name", TASKS)
def test_rows_that_fill_up_a_batch_reach_nothing(name):
  task, params, run = ready(name)
  (batch,) = task.eval_batches("test", 20)
  assert batch["example_B"].tolist() == 12 * [True] + 8 * [False]
  other = {key: array.copy() for key, array in batch.items()}
  for key in batch.keys() - {"example_B"}:
    other[key][12:] = 3
  want, found = run(params, batch), run(params, other)
  assert_close(found, want, atol=0)
  assert int(want[0].count) in (12, 12 * 2, 12 * 7)


@pytest.mark.parametrize("name", ["copying", "copying-all"])
def test_what_is_counted_is_what_samples_show(name):
  task, params, run = ready(name)
  samples = task.generate(params, jax.random.key(0), range(20))
  ids, said = (
    np.array([s[field].split() for s in samples])
    for field in ("target", "prediction")
  )
  right_BU = ids == said
  assert 0 < right_BU.sum() < 40
  # The examples shown, as a batch.
  batch = {"example_B": np.ones(20, bool)}
  batch["inputs_BT"] = np.full((20, 7), 4, np.int32)
  batch["inputs_BT"][:, :2], batch["inputs_BT"][:, 5] = ids.astype(int), 5
  batch["targets_BU"] = np.full((20, 7), 4, np.int32)
  batch["targets_BU"][:, 5:] = ids.astype(int)
  if name == "copying":
    batch["targets_BU"] = batch["targets_BU"][:, 5:]
  sums = metrics.to_host(run(params, batch)[2])
  assert sums["accuracy"] == metrics.Mean(float(right_BU.sum()), 40)
  exact = float(right_BU.all(1).sum())
  assert sums["exact_match"] == metrics.Mean(exact, 20)
  if name == "copying":
    logprob = sum(s["logprob"] for s in samples)
    assert sums["nll"].total == pytest.approx(-logprob, rel=1e-5)


def test_adding_tells_how_many_are_near():
  task, params, run = ready("adding")
  batch = whole(task)
  said = batch["targets_B"][0] + 0.03
  near_B = np.abs(batch["targets_B"] - said) < 0.04
  sums = metrics.to_host(run(blind(params, said), batch)[2])
  assert sums["within_0.04"] == metrics.Mean(float(near_B.sum()), 20)
  assert 1 <= near_B.sum() < 20


# Samples


@pytest.mark.parametrize("name", TASKS)
def test_samples_are_fresh_and_the_first_is_the_first_of_many(name):
  task, params, _ = ready(name)
  bare = make(name, data=False)
  assert bare.facts is None and bare.texts is None
  many = task.generate(params, jax.random.key(0), range(20))
  assert len(many) == 20
  (one,) = bare.generate(params, jax.random.key(1), range(1))
  for field, value in one.items():
    assert value == pytest.approx(many[0][field])
  assert list(many[0])[:3] == ["input", "target", "prediction"]
  if name != "adding":
    assert many[0]["input"] == f"{many[0]['target']}, 3 blanks, go"
    return
  for sample in many:
    one, two = sample["input"].removesuffix(", of 7").split(" + ")
    (x, at), (y, then) = (part.split(" at step ") for part in (one, two))
    assert 0 <= int(at) < 3 <= int(then) < 7
    assert float(x) + float(y) == pytest.approx(sample["target"], abs=1e-3)


@pytest.mark.parametrize("name", TASKS)
def test_an_analysis_reads_what_the_loss_reads(name):
  task, params, _ = ready(name)
  batch = next(iter(task.eval_batches("validation")))
  (read,) = task.recurrences(params, (), batch)
  trace = read.trace()
  there_BT = np.broadcast_to(read.mask_BT, trace.out.shape[:2])
  due = np.sum(np.where(there_BT, read.loss(trace.out), 0))
  _, found = task.report(params, (), batch)
  assert_close(due, found[task.metric].total, atol=0, rtol=1e-5)
  assert due > 0
