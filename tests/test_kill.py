"""Killed for real, again and again, a run ends as if it had not been."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
import tiny

from rnnlab import checkpoint

ROOT = pathlib.Path(__file__).parents[1]


def command(tmp_path, workdir):
  names = tmp_path / "names.txt"
  names.write_text("\n".join(tiny.names()), encoding="utf-8")
  settings = {
    "task.path": names,
    "task.split": "shuffle",
    "task.batch_size": 8,
    "model.embed": 4,
    "model.hidden": 8,
    "model.cell.name": "gru",
    "opt.warmup": 20,
    "train.steps": 400,
    "train.epochs": 1000,  # not the file's, which would end it sooner
    "train.log_every": 20,
    "train.eval_every": 40,
    "train.save_every": 4,
  }
  flags = [f"--config.{name}={value}" for name, value in settings.items()]
  script, config = ROOT / "scripts/train.py", ROOT / "configs/name_lm.py"
  return [
    sys.executable,
    script,
    f"--config={config}",
    *flags,
    "--workdir",
    workdir,
  ]


def start(tmp_path, workdir):
  """The process, started where nobody's settings reach it."""
  env = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
  return subprocess.Popen(
    command(tmp_path, workdir),
    cwd=tmp_path,
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(process):
  out, err = process.communicate(timeout=120)
  assert process.returncode == 0, err
  return json.loads(out.splitlines()[-1])


def until_it_trains(process, run, before):
  """Waits for the first checkpoint that was not there before."""
  while process.poll() is None:
    if set(checkpoint.steps(run / "checkpoints")) - before:
      return
    time.sleep(0.01)


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path):
  straight = finish(start(tmp_path, "straight"))
  run, rng, killed = tmp_path / "run", random.Random(0), 0
  while killed < 5:
    before = set(checkpoint.steps(run / "checkpoints"))
    process = start(tmp_path, "run")
    until_it_trains(process, run, before)
    time.sleep(rng.uniform(0, 0.4))
    process.send_signal(signal.SIGTERM if killed == 3 else signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0, "ended before it could be killed"
    assert checkpoint.steps(run / "checkpoints")
    if killed:
      assert "going on from step" in err
    killed += 1
  record = finish(start(tmp_path, "run"))
  assert record["fingerprint"] == straight["fingerprint"]
  assert record["val/nll"] == straight["val/nll"]
  assert record["best_step"] == straight["best_step"]
  assert tiny.rows(run) == tiny.rows(tmp_path / "straight")
