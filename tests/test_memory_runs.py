"""Copying and adding as runs: killed, told, swept, and by the commands."""

import math
import runpy

import commands
import jax
import numpy as np
import pytest
import tiny
from remembering import config, make
from test_scripts import ROOT, record

from rnnlab import rundir, sweep, tasks, trained, update
from rnnlab.train import train


def without_speed(rows):
  return [
    {k: v for k, v in row.items() if not k.endswith("/s")} for row in rows
  ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["copying", "adding"])
def test_a_run_that_was_killed_goes_on_to_the_same_bits(name, tmp_path):
  settings, metric = config(name), make(name).metric
  straight = train(settings, tmp_path / "straight")
  tiny.kill(settings, tmp_path / "killed", 7)
  record = train(settings, tmp_path / "killed")
  assert record["fingerprint"] == straight["fingerprint"]
  rows = tiny.rows(tmp_path / "straight")
  assert without_speed(tiny.rows(tmp_path / "killed")) == without_speed(rows)
  assert {f"train/{metric}", f"{make(name).unit}/s"} <= rows[-1].keys()
  values = {
    row["step"]: row[f"val/{metric}"] for row in rows if f"val/{metric}" in row
  }
  assert record[f"val/{metric}"] == values[20] == rows[-1][f"val/{metric}"]
  del values[0]
  assert record[f"best/val/{metric}"] == min(values.values())
  assert record["best_step"] == min(values, key=values.get)
  assert record["data"]["memoryless"] == make(name).facts["memoryless"]
  _, facts = rundir.load(tmp_path / "killed")
  assert facts["vocabulary"] is None and facts["data"] == record["data"]
  run = trained.load(tmp_path / "killed")
  assert run.step == record["best_step"]
  sums = update.evaluate(
    run.task.report, run.params, (), run.task.eval_batches("validation")
  )
  assert sums[metric].value() == pytest.approx(record[f"best/val/{metric}"])


def test_a_regression_is_told_by_its_own_measure(tmp_path):
  record = train(config("adding"), tmp_path)
  rows = tiny.rows(tmp_path)
  assert {"train/mse", "val/mse", "val/within_0.04", "sums/s"} <= rows[
    -1
  ].keys()
  assert not any("nll" in name for name in record.keys() | rows[-1].keys())
  errors = {row["step"]: row["val/mse"] for row in rows if "val/mse" in row}
  assert list(errors) == [0, 8, 16, 20] and record["val/mse"] == errors[20]
  del errors[0]
  assert record["best_step"] == min(errors, key=errors.get)
  assert trained.load(tmp_path).step == record["best_step"]
  for field, was, now in (("seed", 0, 1), ("test", 12, 13)):
    with pytest.raises(ValueError, match=f"task.{field} was {was}, now {now}"):
      train(config("adding", **{f"task.{field}": now}), tmp_path)


@pytest.mark.slow
def test_it_learns_what_it_can_remember(tmp_path):
  changes = {"task.items": 1, "task.lag": 4, "task.validation": 64}
  changes |= {
    "train.steps": 150,
    "train.eval_every": 150,
    "train.log_every": 50,
  }
  changes |= {"train.save_every": 150, "opt.lr": 0.03, "model.hidden": 16}
  changes |= {"task.batch_size": 32}
  record = train(config("copying", **changes), tmp_path)
  assert record["val/nll"] < 0.1 < record["data"]["memoryless"]


@pytest.mark.parametrize(
  "name, changes, words",
  [
    ("copying", {"task.items": 0}, "task.items must be at least 1, not 0"),
    ("copying", {"task.lag": -1}, "task.lag must be at least 0, not -1"),
    ("copying", {"task.symbols": 1}, "task.symbols must be at least 2, not 1"),
    (
      "copying",
      {"task.loss": "some"},
      "task.loss is 'recall' or 'all'.*'some'",
    ),
    ("copying", {"task.length": 5}, "task.length is no setting"),
    ("adding", {"task.length": 1}, "task.length must be at least 2, not 1"),
    ("adding", {"task.validation": 0}, "task.validation must be at least 1"),
    ("adding", {"task.test": -4}, "task.test must be at least 1, not -4"),
    ("adding", {"task.batch_size": 0}, "task.batch_size must be at least 1"),
    ("adding", {"task.eval_batch_size": 0}, "task.eval_batch_size must be"),
    ("adding", {"task.seed": -1}, "task.seed is -1"),
    ("adding", {"model.outputs": 3}, "model.outputs is no setting"),
    ("adding", {"model.chunk": 0}, "model.chunk must be at least 1, not 0"),
    ("adding", {"train.epochs": 3}, "train.epochs=3.*no end"),
    ("adding", {"opt.unit": "epoch"}, "steps_per_epoch.*an int.*epoch"),
  ],
)
def test_what_is_wrong_is_refused_by_name(name, changes, words, tmp_path):
  with pytest.raises(ValueError, match=words):
    train(config(name, **changes), tmp_path / "run")
  assert not (tmp_path / "run").exists()


