"""What a run sees, what it refuses, and what it does with NaN."""

import json
import math

import jax
import numpy as np
import pytest
import tiny

from rnnlab import checkpoint, rundir, strict_json, trained
from rnnlab.train import train

CONSTANT = {"opt.schedule": "constant", "opt.warmup": 0}


def inputs(tmp_path, name, **changes):
  """The record of a run, and all the batches it was trained on."""
  seen = []

  def look(i, batch):
    seen.append((i, batch["inputs_BT"].tobytes()))
    return batch

  with pytest.MonkeyPatch.context() as patch:
    tiny.wrap(patch, look)
    record = train(tiny.config(tmp_path, **changes), tmp_path / name)
  return record, seen


def test_every_seed_has_its_own_effect(tmp_path):
  record, batches = inputs(tmp_path, "a")
  assert [i for i, _ in batches] == list(range(20))
  again, same = inputs(tmp_path, "b")
  assert again["fingerprint"] == record["fingerprint"]
  assert tiny.rows(tmp_path / "a") == tiny.rows(tmp_path / "b")
  other, same = inputs(tmp_path, "c", seed=1)
  assert other["fingerprint"] != record["fingerprint"]
  assert same == batches
  other, others = inputs(tmp_path, "e", **{"task.seed": 1})
  assert other["fingerprint"] != record["fingerprint"]
  assert others != batches
  start = {n: tiny.rows(tmp_path / n)[0]["val/nll"] for n in "ace"}
  assert start["a"] == start["e"] != start["c"]


