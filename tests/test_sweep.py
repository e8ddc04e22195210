"""Sweeps: every point its own run, whatever becomes of the others."""

import csv
import inspect
import json
import math
import os
import pathlib
import re
import runpy

import commands
import numpy as np
import pytest

from rnnlab import rundir, sweep

ROOT = pathlib.Path(__file__).parents[1]
REVERSAL = ROOT / "configs" / "name_reversal.py"


def small(config, path):
  config.task.update(path=path, split="shuffle", batch_size=8)
  config.model.update(embed=4, hidden=6)
  config.model.cell.name = "rnn"
  config.opt.warmup = 0
  config.train.update(
    epochs=None, steps=24, log_every=8, eval_every=8, save_every=8, max_skips=3
  )
  return config


NLL = "val/nll"


class Killed(BaseException):
  """Ends a sweep as a kill would: nothing handles it."""


@pytest.fixture(scope="module")
def names(tmp_path_factory):
  rng, found = np.random.default_rng(0), {}
  while len(found) < 48:
    found["".join(rng.choice(list("abcde"), rng.integers(1, 5)))] = None
  path = tmp_path_factory.mktemp("data") / "names.txt"
  path.write_text("\n".join(found) + "\n", encoding="utf-8")
  return str(path)


def config(arg=None):
  config = runpy.run_path(str(REVERSAL))["get_config"](arg)
  config.lock()
  return config


def points(settings, base=None):
  """The points of a sweep that adds these settings, one after another."""

  def listed(add, arg):
    for point in settings:
      add(point)

  return sweep.points(listed, None, base or config())


@pytest.fixture(scope="module")
def four(names):
  """Two points that work, one refused at its start, one that diverges."""
  off = {"task.length_handling": False, "task.source_mask": False}
  settings = [{"seed": 0}, {"opt.lr": -1.0}, {"seed": 1, **off}]
  settings += [{"opt.lr": 3e38}]
  return points(settings, small(config(), names))


@pytest.fixture(scope="module")
def killed(four, tmp_path_factory):
  """(workdir, its rows and files after a kill, the rows of the second try)."""
  workdir = tmp_path_factory.mktemp("sweep")
  train, started = sweep.train.train, []

  def dies_at_the_third(config, workdir, *rest):
    started.append(workdir)
    if len(started) == 3:
      raise Killed
    return train(config, workdir, *rest)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sweep.train, "train", dies_at_the_third)
    with pytest.raises(Killed):
      sweep.run(four, workdir, [3], together=1)
  before = read(workdir), files(workdir / "seed=0")
  return workdir, *before, sweep.run(four, workdir, [3])


def read(workdir):
  with open(workdir / "sweep.csv", encoding="utf-8", newline="") as file:
    return list(csv.DictReader(file))


def files(folder):
  """What tells of updates: the log and the saved steps, with their times."""
  log = rundir.MetricsLog.read(folder / "metrics.jsonl")
  saved = (folder / "checkpoints").glob("**/*")
  return log, {p: p.stat().st_mtime_ns for p in saved if p.is_file()}


@pytest.mark.slow
def test_one_failure_does_not_stop_the_rest(killed):
  *_, rows = killed
  assert [r["status"] for r in rows] == ["done", "failed", "done", "failed"]
  assert rows[1]["error"].startswith("ValueError: opt.lr")
  assert "not finite" in rows[3]["error"]
  assert all(r["steps"] == 24 and not r["error"] for r in rows[::2])


@pytest.mark.slow
def test_a_killed_sweep_runs_only_what_is_missing(killed):
  workdir, early, (log, saved), rows = killed
  assert [r["status"] for r in early] == ["done", "failed", *2 * ["waiting"]]
  assert saved and files(workdir / "seed=0") == (log, saved)
  assert float(early[0]["val/nll"]) == rows[0]["val/nll"]
  assert float(early[0]["seconds"]) == rows[0]["seconds"]


@pytest.mark.slow
def test_the_table_equals_the_run_files(four, killed):
  workdir, *_, rows = killed
  table = read(workdir)
  assert len(table) == 4
  assert len({row["point"] for row in table}) == 4
  for point, row, told in zip(four, rows, table, strict=True):
    assert {name: str(v) for name, v in row.items()} == {
      name: v for name, v in told.items() if name in row
    }
    assert {told[name] for name in told.keys() - row.keys()} <= {""}
    if row["status"] == "failed":
      continue
    config, _ = rundir.load(workdir / row["point"])
    assert config == point.config
    log = rundir.MetricsLog.read(workdir / row["point"] / "metrics.jsonl")
    (best,) = (r for r in log if r["step"] == row["best_step"])
    metrics = {n: v for n, v in best.items() if n.startswith("val/")}
    assert metrics == {name: row[name] for name in metrics}
    assert "val/exact_match" in metrics


@pytest.mark.slow
def test_points_in_another_order_give_the_same_numbers(four, killed, tmp_path):
  *_, rows = killed
  again = sweep.run([four[2], four[0]], tmp_path, [3])
  assert len({row["val/nll"] for row in again}) == 2
  for row, other in zip(again, [rows[2], rows[0]], strict=True):
    assert row | {"seconds": 0} == other | {"seconds": 0}


