"""Several batches in one update, and the average over updates."""

import jax
import numpy as np
import pytest
import tiny
from conftest import assert_close
from test_update import CLOCK, STOP, lm, stacked, start, toy, toy_batches

from rnnlab import trained
from rnnlab.train import train
from rnnlab.update import accumulating

nan = float("nan")


def joined(*updates):
  """Updates of batches of one row of tokens, as `accumulating` lays them."""
  batches = [toy_batches(*batches) for batches in updates]
  return jax.tree.map(
    lambda *x: np.stack([np.moveaxis(y, 0, 1) for y in x]), *batches
  )


def several(n):
  return toy()._replace(accumulated=n)


def test_the_gradient_weighs_every_token_alike():
  # One token with the target 4, then three with 1: -3.5, where the mean of
  # both means would be -5.
  batches = joined([[4, None, None, None], [1, 1, 1, None]])
  task = several(2)
  steps, state, _ = start(task, name="sgd", lr=1.0)
  state, updates = steps(state, batches, STOP, CLOCK)
  assert float(state.params["w"]) == 3.5 == float(updates.grad_norm_K[0])
  assert (int(state.step), int(state.carry)) == (1, 2)
  nll = updates.metrics["nll"]
  assert (float(nll.total[0]), int(nll.count[0])) == (16 + 3, 4)


def test_a_window_with_a_nan_is_dropped_whole():
  clean = [[1, 2, None, None]] * 3
  batches = joined(clean, [clean[0], [nan] * 4, clean[0]], clean)
  steps, state, _ = start(several(3), average=0.5)
  one, _ = steps(state, jax.tree.map(lambda x: x[:1], batches), STOP, CLOCK)
  two, updates = steps(
    state, jax.tree.map(lambda x: x[:2], batches), STOP, CLOCK
  )
  for part in ("params", "opt_state", "carry", "average"):
    assert_close(getattr(two, part), getattr(one, part), atol=0)
  assert (int(two.step), int(two.skipped), int(two.streak)) == (2, 1, 1)
  assert not np.isnan(updates.metrics["nll"].total[0])
  three, _ = steps(two, jax.tree.map(lambda x: x[2:], batches), STOP, CLOCK)
  assert (int(three.carry), int(three.streak)) == (6, 0)
  assert float(three.params["w"]) != float(two.params["w"])
  # Nothing to learn from in one of the batches is no reason to drop the rest.
  some = joined([[None] * 4, [2, None, None, None], [None] * 4])
  state, updates = steps(three, some, STOP, CLOCK)
  assert int(state.skipped) == 1 and int(updates.metrics["nll"].count[0]) == 1


def test_accumulated_batches_are_one_large_one(tmp_path):
  small = lm(tmp_path, **{"model.dropout": 0.0, "task.batch_size": 4})
  task = accumulating(small, 3)
  batch = next(task.train_batches(1))
  three = [b for _, b in zip(range(3), small.train_batches(3), strict=False)]
  for name, array in batch.items():
    assert array.shape[:2] == (4, 3)
    for i, own in enumerate(three):
      np.testing.assert_array_equal(array[:, i], own[name])
  large = {k: np.concatenate([b[k] for b in three]) for k in three[0]}
  found = []
  for each, batches in ((task, [batch]), (small, [large])):
    steps, state, _ = start(each, name="sgd", lr=1.0)
    state, updates = steps(state, stacked(batches), STOP, CLOCK)
    found.append((state.params, updates.metrics, updates.grad_norm_K))
  assert_close(*found, atol=1e-6, rtol=1e-6)
  assert task.per_epoch == small.per_epoch / 3
  assert accumulating(small, 1) is small


