"""What a run directory promises: its values, its lock, resume, metrics."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from rnnlab import rundir, strict_json
from rnnlab.rundir import MetricsLog, RunDir

CONFIG = {
  "seed": 0,
  "task": {"name": "name_lm", "path": None},
  "model": {"hidden": 8, "dims": (4, 5), "rate": 1.0, "empty": {}, "one": ()},
  "opt": {"lr": 1e-3},
  "train": {"steps": 20, "eval_every": 5, "steps_per_call": 4},
}
FACTS = {
  "symbols": ("<pad>", "<start>", *"abcdefghijklmnopqrst"),
  "sha256": "0a1b",
  "versions": {"python": "3.11.7"},
}


def changed(tree, name, value):
  head, _, rest = name.partition(".")
  return {**tree, head: changed(tree[head], rest, value) if rest else value}


def start(workdir, config=CONFIG, facts=FACTS):
  """A run that has begun: its log is there."""
  with rundir.claim(workdir, config, facts) as run:
    run.metrics.touch()
    return run


def strict(text):
  def refuse(word):
    raise ValueError(word)

  return json.loads(text, parse_constant=refuse)


# Values


def alike(a, b):
  if isinstance(a, dict):
    return list(a) == list(b) and all(alike(a[k], b[k]) for k in a)
  if isinstance(a, tuple | list):
    return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
  return type(a) is type(b) and (a == b or a != a and b != b)


def test_values_come_back_as_they_were():
  value = {
    "int": 1,
    "float": 1.0,
    "small": 1e-300,
    "bool": True,
    "none": None,
    "text": 'naïve "Zoë"\n\u2028',
    "tuple": (4,),
    "nested": ((1, 2.0), (), {"deep": [1, (2,)]}),
    "list": [1, [2]],
    "empty": {},
    "odd": (math.nan, math.inf, -math.inf),
  }
  text = strict_json.dumps(value)
  strict(text)
  assert alike(strict_json.loads(text), value)
  assert alike(strict_json.loads(strict_json.dumps(value, indent=1)), value)


@pytest.mark.parametrize(
  ("scalar", "plain"),
  [
    (np.int64(3), 3),
    (np.float64(0.5), 0.5),
    (np.float32(0.5), 0.5),
    (np.bool_(True), True),
    (np.str_("a"), "a"),
  ],
)
def test_numpy_scalars_become_plain(scalar, plain):
  assert alike(
    strict_json.loads(strict_json.dumps({"x": scalar})), {"x": plain}
  )
  assert alike(strict_json.settle({"x": scalar}, "here"), {"x": plain})


@pytest.mark.parametrize("value", [np.zeros(2), {1, 2}, b"x", len, {1: 2}])
def test_what_json_cannot_keep_is_refused(value):
  with pytest.raises(ValueError):
    strict_json.dumps({"x": value})
  with pytest.raises(ValueError, match=r"here: "):
    strict_json.settle({"x": value}, "here")


def test_loads_is_strict():
  with pytest.raises(ValueError, match="NaN"):
    strict_json.loads('{"x": NaN}')


def test_settle_makes_tuples_and_keeps_the_rest():
  config = {"m": {"dims": [4, [5]], "rate": 1.0}, "flag": True, "name": None}
  assert alike(
    strict_json.settle(config, "here"),
    {"m": {"dims": (4, (5,)), "rate": 1.0}, "flag": True, "name": None},
  )


@pytest.mark.parametrize(
  ("config", "message"),
  [
    ({"opt": {"lr": math.nan}}, "here: opt.lr is nan"),
    ({"opt": {"lr": -math.inf}}, "here: opt.lr is -inf"),
    ({"opt": {"lr": np.float32(np.inf)}}, "here: opt.lr is inf"),
    ({"dims": (1, [2.0, math.nan])}, r"here: dims\[1\]\[1\] is nan"),
    ({"a": {"b": object}}, "here: a.b is .*, a type; a setting is"),
    ({"a": {"b.c": 1}}, "here: 'b.c' cannot name a field of 'a'"),
  ],
)
def test_settle_names_the_field(config, message):
  with pytest.raises(ValueError, match=message):
    strict_json.settle(config, "here")


# The directory


def test_a_new_run_writes_what_reloads_equal(tmp_path):
  run = start(tmp_path / "runs" / "zoë x")
  for path in (run.config, run.facts):
    strict(path.read_text())
  config, facts = rundir.load(tmp_path / "runs" / "zoë x")
  assert alike(config, CONFIG) and alike(facts, FACTS)
  assert not run.changes.exists()
  run.metrics.unlink()
  assert sorted(os.listdir(run.path)) == ["config.json", "facts.json", "lock"]


def test_what_failed_before_it_began_binds_nobody(tmp_path):
  with rundir.claim(tmp_path, CONFIG, FACTS):
    pass
  other = changed(CONFIG, "seed", 1)
  with rundir.claim(tmp_path, other, FACTS) as run:
    assert alike(rundir.load(tmp_path)[0], other)
  assert not run.changes.exists()


def test_resume_with_the_same_changes_nothing(tmp_path):
  run = start(tmp_path)
  before = run.config.stat().st_mtime_ns
  start(tmp_path)
  assert run.config.stat().st_mtime_ns == before
  assert not run.changes.exists()


@pytest.mark.parametrize(
  ("name", "old", "new"),
  [
    ("train.steps", 20, 40),
    ("train.eval_every", 5, 7),
    ("train.steps_per_call", 4, 1),
    ("task.path", None, "elsewhere.txt"),
  ],
)
def test_what_may_change_is_recorded(tmp_path, name, old, new):
  run = start(tmp_path)
  config = changed(CONFIG, name, new)
  start(tmp_path, config)
  start(tmp_path, config)  # no change, no line
  assert alike(rundir.load(tmp_path)[0], config)
  (line,) = run.changes.read_text().splitlines()
  row = strict_json.loads(line)
  assert (row["field"], row["old"], row["new"]) == (name, old, new)
  assert row["time"].endswith("+00:00")
  start(tmp_path, CONFIG)
  assert len(run.changes.read_text().splitlines()) == 2


def test_another_library_version_is_recorded(tmp_path):
  start(tmp_path)
  start(tmp_path, facts=changed(FACTS, "versions.python", "3.12.1"))
  assert "versions.python" in RunDir(tmp_path).changes.read_text()
  assert rundir.load(tmp_path)[1]["versions"]["python"] == "3.12.1"


def test_every_other_difference_is_listed_and_refused(tmp_path):
  run = start(tmp_path)
  config = changed(CONFIG, "model.hidden", 16)
  config = changed(config, "model.rate", 1)
  config = changed(config, "model.bias", True)
  config = changed(config, "train.steps", 40)
  del config["opt"]
  with pytest.raises(ValueError) as error:
    start(tmp_path, config)
  for words in (
    "model.hidden was 8, now 16",
    "model.rate was 1.0, now 1",
    "model.bias was nothing, now True",
    "opt.lr was 0.001, now nothing",
  ):
    assert words in str(error.value)
  assert "train.steps" not in str(error.value)
  assert alike(rundir.load(tmp_path), (CONFIG, FACTS))
  assert not run.changes.exists()


def test_another_vocabulary_is_refused_by_content(tmp_path):
  start(tmp_path)
  symbols = list(FACTS["symbols"])
  symbols[7], symbols[9] = symbols[9], symbols[7]
  with pytest.raises(ValueError, match=r"symbols\[7\] was 'f', now 'h'"):
    start(tmp_path, facts={**FACTS, "symbols": tuple(symbols)})
  with pytest.raises(ValueError, match=r"symbols\[22\] was nothing, now 'u'"):
    start(tmp_path, facts={**FACTS, "symbols": (*FACTS["symbols"], "u")})
  with pytest.raises(ValueError, match="sha256 was '0a1b', now '0a1c'"):
    start(tmp_path, facts={**FACTS, "sha256": "0a1c"})


def test_a_fact_and_a_setting_of_one_name_are_two(tmp_path):
  start(tmp_path, {"seed": 0}, {"seed": 1})
  with pytest.raises(ValueError, match="seed was 0, now 2"):
    start(tmp_path, {"seed": 2}, {"seed": 1})


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints"])
def test_results_without_a_config_are_refused(tmp_path, name):
  (tmp_path / name).mkdir()
  with pytest.raises(ValueError, match=f"holds {name} but no config.json"):
    start(tmp_path)
  assert os.listdir(tmp_path) == [name]


def test_other_files_are_left_alone(tmp_path):
  (tmp_path / "notes.txt").write_text("mine")
  start(tmp_path)
  assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_file_in_the_place_of_the_directory(tmp_path):
  (tmp_path / "x").write_text("")
  with pytest.raises(ValueError, match="is a file"):
    start(tmp_path / "x")
  with pytest.raises(ValueError, match="not a run directory"):
    rundir.load(tmp_path / "x")


def test_load_tells_what_is_wrong(tmp_path):
  with pytest.raises(ValueError, match="not a run directory.*config.json"):
    rundir.load(tmp_path / "absent")
  start(tmp_path)
  (tmp_path / "facts.json").write_text('{"x": ')
  with pytest.raises(ValueError, match="facts.json is damaged"):
    rundir.load(tmp_path)


def test_a_start_that_was_killed_starts_again(tmp_path, monkeypatch):
  replace = os.replace
  for n in range(2):
    calls = iter(range(10))

    def stop(*args, n=n, calls=calls):
      if next(calls) == n:
        raise KeyboardInterrupt
      replace(*args)

    with monkeypatch.context() as patch:
      patch.setattr(os, "replace", stop)
      with pytest.raises(KeyboardInterrupt):
        start(tmp_path / str(n))
    start(tmp_path / str(n))
    assert alike(rundir.load(tmp_path / str(n)), (CONFIG, FACTS))


def test_moved_and_relative(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  run = start("./a run/zoë/")
  assert run.path == tmp_path / "a run" / "zoë"
  (tmp_path / "a run").rename(tmp_path / "moved")
  monkeypatch.chdir(tmp_path / "moved")
  start("zoë")
  assert not any(
    str(tmp_path) in path.read_text()
    for path in (tmp_path / "moved" / "zoë").iterdir()
  )


HOLDER = """
import sys
from rnnlab import rundir, strict_json
run = rundir.claim(sys.argv[1], {}, {})
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_trainer_is_refused_until_the_first_ends(tmp_path):
  holder = subprocess.Popen(
    [sys.executable, "-c", HOLDER, str(tmp_path)],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  )
  with holder:
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(ValueError, match=f"trained by process {holder.pid}"):
      start(tmp_path, {}, {})
    assert rundir.load(tmp_path) == ({}, {})  # readers need no lock
    holder.kill()
  start(tmp_path, {}, {})