@pytest.mark.slow
def test_extra_padding_is_evaluated_and_the_worst_is_told(killed, tmp_path):
  *_, (masked, _, off, _) = killed
  near = pytest.approx(masked["val/nll"], abs=1e-5)
  assert masked["val/nll/padding=3"] == near
  assert masked["val/exact_match/worst"] == masked["val/exact_match"]
  assert abs(off["val/nll/padding=3"] - off["val/nll"]) > 1e-3
  assert off["val/exact_match/worst"] == min(
    off["val/exact_match"], off["val/exact_match/padding=3"]
  )
  with pytest.raises(ValueError, match="at least 0, not -1"):
    sweep.run([], tmp_path, [-1])


def test_one_sweep_at_a_time(tmp_path):
  with rundir.RunDir(tmp_path) as held:
    held.acquire()
    with pytest.raises(ValueError, match=f"process {os.getpid()}"):
      sweep.run([], tmp_path)


# Points


@pytest.mark.parametrize(
  "settings, words",
  [
    ({"task.zz": 1}, "'task.zz', which is no setting"),
    ({"seed.x": 1}, "'seed.x', which is no setting"),
    ({"nothing.x": 1}, "'nothing.x', which is no setting"),
    ({"task": {"seed": 1}}, "'task', which is no setting"),
    ({"seed": 1.0}, "seed to 1.0, float, where it takes int"),
    ({"seed": True}, "seed to True, bool, where it takes int"),
    ({"opt.lr": True}, "opt.lr to True, bool, where it takes float"),
    ({"opt.lr": "1"}, "opt.lr to '1', str, where it takes float"),
    ({"train.steps": 2.5}, "train.steps to 2.5, float, where it takes int"),
    ({"task.loss_mask": 0}, "loss_mask to 0, int, where it takes bool"),
    ({"task.noise": 3}, "task.noise to 3, int, where it takes str"),
    ({"opt.lr": math.nan}, "opt.lr: lr is nan"),
  ],
)
def test_a_wrong_setting_is_named(settings, words):
  with pytest.raises(ValueError, match=words.replace(".", r"\.")):
    points([{"seed": 3}, settings])


def test_a_point_is_all_settings_and_those_that_vary():
  base = config()
  listed = points(
    [{"opt.lr": 1}, {"seed": np.int64(2), "opt.clip": None}, {}], base
  )
  assert [point.settings for point in listed] == [
    {"opt.lr": 1.0, "seed": 0, "opt.clip": 1.0},
    {"opt.lr": 0.004, "seed": 2, "opt.clip": None},
    {"opt.lr": 0.004, "seed": 0, "opt.clip": 1.0},
  ]
  assert type(listed[0].config["opt"]["lr"]) is float
  assert listed[2].config == base.to_dict() == config().to_dict()


def test_a_directory_is_named_by_its_own_settings():
  values = [-1, 0, 1, 1.0000001]
  field = "model.cell.keep.value"
  grid = [{field: v, "seed": s} for v in values for s in (0, 1)]
  found = [point.name for point in points(grid)]
  assert found[0] == "model.cell.keep.value=-1.0,seed=0"
  assert len(set(found)) == 8
  turned = [dict(reversed(g.items())) for g in reversed(grid)]
  more = points([{"opt.lr": 1.0}, *turned])
  assert [point.name for point in more][:0:-1] == found
  wild = points([{"task.path": text} for text in ("a b", "a/b", "é" * 300)])
  assert len({point.name for point in wild}) == 3
  assert all(p.name.isascii() and len(p.name) < 200 for p in wild)
  assert not any(set("/ ") & set(point.name) for point in wild)


def test_the_same_run_twice_is_refused():
  for twice in (
    [{"opt.lr": 1, "seed": 4}, {"seed": 4, "opt.lr": 1.0}],
    [{}, {"seed": 0}],
    [{}, {}],
  ):
    with pytest.raises(ValueError, match="one run twice: .* and "):
      points(twice)
  with pytest.raises(ValueError, match="no points"):
    points([])


@pytest.mark.parametrize("arg, n", [("masks", 24), ("context", 12)])
def test_the_sweeps_of_name_reversal(arg, n):
  listed = runpy.run_path(str(REVERSAL))["sweep"]
  found = sweep.points(listed, arg, config(arg))
  assert len(found) == n and "task.seed" not in found[0].settings
  base = config("notebook" if arg == "masks" else "fixed").to_dict()
  assert any(point.config == base for point in found) == (arg == "masks")
  with pytest.raises(ValueError, match="no sweep 'bogus'"):
    listed(print, "bogus")


# The table


def row(lr, seed, nll, exact=None, status="done"):
  found = {"opt.lr": lr, "seed": seed, "status": status, "metric": NLL}
  found |= {} if nll is None else {"val/nll": nll}
  return found | ({} if exact is None else {"val/exact_match": exact})