# The experiments of configs/memory.py


def memory():
  return runpy.run_path(str(ROOT / "configs" / "memory.py"))


@pytest.mark.parametrize("arg, lag", [("copying", "lag"), ("adding", "length")])
def test_the_sweeps_match_gates_to_the_lag(arg, lag):
  base = memory()["get_config"](arg)
  points = sweep.points(memory()["sweep"], arg, base.lock())
  settings = {}
  for point in points:
    task, cell = point.config["task"], point.config["model"]["cell"]
    assert task["name"] == arg and task["seed"] == base.task.seed
    keep = {k: v for k, v in cell["keep"].items() if v is not None}
    kind, value = keep.pop("kind"), *keep.values()
    if kind != "constant":
      assert value == task[lag]
    key = cell["name"], cell["reset"], kind, value
    settings.setdefault(key, []).append(point.config["seed"])
    # All of it is taken by the code, and all runs see the same examples.
    assert tasks.make(**task, model=point.config["model"]).texts
  assert len(settings) == 12
  assert all(seeds == [0, 1, 2] for seeds in settings.values())
  with pytest.raises(ValueError, match="no sweep 'bogus', only copying, addi"):
    memory()["sweep"](None, "bogus")


@pytest.mark.parametrize(
  "keep",
  [{"kind": "half_life", "steps": 69.0}, {"kind": "chrono", "t_max": 50.0}],
)
def test_another_start_of_the_gates_is_set_beside_the_default(keep):
  config = memory()["get_config"]().lock()
  config.model.hidden = 8
  config.model.cell.keep.update(keep)
  task = tasks.make(**config.task.to_dict(), model=config.model.to_dict())
  (own,) = task.init(jax.random.key(0))["cells"]
  f_H = np.asarray(own["b_G"]).reshape(4, -1)[1]
  if keep["kind"] == "half_life":
    np.testing.assert_allclose(f_H, 4.5952, atol=1e-3)
  else:
    assert 0 <= f_H.min() < f_H.max() < math.log(49)


# The commands


def called(name, tmp_path, *calls):
  """What came of `scripts/<call>` on a run of this task."""
  train(config(name), tmp_path / "run")
  run = f"--workdir={tmp_path}/run"
  return [
    commands.run(f"scripts/{call[0]}.py", run, *call[1:]) for call in calls
  ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["copying", "adding"])
def test_evaluate_and_sample(name, tmp_path):
  evaluated, sampled = called(
    name,
    tmp_path,
    ("evaluate", "--split=test", "--extra_padding=3"),
    ("sample", "--n=3"),
  )
  told, best = record(evaluated), trained.load(tmp_path / "run")
  sums = update.evaluate(
    best.task.report, best.params, (), best.task.eval_batches("test")
  )
  for measure, mean in sums.items():
    assert told[measure] == pytest.approx(mean.value(), rel=1e-5)
  assert told["memoryless"] == best.task.facts["memoryless"]
  assert told[best.task.unit] == sums[best.task.metric].count
  assert told["examples"] == 12 and "in_train" not in told
  for field in ("ppl", "exact_match/interval"):
    assert (field in told) == (name == "copying")
  shown = record(sampled)["samples"]
  for sample, want in zip(
    shown, best.task.generate(best.params, None, range(3)), strict=True
  ):
    assert sample == {k: pytest.approx(v) for k, v in want.items()}
    assert sample["input"] in sampled.stdout.decode()


@pytest.mark.slow
def test_what_means_nothing_is_refused_in_one_line(tmp_path):
  wrong = {
    ("evaluate", "--split=train"): "without end: --split=validation or test",
    ("evaluate", "--figure=x.png"): "no tables by length",
    ("sample", "--prefix=a"): "needs --n alone: --prefix means nothing",
    ("sample", "--sources=a,b"): "needs --n alone: --sources means nothing",
    ("sample", "--seed=1"): "needs --n alone: --seed means nothing",
    ("sample", "--temperature=2"): "sample.temperature is no setting",
    ("sample", "--figure=x.png"): "nothing here attends",
  }
  refused = called("copying", tmp_path, *wrong)
  for done, words in zip(refused, wrong.values(), strict=True):
    error = done.stderr.decode()
    assert done.returncode == 1 and not done.stdout
    assert error.count("\n") == 1 and words in error
