"""The commands as a person types them, on a run of a few seconds."""

import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import commands
import pytest
import tiny

from rnnlab import metrics, trained
from rnnlab.data import names

ROOT = pathlib.Path(__file__).parents[1]
LETTERS = "aé日"
NAMES = [
  "".join(n) for k in (1, 2, 3) for n in itertools.product(LETTERS, repeat=k)
]


def command(*args, **env):
  """Runs `python scripts/<args>` at the root of the repository."""
  return subprocess.run(
    [sys.executable, *map(str, args)],
    cwd=ROOT,
    env={**os.environ, "JAX_PLATFORMS": "cpu", **env},
    capture_output=True,
    timeout=300,
  )


def record(done):
  """The last line of stdout, which has to be one strict JSON object."""

  def refuse(word):
    raise AssertionError(f"{word} is not strict JSON")

  assert done.returncode == 0, done.stderr.decode()
  found = json.loads(done.stdout.splitlines()[-1], parse_constant=refuse)
  assert isinstance(found, dict)
  return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp("scripts")
  (folder / "names.txt").write_text("\n".join(NAMES), encoding="utf-8")
  (folder / "latin.txt").write_bytes(b"ada\nzo\xeb\n")
  return folder


@pytest.fixture(scope="module")
def run(folder):
  """(workdir, what the training command reported)."""
  workdir = folder / "run"
  settings = {
    "task.path": folder / "names.txt",
    "task.split": "shuffle",
    "task.batch_size": 8,
    "model.embed": 4,
    "model.hidden": 8,
    "opt.warmup": 0,
    "train.steps": 12,
    "train.log_every": 4,
    "train.eval_every": 4,
    "train.save_every": 4,
  }
  flags = [f"--config.{name}={value}" for name, value in settings.items()]
  args = "--config=configs/name_lm.py", f"--workdir={workdir}", *flags
  return workdir, record(command("scripts/train.py", *args))


@pytest.mark.slow
def test_train_reports_what_it_did(run):
  workdir, trained_ = run
  assert trained_["step"] == 12
  assert trained_["best_step"] in (4, 8, 12)
  assert trained_["best/val/nll"] <= trained_["val/nll"] < math.log(5) + 1
  # Four gates of 8 units on 4 inputs, and 5 symbols: 3 letters, [S], [PAD].
  assert trained_["parameters"] == 5 * 4 + 32 * (4 + 8 + 1) + 5 * (8 + 1)
  assert trained_["compilations"] == {"train_steps": 1, "report": 1}
  assert trained_["seconds"] > 0
  assert len(trained_["fingerprint"]) == 64
  kept = trained.load(workdir, "latest")
  assert kept.step == 12
  assert trained.load(workdir).step == trained_["best_step"]


@pytest.mark.slow
def test_evaluate_does_not_depend_on_the_batch_size(run):
  workdir, trained_ = run
  base = ["scripts/evaluate.py", f"--workdir={workdir}"]
  ones, whole, train = (
    record(commands.run(*base, *args))
    for args in (
      ["--batch_size=1", "--split=validation"],
      ["--batch_size=1000", "--notebook_average=3"],
      ["--split=train", "--checkpoint=latest"],
    )
  )
  for found in (ones, whole):
    assert found["split"] == "validation" and found["examples"] == 4
    assert found["tokens"] == whole["tokens"]  # counts are exact
    assert math.isclose(found["nll"], trained_["best/val/nll"], rel_tol=1e-6)
    assert math.isclose(found["ppl"], math.exp(found["nll"]))
    assert math.isclose(found["bits"], found["nll"] / math.log(2))
    assert found["step"] == trained_["best_step"]
    assert found["in_train"] == 0
  assert train["fingerprint"] == trained_["fingerprint"]
  assert ones["fingerprint"] == whole["fingerprint"]
  assert train["examples"] == 31 and train["step"] == 12
  # The audit is the notebook's arithmetic: two batches of 3 and 1, over 4 // 3.
  best = trained.load(workdir)
  means = [
    best.task.report(best.params, (), batch)[1]["nll"].value()
    for batch in best.task.eval_batches("validation", 3)
  ]
  assert len(means) == 2
  assert math.isclose(whole["notebook_average"], sum(means) / 1, rel_tol=1e-5)
  assert "notebook_average" not in ones
  assert metrics.perplexity(train["nll"]) == train["ppl"]