def test_a_second_claim_in_the_same_process_is_refused(tmp_path):
  with rundir.claim(tmp_path, CONFIG, FACTS):
    with pytest.raises(ValueError, match=f"trained by process {os.getpid()};"):
      rundir.claim(tmp_path, CONFIG, FACTS)
  start(tmp_path)
  with pytest.raises(ValueError, match="seed"):
    rundir.claim(tmp_path, changed(CONFIG, "seed", 1), FACTS)
  start(tmp_path)  # a refused claim gave its lock back


# Metrics


def test_nonfinite_values_are_told_apart(tmp_path):
  log = MetricsLog(tmp_path / "metrics.jsonl")
  row = {
    "step": np.int64(3),
    "train/nll": math.nan,
    "a": np.float32(np.inf),
    "b": -math.inf,
    "none": None,
    "x": np.float32(0.5),
    "zero": 0.0,
  }
  log.append(row)
  (line,) = log.path.read_text().splitlines()
  assert strict(line) == {
    "step": 3,
    "train/nll": None,
    "a": None,
    "b": None,
    "none": None,
    "x": 0.5,
    "zero": 0.0,
    "nonfinite": {"train/nll": "nan", "a": "inf", "b": "-inf"},
  }
  (read,) = MetricsLog.read(log.path)
  assert alike(
    read,
    {
      "step": 3,
      "train/nll": math.nan,
      "a": math.inf,
      "b": -math.inf,
      "none": None,
      "x": 0.5,
      "zero": 0.0,
    },
  )


