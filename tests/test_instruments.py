"""What is measured of a run: at the start, now, and by command."""

import json
import math

import commands
import jax
import numpy as np
import pytest
import tiny
from conftest import assert_close
from test_scripts import record

from rnnlab import instruments, train, trained
from rnnlab.instruments import fixed_points
from rnnlab.instruments.sensitivity import power_of_ten

STEPS = {"train.steps": 4, "train.eval_every": 4, "train.save_every": 4}
KEPT = {"kind": "half_life", "steps": 20.0}
CELL = {"model.cell": {"name": "lstm", "keep": KEPT}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """(workdir of a run of 4 updates that moved nothing, the run)."""
  folder = tmp_path_factory.mktemp("instruments")
  still = {"opt.lr": 1e-30, "opt.name": "sgd", "opt.warmup": 0}
  changes = STEPS | CELL | still | {"seed": 3}
  train.train(tiny.config(folder, **changes), folder / "run")
  return folder / "run", trained.load(folder / "run")


def test_the_first_parameters_of_a_run_are_found_again(run):
  _, loaded = run
  assert loaded.step == 4
  assert_close(loaded.initial(), loaded.params, atol=1e-28)
  assert np.ptp(jax.tree.leaves(loaded.initial())[0]) > 0.1


def test_retention_tells_the_start_and_now(run, tmp_path):
  _, loaded = run
  moved = loaded.params["cells"][0]
  moved = moved | {"b_G": moved["b_G"] + 2.0, "w_GD": 0 * moved["w_GD"]}
  moved["u_GH"] = 0 * moved["u_GH"]
  loaded = loaded._replace(params=loaded.params | {"cells": (moved,)})
  reading = instruments.read("retention", loaded)
  (table,) = reading.tables
  assert [row[:2] for row in table[1:]] == [
    [f"stack/0/{gate}", step]
    for gate in ("input", "keep", "output")
    for step in (0, 4)
  ]
  start, now = reading.record["stack/0/keep"]
  assert start["step"] == 0 and now["step"] == 4
  tokens = sum(len(text) + 1 for text in loaded.task.texts["validation"])
  assert start["steps"] == now["steps"] == tokens
  assert 10 < start["half-life 5%"] < start["median"] < start["95%"] < 40
  # Inputs and states gone, the bias alone is left: all units are the same.
  keep = math.log(0.5 ** (1 / 20) / (1 - 0.5 ** (1 / 20))) + 2
  wanted = math.log(2) / math.log1p(math.exp(-keep))
  assert now["half-life 5%"] == pytest.approx(wanted, rel=1e-4)
  assert now["95%"] == pytest.approx(wanted, rel=1e-4)
  few = instruments.read("retention", loaded, "train", first=2)
  steps = few.record["stack/0/keep"][0]["steps"]
  assert steps == sum(len(t) + 1 for t in loaded.task.texts["train"][:2])
  path = reading.draw(tmp_path / "new" / "r.png")
  assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_sensitivity_by_distance(run, tmp_path):
  _, loaded = run
  reading = instruments.read("sensitivity", loaded, "train", first=5)
  overview, table = reading.tables
  found = reading.record["stack"]
  assert overview[1][0] == "stack" and overview[1][-1] == ""  # it has gates
  lengths = sorted(len(t) + 1 for t in loaded.task.texts["train"][:5])
  assert found["steps"] == lengths[2]
  assert found["distance"][-1] <= lengths[-1] < 9
  assert [row[0] for row in table[1:]] == found["distance"]
  log10 = found["log10"]
  assert list(log10) == table[0][1:]
  assert log10["gradient"][0] == 0
  for product, bound in zip(log10["product"], log10["bound"], strict=True):
    assert product <= bound + 1e-3
  terms = [found[term] for term in ("direct", "gate", "candidate")]
  assert sum(terms) == pytest.approx(1, abs=0.1)  # medians, each its own row's
  assert reading.draw(tmp_path / "s.png").stat().st_size > 10_000


@pytest.mark.slow
def test_slow_points_of_a_run(run, tmp_path):
  _, loaded = run
  reading = instruments.read("fixed_points", loaded, first=4)
  found = reading.record["stack"]
  shown = min(found["points"], fixed_points.SHOWN)
  assert len(found["speed"]) == len(reading.tables[0]) - 1 == shown
  assert found["speed"] == sorted(found["speed"])
  assert sum(found["starts"]) <= 64
  assert reading.draw(tmp_path / "f.png").stat().st_size > 10_000


@pytest.mark.slow
def test_the_truncated_gradient_of_a_run(run, tmp_path):
  _, loaded = run
  reading = instruments.read("truncation", loaded, first=4)
  (table,) = reading.tables
  start, now = reading.record["stack"]
  assert (start["step"], now["step"]) == (0, 4)
  steps = max(len(text) + 1 for text in names_of(loaded))
  assert len(now["cosine"]) == steps
  for shown in (start, now):
    assert shown["cosine"][-1] == pytest.approx(1, abs=1e-5)
    assert shown["bias"][-1] < 1e-5 < shown["bias"][0]
    assert shown["norm"][-1] == pytest.approx(1, abs=1e-5)
  assert table[1] == ["K=1", 0, *(start[w][0] for w in table[0][2:])]
  assert table[-1][0] == f"K={steps}"
  assert reading.draw(tmp_path / "t.png").stat().st_size > 10_000


def names_of(loaded):
  return [text for texts in loaded.task.texts.values() for text in texts]


@pytest.mark.parametrize(
  "log10, text",
  [
    (-0.5, "3.16e-01"),
    (0.0, "1.00e+00"),
    (430.3, "2.00e+430"),
    (-431.0, "1.00e-431"),
    (2.999999, "1.00e+03"),
    (-math.inf, "0"),
    (math.nan, "nan"),
  ],
)
def test_numbers_that_have_no_float_are_written(log10, text):
  assert power_of_ten(log10) == text


def test_what_cannot_be_measured_is_said(run):
  _, loaded = run
  with pytest.raises(ValueError, match="retention.*not 'retension'"):
    instruments.read("retension", loaded)
  task = loaded.task._replace(recurrences=None)
  with pytest.raises(ValueError, match="task does not say which recurrences"):
    instruments.read("retention", loaded._replace(task=task))
  task = loaded.task._replace(texts={"test": []})
  with pytest.raises(ValueError, match="test split holds no examples"):
    instruments.read("retention", loaded._replace(task=task), "test")
  settings = {"embed": 4, "hidden": 3, "cell": {"name": "rnn"}}
  bare = tiny.config(run[0].parent) | {"model": settings}
  task = tiny.task(bare)
  params = task.init(jax.random.key(0))
  bare = trained.Trained(task, params, 0, [], lambda: params)
  with pytest.raises(ValueError, match="no cell of this run has a gate"):
    instruments.read("retention", bare)


@pytest.mark.slow
def test_the_command_prints_tables_and_draws(run, tmp_path):
  workdir, loaded = run
  base = "scripts/analyze.py", f"--workdir={workdir}", "--first=3"
  one = commands.run(*base, "--what=retention", f"--figure={tmp_path}/r.png")
  found = record(one)
  assert found["step"] == 4 and found["split"] == "validation"
  expected = instruments.read("retention", loaded, first=3).record
  assert found["retention"] == json.loads(json.dumps(expected))
  assert (tmp_path / "r.png").exists()
  assert len(one.stdout.splitlines()) == 1 + 6 + 1
  bad = commands.run(*base, "--what=retension")
  assert bad.returncode == 1 and b"retension" in bad.stderr


# The command on a model that reads more than its task declares.
LEAKY = f"""
import runpy
from rnnlab import wiring
from rnnlab.tasks import name_lm
name_lm.CAUSAL = wiring.Context(0, 0)
runpy.run_path({str(commands.ROOT / "scripts/analyze.py")!r}, None, "__main__")
"""


def test_a_leak_is_the_commands_exit_status(run, tmp_path):
  (tmp_path / "analyze.py").write_text(LEAKY, encoding="utf-8")
  flags = f"--workdir={run[0]}", "--what=context"
  leaky = commands.run(tmp_path / "analyze.py", *flags)
  assert leaky.returncode == 1, leaky.stderr
  (told,) = json.loads(leaky.stdout.splitlines()[-1])["failed"]
  assert "output 1 reads input 0" in told and told.encode() in leaky.stdout
  assert commands.run("scripts/analyze.py", *flags).returncode == 0


@pytest.mark.exhaustive
def test_the_command_measures_all_there_is(run, tmp_path):
  base = "scripts/analyze.py", f"--workdir={run[0]}", "--first=3"
  everything = commands.run(*base, "--what=all", f"--figure={tmp_path}/all")
  assert set(record(everything)) == {*instruments.ALL, "step", "split"}
  drawn = {path.name for path in (tmp_path / "all").iterdir()}
  assert drawn == {f"{what}.png" for what in instruments.ALL}