@pytest.mark.parametrize("name", ["seed", "task.seed", "task.split_seed"])
@pytest.mark.parametrize("seed", [2**32, 2**63, -1, "7", True, 1.0])
def test_a_seed_out_of_range_is_refused(tmp_path, name, seed):
  settings = tiny.config(tmp_path, **{name: seed})
  with pytest.raises(ValueError) as error:
    train(settings, tmp_path / "run")
  assert name.replace("task.split_", "").replace("_", " ") in str(error.value)
  assert repr(seed) in str(error.value)
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"train.keep": 0}, "train.keep must be > 0, not 0"),
    ({"train.keep": -1}, "train.keep must be > 0, not -1"),
    ({"train.log_every": 0}, "train.log_every must be > 0"),
    ({"train.steps": 0}, "train.steps must be > 0"),
    ({"train.steps": None}, "train.steps, train.epochs or train.seconds"),
    ({"train.steps": 4}, "opt.warmup must be less than the 4 updates of"),
    ({"train.steps": 2.0}, "train.steps must be of type int"),
    ({"train.step": 9}, "train.step is no setting here"),
    ({"train.seconds": math.nan}, "train.seconds is nan"),
    ({"opt.lr": -1}, "opt.lr must be"),
    ({"opt.steps": 9}, "opt.steps follows from train and cannot be set to 9"),
    ({"model.hidden": 0}, "hidden must be at least 1, not 0"),
    ({"model.cell": {"name": "gru", "hiden": 1}}, "hiden"),
    ({"extra": 1}, "extra"),
  ],
)
def test_a_wrong_setting_is_refused_before_anything_is_written(
  tmp_path, changes, message
):
  with pytest.raises(ValueError, match=message):
    train(tiny.config(tmp_path, **changes), tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_the_test_split_is_not_touched(tmp_path, monkeypatch):
  settings = tiny.config(tmp_path)
  task = tiny.task(settings)
  asked, trained_on = [], set()

  def watched(eval_batches):
    def batches(split, size=None):
      asked.append(split)
      return eval_batches(split, size)

    return batches

  def look(i, batch):
    for ids, mask in zip(batch["targets_BT"], batch["mask_BT"], strict=True):
      trained_on.add(task.vocab.decode(ids[mask][:-1]))
    return batch

  tiny.wrap(monkeypatch, look, eval_batches=watched)
  train(settings, tmp_path / "run")
  assert asked == ["validation"] * 3
  assert trained_on == set(task.texts["train"])
  assert not trained_on & set(task.texts["test"])


def test_without_validation_names_nothing_is_validated(tmp_path, capsys):
  names = "\n".join(tiny.names(5))
  (tmp_path / "names.txt").write_text(names, encoding="utf-8")
  settings = tiny.config(tmp_path, **{"model.cell": {"name": "rnn"}})
  record = train(settings, tmp_path / "run")
  assert record["val/nll"] is None is record["best_step"]
  assert "validation split is empty" in capsys.readouterr().err
  rows = tiny.rows(tmp_path / "run")
  assert [row["step"] for row in rows] == list(range(1, 21))
  assert not any("val/nll" in row for row in rows)


def poison(monkeypatch, factor):
  """Multiplies the loss of update i by factor(i)."""

  def before(i, batch):
    return batch | {"factor": np.float32(factor(i))}

  def change(loss):
    def poisoned(params, carry, batch, key):
      batch = dict(batch)
      factor = batch.pop("factor")
      mean, (carry, sums) = loss(params, carry, batch, key)
      mean = mean.replace(total=mean.total * factor)
      return mean, (carry, sums | {"nll": mean})

    return poisoned

  tiny.wrap(monkeypatch, before, loss=change)


def strict(path):
  def refuse(word):
    raise AssertionError(word)

  for line in path.read_text("utf-8").splitlines():
    yield json.loads(line, parse_constant=refuse)


def test_losses_that_are_not_finite_are_told_and_passed_over(
  tmp_path, monkeypatch
):
  poison(monkeypatch, lambda i: {3: math.nan, 4: math.inf}.get(i, 1))
  record = train(tiny.config(tmp_path), tmp_path / "run")
  assert (record["step"], record["skipped"]) == (20, 2)
  assert math.isfinite(record["val/nll"])
  rows = list(strict(tmp_path / "run" / "metrics.jsonl"))
  for step, word in ((4, "nan"), (5, "inf")):
    row = rows[step]
    assert (row["step"], row["train/nll"]) == (step, None)
    assert row["nonfinite"]["train/nll"] == word
  assert [row.get("skipped") for row in rows[3:7]] == [0, 1, 2, 2]
  read = {row["step"]: row for row in tiny.rows(tmp_path / "run")}
  assert math.isnan(read[4]["train/nll"]) and read[5]["train/nll"] == math.inf
  # The schedule counts the updates that were applied.
  counts = [0, 1, 2, 3, 3, *range(3, 18)]
  rates = list(tiny.rates(tmp_path / "run").values())
  want = [tiny.cosine(count) for count in counts]
  np.testing.assert_allclose(rates, want, rtol=1e-5)


@pytest.mark.parametrize("k", [1, 4])
def test_too_many_in_a_row_end_the_run(tmp_path, k):
  every = {f"train.{n}_every": 4 for n in ("save", "eval")}
  every |= {"train.log_every": k, "train.max_skips": 3}
  settings = tiny.config(tmp_path, **CONSTANT, **every)
  run = tmp_path / "run"
  with pytest.MonkeyPatch.context() as patch:
    poison(patch, lambda i: math.nan if i >= 6 else 1)
    with pytest.raises(ValueError, match="in a row were not finite"):
      train(settings, run)
  rows = list(strict(run / "metrics.jsonl"))
  assert rows[-1]["skipped"] >= 3
  assert rows[-1]["step"] == checkpoint.steps(run / "checkpoints")[-1] < 16
  assert [row["step"] for row in rows] == sorted({r["step"] for r in rows})
  # What is saved is what was learnt before.
  params = trained.load(run, "latest").params
  assert all(np.isfinite(p).all() for p in jax.tree.leaves(params))
  settings = tiny.config(tmp_path, **CONSTANT, **{"train.steps": 6})
  short = train(settings, tmp_path / "short")
  assert checkpoint.fingerprint(params) == short["fingerprint"]
  assert strict_json.loads((run / "config.json").read_text("utf-8"))
  # It goes on from there once the cause is gone.
  settings = tiny.config(tmp_path, **CONSTANT, **every)
  record = train(settings, run)
  assert (record["step"], record["ended"]) == (20, "steps")
  assert record["skipped"] == rows[-1]["skipped"]
  steps = [row["step"] for row in rundir.MetricsLog.read(run / "metrics.jsonl")]
  assert steps == sorted(set(steps))


def test_a_streak_inside_one_call_ends_the_run_too(tmp_path, monkeypatch):
  every = {f"train.{n}_every": 4 for n in ("log", "save", "eval")}
  poison(monkeypatch, lambda i: math.nan if 4 <= i < 7 else 1)
  changes = CONSTANT | every | {"train.max_skips": 3}
  settings = tiny.config(tmp_path, **changes)
  with pytest.raises(ValueError, match="^3 updates in a row"):
    train(settings, tmp_path / "run")