def test_means_and_intervals():
  values = [0.5, 0.6, 0.9]
  mean, half = sweep.interval(values)
  assert mean == pytest.approx(2 / 3)
  spread = math.sqrt(sum((v - 2 / 3) ** 2 for v in values) / 2)
  assert half == pytest.approx(4.303 * spread / math.sqrt(3))
  assert sweep.interval([2.0]) == (2.0, None)
  assert sweep.interval([2.0, 2.0]) == (2.0, 0.0)
  assert math.isnan(sweep.interval([2.0, math.inf])[1])


@pytest.mark.parametrize("df", range(1, len(sweep.T_95) + 1))
def test_students_t_holds_95_percent(df):
  edge = sweep.T_95[df - 1]
  x, dx = np.linspace(0, edge, 100_001, retstep=True)
  scale = math.lgamma((df + 1) / 2) - math.lgamma(df / 2)
  density = math.exp(scale) / math.sqrt(df * math.pi)
  density *= (1 + x**2 / df) ** (-(df + 1) / 2)
  inside = 2 * dx * (density.sum() - (density[0] + density[-1]) / 2)
  assert inside == pytest.approx(0.95, abs=5e-5)


def test_the_best_comes_first_and_failures_last():
  rows = [
    row(0.1, 0, None, status="failed"),
    row(0.2, 0, 1.0, 0.0),
    row(0.3, 0, 0.9, 0.0),
    row(0.4, 0, 2.0, 0.5),
    row(0.4, 1, None, status="failed"),
    row(0.5, 0, math.nan, 0.0),
    row(0.3, 1, 0.7, 0.0),
  ]
  table = sweep.summary(rows, ["opt.lr", "seed"])
  assert [r["opt.lr"] for r in table] == [0.4, 0.3, 0.2, 0.5, 0.1]
  assert [r["points"] for r in table[:3]] == [2, 2, 1]
  assert [r["failed"] for r in table[:3]] == [1, 0, 0]
  assert table[1]["val/nll"] == pytest.approx(0.8)
  assert table[1]["val/nll/interval"] == pytest.approx(12.706 * 0.1)
  text = sweep.text(table)
  assert text[0] == ["opt.lr", "points", "failed", sweep.EXACT, NLL]
  assert text[2] == ["0.3", "2", "0", "0.0000 ±0.0000", "0.8000 ±1.2706"]
  assert ["0.1", "1", "1", "", ""] in text
  # A task whose report knows of nll alone.
  bare = sweep.summary([row(1, 0, 3.0), row(2, 0, 2.0)], ["opt.lr"])
  assert [r["opt.lr"] for r in bare] == [2, 1]
  assert sweep.text(bare)[0] == ["opt.lr", "points", "failed", NLL]


# The command


@pytest.mark.slow
def test_the_command_on_a_language_model(names, tmp_path):
  experiment = tmp_path / "experiment.py"
  experiment.write_text(
    f"import runpy\n{inspect.getsource(small)}\n"
    "def get_config(arg=None):\n"
    f"  base = runpy.run_path({str(ROOT / 'configs' / 'name_lm.py')!r})\n"
    f"  return small(base['get_config'](), {names!r})\n"
    "def sweep(add, arg):\n"
    "  for lr in (0.01, -1.0):\n"
    "    add({'opt.lr': lr, 'train.keep': int(arg)})\n",
    encoding="utf-8",
  )

  def command(*flags):
    where = f"--config={experiment}:2", f"--workdir={tmp_path / 'sweep'}"
    done = commands.run("scripts/sweep.py", *where, *flags)
    done.stdout, done.stderr = done.stdout.decode(), done.stderr.decode()
    return done

  for flags, words in [
    (["--config.opt.lr=1.0"], "the sweep varies opt.lr"),
    (["--extra_padding=-1"], "whole numbers"),
  ]:
    refused = command(*flags)
    assert refused.returncode == 1 and words in refused.stderr
    assert not (tmp_path / "sweep").exists() and not refused.stdout
  done = command("--config.train.steps=8", "--extra_padding=2")
  assert done.returncode == 1, done.stderr
  record = json.loads(done.stdout.splitlines()[-1])
  assert (record["points"], record["failed"]) == (2, 1)
  # With a shape of its own for the batches that are padded further.
  assert record["compilations"] == [{"train_steps": 1, "report": 2}]
  first, last = record["table"]
  assert first["opt.lr"] == 0.01 and first["val/nll"] > 0
  assert last["failed"] == 1 and "val/nll" not in last
  assert "failed: opt.lr=-1.0,train.keep=2  ValueError: opt.lr" in done.stdout
  # The two run at once where there are two cores, so either may end first.
  ended = "[12] of 2 done  opt.lr=-1.0,train.keep=2: failed: V"
  assert len(re.findall(f"^{ended}", done.stderr, re.MULTILINE)) == 1
  assert "\n2 of 2 done  " in done.stderr
  assert (tmp_path / "sweep" / "sweep.png").exists()
  good, bad = read(tmp_path / "sweep")
  assert good["steps"] == "8" and float(good["val/nll/padding=2"]) > 0
  assert bad["status"] == "failed" and bad["val/nll"] == ""