def test_history_across_a_resume(tmp_path):
  log = MetricsLog(tmp_path / "metrics.jsonl")
  assert log.rewind(0) == [] and MetricsLog.read(log.path) == []
  for step in range(9):
    log.append({"step": step, "run": 1})
  text = log.path.read_bytes()
  log.path.write_bytes(text[:-4])  # killed while it wrote step 8
  assert [row["step"] for row in MetricsLog.read(log.path)] == [*range(8)]
  cut, dropped = log.rewind(5)
  assert "cut short" in cut and "2 rows, steps 6 to 7" in dropped
  for step in range(6, 13):
    log.append({"step": step, "run": 2} | ({"eval": 0} if step == 10 else {}))
  rows = MetricsLog.read(log.path)
  assert [row["step"] for row in rows] == [*range(13)]
  assert [row["run"] for row in rows] == [1] * 6 + [2] * 7
  assert log.rewind(12) == []


@pytest.mark.parametrize("cut", range(1, 22))
def test_a_line_cut_anywhere_joins_nothing(tmp_path, cut):
  log = MetricsLog(tmp_path / "metrics.jsonl")
  log.append({"step": 0, "a": "é"})
  whole = log.path.read_bytes()
  log.path.write_bytes(whole + whole[:-cut])
  log.rewind(0)
  log.append({"step": 1})
  steps = [row["step"] for row in MetricsLog.read(log.path)]
  assert steps == ([0, 0, 1] if cut == 1 else [0, 1])


def test_damage_in_the_middle_is_named(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 0}\n{"step": \n{"step": 2}\n')
  for use in (MetricsLog.read, lambda p: MetricsLog(p).rewind(2)):
    with pytest.raises(ValueError, match="line 2 is damaged"):
      use(path)


def test_plain_json_has_a_word_for_every_number():
  row = {"a": math.nan, "b": [{"c": -math.inf, "d": 1}], "e": (2.0,)}
  assert strict(strict_json.plain_json(row)) == {
    "a": None,
    "b": [{"c": None, "d": 1}],
    "e": [2.0],
    "nonfinite": {"a": "nan", "b[0].c": "-inf"},
  }


def test_an_empty_name_is_no_directory():
  with pytest.raises(ValueError, match="empty name"):
    rundir.claim("", CONFIG, FACTS)
