"""The loop: when it reports, evaluates, saves and ends, and what it saves."""

import itertools
import math
import time
import types

import jax
import numpy as np
import pytest
import tiny

from rnnlab import checkpoint, program, strict_json, trained
from rnnlab import train as trainer
from rnnlab.metrics import Mean
from rnnlab.train import Plan, train

CONSTANT = {"opt.schedule": "constant", "opt.warmup": 0}


def fingerprint(workdir, which="latest"):
  """That of the parameters of a checkpoint."""
  return checkpoint.fingerprint(trained.load(workdir, which).params)


def script(monkeypatch, losses, seconds=lambda: None):
  """Makes the evaluations of the next run give these losses, in this order."""
  losses = iter(losses)

  def evaluate(*args):
    seconds()
    return {"nll": Mean(float(next(losses)), 1)}

  monkeypatch.setattr(program, "evaluate", evaluate)


def test_a_run_from_beginning_to_end(tmp_path, capsys):
  record = train(tiny.config(tmp_path), tmp_path / "run")
  rows = tiny.rows(tmp_path / "run")
  assert [row["step"] for row in rows] == list(range(21))
  evaluated = [row["step"] for row in rows if "val/nll" in row]
  assert evaluated == [0, 10, 20]
  assert all(("train/nll" in row) == (row["step"] > 0) for row in rows)
  # The row of step s tells of update s - 1, which took the rate of s - 1.
  want = [tiny.cosine(count) for count in range(20)]
  rates = list(tiny.rates(tmp_path / "run").values())
  np.testing.assert_allclose(rates, want, rtol=1e-5)
  assert record["val/nll"] == rows[-1]["val/nll"]
  assert record["ended"] == "steps"
  assert record["skipped"] == 0
  assert record["compilations"] == {"report": 1, "train_steps": 1}
  params = trained.load(tmp_path / "run", "latest").params
  assert record["fingerprint"] == checkpoint.fingerprint(params)
  assert record["parameters"] == sum(p.size for p in jax.tree.leaves(params))
  told = capsys.readouterr().err
  assert "step 20/20" in told and f"{record['val/nll']:.4f}" in told


@pytest.mark.parametrize(
  ("log", "evaluate", "save", "per_call", "k"),
  [
    (7, 10, 4, 16, 1),
    (96, 480, 480, 16, 16),
    (100, 500, 500, 16, 10),
    (12, 24, 18, 16, 6),
    (34, 34, 34, 16, 2),
    (34, 34, 34, 17, 17),
    (5, 5, 5, 1, 1),
  ],
)
def test_the_updates_of_one_call(log, evaluate, save, per_call, k):
  plan = Plan(
    steps=1,
    log_every=log,
    eval_every=evaluate,
    save_every=save,
    steps_per_call=per_call,
  )
  assert plan.updates_per_call == k


@pytest.mark.parametrize(("log", "evaluate", "save"), [(7, 10, 4), (6, 12, 9)])
def test_awkward_intervals(tmp_path, log, evaluate, save):
  steps = 20
  changes = {"log_every": log, "eval_every": evaluate, "save_every": save}
  changes = {f"train.{n}": v for n, v in (changes | {"keep": 99}).items()}
  record = train(tiny.config(tmp_path, **changes), tmp_path / "run")
  multiples = {n: set(range(0, steps + 1, n)) for n in (log, evaluate, save)}
  rows = tiny.rows(tmp_path / "run")
  want = sorted(multiples[log] | multiples[evaluate] | {steps})
  assert [row["step"] for row in rows] == want
  evaluated = {row["step"] for row in rows if "val/nll" in row}
  assert evaluated == multiples[evaluate] | {steps}
  saved = set(checkpoint.steps(tmp_path / "run" / "checkpoints"))
  assert saved >= (multiples[save] | {steps}) - {0}
  assert record["compilations"] == {"report": 1, "train_steps": 1}
  # Whatever is reported and saved when, what is learnt is the same.
  changes = {f"train.{n}_every": 99 for n in ("eval", "save")}
  settings = tiny.config(tmp_path, **changes)
  assert train(settings, tmp_path / "b")["fingerprint"] == record["fingerprint"]
  # A row tells of all updates since the one before, by tokens.
  each = {row["step"]: row for row in tiny.rows(tmp_path / "b")}
  assert len(tiny.rows(tmp_path / "b")) == len(each) == 21
  assert each[20].keys() > {"train/nll", "lr", "val/nll"}
  batches = tiny.task(settings).train_batches(0)
  tokens = [int(b["mask_BT"].sum()) for b in itertools.islice(batches, steps)]
  for before, row in itertools.pairwise(rows):
    span = range(before["step"], row["step"])
    nll = sum(each[i + 1]["train/nll"] * tokens[i] for i in span)
    nll /= sum(tokens[i] for i in span)
    np.testing.assert_allclose(row["train/nll"], nll, rtol=1e-6)
    assert row["lr"] == each[row["step"]]["lr"]