@pytest.mark.slow
def test_sample_under_any_locale_and_without_the_data(run, folder):
  workdir, _ = run
  base = ["scripts/sample.py", f"--workdir={workdir}", "--seed=3"]
  plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
  gone = "--n=1", "--checkpoint=12", f"--path={folder}/gone"
  runs = [
    command(*base, "--n=40", "--checkpoint=latest", **plain),
    commands.run(*base, *gone),
    commands.run(*base, "--n=3", "--prefix=日", "--limit=2", "--temperature=0"),
  ]
  many, bare, prompted = map(record, runs)
  runs[0].stdout.decode("ascii")  # or it raises
  texts = [sample["text"] for sample in many["samples"]]
  assert len(texts) == 40 and "é" in "".join(texts)
  parts = names.split(NAMES, "shuffle", 123)
  homes = {NAMES[i]: part for part, rows in parts.items() for i in rows}
  counts = dict.fromkeys(many["found_in"], 0)
  for sample in many["samples"]:
    assert sample["found_in"] == homes.get(sample["text"], "nowhere")
    assert sample["logprob"] < 0 and sample["end"] in ("stop", "limit")
    counts[sample["found_in"]] += 1
  assert many["found_in"] == counts and {"train", "nowhere"} <= set(counts)
  # The vocabulary is stored with the run; only the comparison is lost.
  (alone,) = bare["samples"]
  assert alone["text"] == texts[0] and "found_in" not in alone
  assert bare["fingerprint"] == many["fingerprint"]
  assert b"without the data" in runs[1].stderr
  assert len({sample["text"] for sample in prompted["samples"]}) == 1
  assert prompted["samples"][0]["text"].startswith("日")


TRAIN = ["scripts/train.py", "--config=configs/name_lm.py"]
READ = "--workdir={folder}/run"
NEW = "--workdir={folder}/refused"
REFUSED = [
  ([*TRAIN, NEW, "--bogus=1"], "'bogus'"),
  ([*TRAIN, NEW, "--config.model.hiden=3"], '--config.model.hiden=3.*"hidden"'),
  ([*TRAIN, NEW, "more"], "'more'"),
  (TRAIN, "--workdir"),
  ([TRAIN[0], NEW, "--config=configs/gone.py"], "configs/gone.py"),
  ([TRAIN[0], NEW, "--config=configs/name_lm.py:bogus"], "variant 'bogus'"),
  (
    [*TRAIN, NEW, "--config.task.path={folder}/latin.txt"],
    "latin.txt: not UTF-8, byte 0xeb at offset 6",
  ),
  (["scripts/evaluate.py", "--workdir={folder}"], "is not a run directory"),
  (["scripts/evaluate.py", READ, "--checkpoint=77"], "no checkpoint 77"),
  (["scripts/evaluate.py", READ, "--path={folder}/latin.txt"], "not UTF-8"),
  (
    ["scripts/sample.py", READ, "--prefix=aéx"],
    r"'x' \(U\+0078\) at position 3",
  ),
  (["scripts/sample.py", READ, "--temperature=-1"], "temperature must be"),
]


@pytest.mark.slow
def test_what_is_wrong_is_one_line_and_nothing_is_written(run, folder):
  before = tiny.digests(folder)
  for args, words in REFUSED:
    done = commands.run(*(arg.format(folder=folder) for arg in args))
    told = done.stderr.decode()
    assert done.returncode == 1, args
    assert told.startswith("error: ") and told.count("\n") == 1, told
    assert re.search(words, told), told
    assert not done.stdout
  assert tiny.digests(folder) == before
  assert not (folder / "refused").exists()


@pytest.mark.slow
def test_help_shows_an_example():
  scripts = sorted(path.name for path in (ROOT / "scripts").glob("*.py"))
  assert {"train.py", "evaluate.py", "sample.py"} <= set(scripts)
  for script in scripts:
    told = commands.run(f"scripts/{script}", "--help").stdout.decode()
    assert re.search(rf"Examples?:\n  python scripts/{script}\b", told)
    assert "\nflags:" in told