def test_windows_that_do_not_come_out_are_refused(tmp_path):
  task = lm(tmp_path, **{"task.batch_size": 4})  # 12 an epoch
  assert accumulating(task, 5).per_epoch is None
  with pytest.raises(ValueError, match="accumulate=5 does not divide the 12"):
    accumulating(task, 5, epochs=2)
  with pytest.raises(ValueError, match="train.accumulate must be > 0, not 0"):
    train(tiny.config(tmp_path, **{"train.accumulate": 0}), tmp_path / "run")
  mixed = task._replace(
    train_batches=lambda start: iter([{"x": np.zeros(2)}, {"x": np.zeros(3)}])
  )
  with pytest.raises(ValueError, match="accumulate=2 needs batches of one sh"):
    next(accumulating(mixed, 2).train_batches(0))


def test_what_the_average_is():
  steps, state, _ = start(toy(), name="sgd", lr=0.25, average=0.6)
  batches = toy_batches([4] * 4, [nan] * 4, [0] * 4, [1] * 4)
  w, mean = 0.0, 0.0
  for k, target in enumerate([4, None, 0, 1]):
    batch = jax.tree.map(lambda x, k=k: x[k : k + 1], batches)
    state, _ = steps(state, batch, STOP, CLOCK)
    if target is not None:
      done = k - (k > 1)
      w -= 0.25 * 2 * (w - target)
      decay = min(0.6, (1 + done) / (10 + done))
      mean = decay * mean + (1 - decay) * w
    assert float(state.params["w"]) == pytest.approx(w)
    assert float(state.average["w"]) == pytest.approx(mean)
  assert start(toy())[1].average == ()


CHANGES = {
  "opt.average": 0.9,
  "opt.schedule": "constant",
  "train.accumulate": 2,
  "train.eval_every": 20,
}


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
  folder = tmp_path_factory.mktemp("averaged")
  return train(tiny.config(folder, **CHANGES), folder / "run"), folder / "run"


def test_the_average_is_evaluated_kept_and_read(averaged, tmp_path):
  record, workdir = averaged
  loaded = {
    w: trained.load(workdir, "latest", weights=w) for w in trained.WEIGHTS
  }
  task = loaded["raw"].task
  report, nll = jax.jit(task.report), {}
  for name, run in loaded.items():
    sums = [
      report(run.params, (), b)[1]["nll"]
      for b in task.eval_batches("validation")
    ]
    nll[name] = sum(float(s.total) for s in sums) / sum(
      int(s.count) for s in sums
    )
  assert record["val/nll"] == pytest.approx(nll["average"], rel=1e-6)
  assert abs(nll["raw"] - nll["average"]) > 1e-4
  assert_close(
    trained.load(workdir, "latest").params, loaded["average"].params, atol=0
  )
  settings = tiny.config(tmp_path, **CHANGES | {"train.evaluate": "raw"})
  again = train(settings, tmp_path / "run")
  assert again["val/nll"] == pytest.approx(nll["raw"], rel=1e-6)
  assert_close(
    trained.load(tmp_path / "run").params, loaded["raw"].params, atol=0
  )


def test_a_run_goes_on_with_its_average(averaged, tmp_path):
  settings = tiny.config(tmp_path, **CHANGES)
  tiny.kill(settings, tmp_path / "run", 7)
  assert (
    train(settings, tmp_path / "run")["fingerprint"]
    == averaged[0]["fingerprint"]
  )
  assert tiny.rows(tmp_path / "run") == tiny.rows(averaged[1])
  other = tiny.config(tmp_path, **CHANGES | {"train.accumulate": 1})
  with pytest.raises(ValueError, match="train.accumulate was 2, now 1"):
    train(other, tmp_path / "run")


def test_no_average_where_none_is_kept(tmp_path):
  for changes, words in (
    ({"train.evaluate": "average"}, "needs opt.average, which is not set"),
    ({"train.evaluate": "both"}, "'raw' or 'average', not 'both'"),
    ({"opt.average": 1.0}, r"opt.average must be in \[0, 1\)"),
  ):
    with pytest.raises(ValueError, match=words):
      train(tiny.config(tmp_path, **changes), tmp_path / "run")
  config = {"opt": {}, "train": {"steps": 1}}
  with pytest.raises(ValueError, match="keeps no average"):
    trained._part("run", config, "average")