def test_epochs_and_a_cosine_that_steps_by_epoch(tmp_path):
  path = tmp_path / "names.txt"
  path.write_text("\n".join(tiny.names(20)), encoding="utf-8")
  changes = {"opt.unit": "epoch", "opt.warmup": 0, "opt.lr": 1e-3}
  settings = tiny.config(tmp_path, **changes, **{"train.epochs": 10})
  settings["train"]["steps"] = None
  record = train(settings, tmp_path / "run")
  assert (record["step"], record["ended"]) == (20, "steps")
  table = [1e-3, 9.7553e-4, 9.0451e-4, 7.9389e-4, 6.5451e-4, 5e-4, 3.4549e-4]
  table += [2.0611e-4, 9.5492e-5, 2.4472e-5]
  rates = list(tiny.rates(tmp_path / "run").values())
  np.testing.assert_allclose(rates, np.repeat(table, 2), atol=1e-8)


@pytest.mark.parametrize("k", [1, 4])
def test_what_is_saved_is_what_the_run_was_then(tmp_path, k):
  # A checkpoint at n, and the end of a run of n updates, are the same.
  every = {f"train.{n}_every": k for n in ("log", "save", "eval")}
  settings = tiny.config(tmp_path, **CONSTANT, **every, **{"train.keep": 99})
  train(settings, tmp_path / "long")
  assert checkpoint.steps(tmp_path / "long/checkpoints")[0] == k
  for n in (4, 12):
    settings = tiny.config(tmp_path, **CONSTANT, **every, **{"train.steps": n})
    short = train(settings, tmp_path / f"short{n}")
    assert fingerprint(tmp_path / "long", n) == short["fingerprint"]
    # The rows are those of that time too.
    rows = tiny.rows(tmp_path / f"short{n}")
    assert tiny.rows(tmp_path / "long")[: len(rows)] == rows


@pytest.mark.parametrize("keep", [1, 2])
def test_the_best_and_the_latest_are_both_kept(tmp_path, monkeypatch, keep):
  changes = {"train.eval_every": 1, "train.save_every": 1, "train.keep": keep}
  settings = tiny.config(tmp_path, **CONSTANT, **changes, **{"train.steps": 5})
  script(monkeypatch, [9.0, 0.5, 0.6, 0.5, 0.8, 0.9])
  record = train(settings, tmp_path / "run")
  # The first evaluation is before training, and of two equal the earlier wins.
  assert (record["best/val/nll"], record["best_step"]) == (0.5, 1)
  kept = checkpoint.steps(tmp_path / "run" / "checkpoints")
  assert kept == ([1, 5] if keep == 1 else [1, 4, 5])
  assert trained.load(tmp_path / "run", "best").step == 1
  assert fingerprint(tmp_path / "run") == record["fingerprint"]
  settings = tiny.config(tmp_path, **CONSTANT, **{"train.steps": 1})
  script(monkeypatch, [9.0, 0.5])
  one = train(settings, tmp_path / "one")["fingerprint"]
  assert fingerprint(tmp_path / "run", "best") == one


