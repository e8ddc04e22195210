"""The commands on a task with sources, as a person types them."""

import json
import math
import os
import pathlib
import re
import subprocess
import sys

import commands
import pytest
import reversing

from rnnlab import train as trainer

ROOT = pathlib.Path(__file__).parents[1]
WORDS = reversing.words(40)

pytestmark = pytest.mark.slow


class Commands:
  """Runs of a folder, and `python scripts/...` upon them."""

  def __init__(self, folder):
    self.folder = folder
    blocked = folder / "blocked" / "matplotlib.py"
    blocked.parent.mkdir()
    blocked.write_text(
      "raise ModuleNotFoundError('no matplotlib', name='matplotlib')\n",
      encoding="utf-8",
    )
    (folder / "names.txt").write_text("\n".join(WORDS), encoding="utf-8")

  def run(self, *args, plots=True):
    args = [arg.format(folder=self.folder) for arg in args]
    if plots:
      return commands.run(*args)
    # What stands first in the path hides matplotlib.
    path = os.pathsep.join([str(self.folder / "blocked"), str(ROOT)])
    return subprocess.run(
      [sys.executable, *args],
      cwd=ROOT,
      env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path},
      capture_output=True,
      timeout=300,
    )


def together(runs, *calls):
  """Of every (args, plots) what came of it."""
  return [runs.run(*args, plots=plots) for args, plots in calls]


def record(done):
  assert done.returncode == 0, done.stderr.decode()
  return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """With the runs `names`, trained without matplotlib, and `prefix`."""
  runs = Commands(tmp_path_factory.mktemp("reversal"))
  settings = {
    "task.path": "{folder}/names.txt",
    "task.split": "shuffle",
    "task.batch_size": 8,
    "model.embed": 6,
    "model.hidden": 8,
    "train.steps": 4,
  }
  done = runs.run(
    "scripts/train.py",
    "--config=configs/name_reversal.py",
    "--workdir={folder}/names",
    *(f"--config.{name}={value}" for name, value in settings.items()),
    plots=False,
  )
  told = record(done)
  assert told["step"] == 4 and math.isfinite(told["val/nll"])
  runs.nll = told["best/val/nll"]
  config = {
    "seed": 0,
    "task": {"name": "name_lm", "path": str(runs.folder / "names.txt")},
    "model": {"embed": 4, "hidden": 4, "cell": {"name": "rnn"}},
    "opt": {"name": "adam", "lr": 0.01},
    "train": {"steps": 1},
  }
  trainer.train(config, runs.folder / "prefix")
  return runs


def test_evaluate_tells_all_measures_by_length_and_draws_them(runs):
  base = ["scripts/evaluate.py", "--workdir={folder}/names"]
  figure = "--figure={folder}/new/by_length.png"
  done = together(
    runs,
    ([*base, figure, "--batch_size=3"], True),
    ([*base, "--extra_padding=5"], False),
    ([*base, "--split=test", figure.replace("new", "none")], False),
  )
  one, padded = map(record, done[:2])
  png = runs.folder / "new" / "by_length.png"
  assert png.read_bytes().startswith(b"\x89PNG")
  assert f"wrote {png}" in done[0].stderr.decode()
  for name in ("nll", "free_running_nll", "exact_match", "cer"):
    assert math.isclose(one[name], padded[name], rel_tol=1e-5, abs_tol=1e-9)
  assert math.isclose(one["nll"], runs.nll, rel_tol=1e-5)
  assert one["attention/padding"] == padded["attention/padding"] == 0
  assert one["tokens"] == padded["tokens"] and one["examples"] == 4
  assert one["examples/s"] > 0
  assert sum(row["examples"] for row in one["by_length"]) == 4
  assert sum(row["tokens"] for row in one["by_position"]) == one["tokens"]
  # The tables are there for a person too, by whatever name the JSON has.
  shown = done[0].stdout.decode()
  for name in ("exact_match", "source_length", "position", "free_running_nll"):
    assert name in shown
  # Without matplotlib a figure is refused before any work.
  assert done[2].returncode == 1
  assert done[2].stdout == b""
  assert b"pip install 'rnnlab[plots]'" in done[2].stderr
  assert not (runs.folder / "none").exists()


def test_sample_answers_sources_in_their_order_and_draws_attention(runs):
  base = ["scripts/sample.py", "--workdir={folder}/names", "--limit=6"]
  sources = "--sources=acbd,e,abcabc"
  done = together(
    runs,
    ([*base, sources, "--figure={folder}/new/attention.png"], True),
    ([*base, sources], False),
    ([*base, sources, "--beam=3", "--alpha=0.5"], False),
  )
  drawn, plain, beam = map(record, done)
  png = runs.folder / "new" / "attention.png"
  assert png.read_bytes().startswith(b"\x89PNG")
  assert f"wrote {png}" in done[0].stderr.decode()
  assert drawn["samples"] == plain["samples"]
  for found in (plain, beam):
    assert [s["source"] for s in found["samples"]] == ["acbd", "e", "abcabc"]
    for sample in found["samples"]:
      assert set(sample) == {"source", "text", "logprob", "end"}
      n = len(sample["text"])
      assert n == 6 if sample["end"] == "limit" else n < 6
      assert sample["logprob"] < 0
    assert found["step"] == 4
  assert "acbd" in done[0].stdout.decode().splitlines()[1]


SAMPLE = ["scripts/sample.py", "--workdir={folder}/names"]
PREFIX = "--workdir={folder}/prefix"
FIGURE = "--figure={folder}/never.png"
REFUSED = [
  ([*SAMPLE, "--prefix=a"], "needs --sources"),
  ([SAMPLE[0], PREFIX, "--sources=ab"], "needs --prefix, not --sources"),
  ([*SAMPLE, "--sources=ab,aZ"], r"'aZ': .*'Z' \(U\+005A\) at position 2"),
  ([*SAMPLE, "--sources=ab,,c"], "none empty"),
  ([*SAMPLE, "--sources="], "at least one"),
  ([*SAMPLE, "--sources=ab", "--temperature=0.5"], "temperature is no setting"),
  ([*SAMPLE, "--sources=ab", "--beam=2", FIGURE], "--figure: .*beam"),
  ([SAMPLE[0], PREFIX, FIGURE], "--figure: nothing here attends"),
  (["scripts/evaluate.py", PREFIX, FIGURE], "no tables by length"),
]


def test_what_is_wrong_is_one_line(runs):
  done = [runs.run(*args) for args, _ in REFUSED]
  lacking = runs.run(*SAMPLE, "--sources=ab", FIGURE, plots=False)
  wanted = [words for _, words in REFUSED] + ["needs matplotlib: pip install"]
  for run, words in zip([*done, lacking], wanted, strict=True):
    told = run.stderr.decode()
    assert run.returncode == 1 and not run.stdout, (words, told)
    assert told.startswith("error: ") and told.count("\n") == 1, told
    assert re.search(words, told), (words, told)
  assert not (runs.folder / "never.png").exists()