@pytest.mark.parametrize(
  ("losses", "ended", "step", "best"),
  [
    ([0.1, 0.5, 0.4, 0.4, 0.3, 0.3, 0.5], "patience", 6, 4),
    ([0.1, math.nan, 0.4, math.nan, 0.3, 0.2, 0.1, 0.3], "steps", 7, 6),
    ([0.1, math.inf, math.nan], "patience", 2, None),
  ],
)
def test_patience(tmp_path, monkeypatch, losses, ended, step, best):
  changes = {"train.eval_every": 1, "train.patience": 2, "train.steps": 7}
  changes |= CONSTANT
  script(monkeypatch, losses)
  record = train(tiny.config(tmp_path, **changes), tmp_path / "run")
  assert (record["ended"], record["step"]) == (ended, step)
  assert record["best_step"] == best
  again = train(tiny.config(tmp_path, **changes), tmp_path / "run")
  again["compilations"] = record["compilations"]
  assert strict_json.dumps(again) == strict_json.dumps(record)  # nan too


@pytest.fixture
def clock(monkeypatch):
  """A clock that only the test moves, by updates and evaluations."""
  clock = types.SimpleNamespace(now=1000.0, update=1.0, evaluation=5.0)
  fake = types.SimpleNamespace(monotonic=lambda: clock.now)
  monkeypatch.setattr(trainer, "time", fake)

  call = trainer.Run._call

  def tick(loop):
    clock.now += clock.update
    return call(loop)

  def evaluated():
    clock.now += clock.evaluation

  monkeypatch.setattr(trainer.Run, "_call", tick)
  script(monkeypatch, itertools.repeat(1.0), evaluated)
  return clock


@pytest.mark.parametrize(
  ("slow", "steps"), [(1.0, None), (1.4, None), (1.0, 40)]
)
def test_a_budget_of_seconds(tmp_path, clock, slow, steps):
  changes = {"train.steps": steps, "train.seconds": 120, "train.save_every": 50}
  settings = tiny.config(tmp_path, **changes, **{"train.eval_every": 50})
  # The process had begun ten seconds before, and it is to end in time.
  end = clock.now - 10 + 120
  clock_at, call = {}, trainer.Run._call

  def look(loop):
    clock.evaluation = 5 * (slow if loop.step > 50 else 1)
    clock_at[loop.step] = (clock.now - end + 120) / 120
    return call(loop)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(trainer.Run, "_call", look)
    record = train(settings, tmp_path / "run", clock.now - 10)
  assert record["ended"] == ("steps" if steps == 40 else "seconds")
  assert clock.now <= end
  assert steps == 40 or clock.now > end - 12
  assert tiny.rows(tmp_path / "run")[-1]["val/nll"] == 1
  told = [row["step"] for row in tiny.rows(tmp_path / "run")]
  assert told == list(range(record["step"] + 1))
  # The rate follows what is ahead, the clock or the count.
  rates = tiny.rates(tmp_path / "run")
  for count, share in clock_at.items():
    if count >= 4:
      share = max(share, count / (steps or 1e9))
      first = 4 * share / count
      want = 0.005 * (1 + math.cos(math.pi * (share - first) / (1 - first)))
      np.testing.assert_allclose(rates[count + 1], want, rtol=1e-4)


def test_the_budget_is_that_of_all_processes_together(tmp_path, clock):
  changes = {"train.steps": None, "train.seconds": 100}
  settings = tiny.config(tmp_path, **changes)
  tiny.kill(settings, tmp_path / "run", 33)
  clock.now += 5000
  record = train(settings, tmp_path / "run")
  # What came after the last checkpoint, at 30, is done and paid again.
  assert 70 < record["seconds"] <= 100
  np.testing.assert_allclose(record["seconds"], clock.now - 6000 - 3)


def test_a_budget_that_the_start_uses_up(tmp_path, clock):
  changes = {"train.steps": None, "train.seconds": 9}
  with pytest.raises(ValueError, match="train.seconds=9 leaves no time"):
    train(tiny.config(tmp_path, **changes), tmp_path / "run", clock.now - 8)


@pytest.mark.slow
def test_a_budget_by_the_real_clock(tmp_path):
  changes = {"train.steps": None, "train.seconds": 8, "train.log_every": 50}
  changes |= {"train.eval_every": 50, "train.save_every": 100}
  started = time.monotonic()
  record = train(tiny.config(tmp_path, **changes), tmp_path / "run", started)
  assert time.monotonic() - started < 8.5
  assert (record["ended"], record["step"] > 50) == ("seconds", True)
  assert tiny.rows(tmp_path / "run")[-1]["val/nll"] == record["val/nll"]
