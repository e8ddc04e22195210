"""Two processes on this machine, as a person starts them, and one run."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import tiny

from rnnlab import checkpoint, parallel, rundir

ROOT = pathlib.Path(__file__).parents[1]
SETTINGS = {
  "task.split": "shuffle",
  "task.batch_size": 6,
  "task.eval_batch_size": 5,
  "model.embed": 4,
  "model.hidden": 8,
  "model.cell.name": "gru",
  "opt.schedule": "constant",
  "opt.warmup": 0,
  "train.epochs": 1000,  # not the file's, which would end it sooner
}
STEP = {"train.log_every": 1, "train.eval_every": 1, "train.save_every": 100}
CALL = {f"train.{name}_every": 4 for name in ("log", "eval", "save")}

pytestmark = pytest.mark.slow


def start(folder, *args, processes=1, each=()):
  """The processes of a command; each: arguments of one process alone."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
  # Two devices each are as good as eight, and quicker.
  count = "--xla_force_host_platform_device_count="
  flags = os.environ["XLA_FLAGS"]
  env = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
  if processes > 1:
    env["XLA_FLAGS"] = flags.replace(f"{count}8", f"{count}2")
  started = []
  for i in range(processes):
    if processes > 1:
      env |= zip(parallel.JAX, (address, str(processes), str(i)), strict=True)
    started.append(
      subprocess.Popen(
        [sys.executable, *args, *(each[i] if each else ())],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
      )
    )
  return started


def train(folder, workdir, devices, processes=1, each=(), **changes):
  """The processes of a training command."""
  names = folder / "names.txt"
  names.write_text("\n".join(tiny.names()), encoding="utf-8")
  settings = SETTINGS | changes | {"task.path": names}
  return start(
    folder,
    ROOT / "scripts/train.py",
    f"--config={ROOT / 'configs/name_lm.py'}",
    *(f"--config.{name}={value}" for name, value in settings.items()),
    f"--config.train.data_parallel={devices}",
    f"--workdir={workdir}",
    processes=processes,
    each=each,
  )


def ends(started, timeout=200):
  """[(exit status, stdout, stderr)] of the processes."""
  ends = time.monotonic() + timeout
  try:
    outs = [p.communicate(timeout=ends - time.monotonic()) for p in started]
  finally:
    for process in started:
      process.kill()
  return [(p.returncode, *out) for p, out in zip(started, outs, strict=True)]


def record(started):
  """What the first process printed last; the others print nothing."""
  (status, out, err), *others = ends(started)
  assert status == 0, err
  for status, silent, err in others:
    assert status == 0, err
    assert "{" not in silent and "step" not in err
  return json.loads(out.splitlines()[-1])


def same_rows(run, other):
  rows, others = tiny.rows(run), tiny.rows(other)
  assert [row["step"] for row in rows] == [row["step"] for row in others]
  for row, other in zip(rows, others, strict=True):
    assert row.keys() == other.keys()
    for name in row:
      rtol = 1e-5 if name == "grad_norm" else 1e-6
      np.testing.assert_allclose(row[name], other[name], rtol=rtol)


def until_saved(started, run, step):
  """Waits until there is a checkpoint of that step or a later one."""
  end = time.monotonic() + 200
  while max(checkpoint.steps(run / "checkpoints"), default=-1) < step:
    if time.monotonic() > end or any(p.poll() is not None for p in started):
      raise AssertionError(ends(started, 1))
    time.sleep(0.02)


def test_a_run_goes_on_from_anywhere_to_anywhere(tmp_path):
  straight = train(tmp_path, "one", 1, **STEP, **{"train.steps": 20})
  run = tmp_path / "run"
  for steps, devices, processes in ((6, 8, 1), (13, 2, 2), (20, 2, 1)):
    how = {"processes": processes, "train.steps": steps}
    found = record(train(tmp_path, "run", devices, **how, **STEP))
    assert found["step"] == steps
    assert set(found["compilations"].values()) == {1}
    devices_of = rundir.load(run)[1]["devices"]
    assert devices_of["devices"] == devices
    assert devices_of["processes"] == processes
  record(straight)
  same_rows(run, tmp_path / "one")
  command = [ROOT / "scripts/evaluate.py", f"--workdir={run}", "--batch_size=5"]
  alone = record(start(tmp_path, *command))
  both = record(start(tmp_path, *command, "--data_parallel=2", processes=2))
  assert both["tokens"] == alone["tokens"] > 0
  np.testing.assert_allclose(both["nll"], alone["nll"], rtol=1e-6)


@pytest.mark.exhaustive
def test_one_of_two_is_killed_and_both_start_again(tmp_path):
  how = {"processes": 2, "train.steps": 32, "train.steps_per_call": 4}
  record(train(tmp_path, "straight", 4, **how, **CALL))
  run = tmp_path / "run"
  for number, killed in ((signal.SIGKILL, 1), (signal.SIGTERM, 1)):
    started = train(tmp_path, "run", 4, **how, **CALL)
    until_saved(started, run, 8 if number == signal.SIGKILL else 16)
    began = time.monotonic()
    started[killed].send_signal(number)
    out = ends(started)
    assert time.monotonic() - began < 60
    assert out[1 - killed][0] == 1
    if number == signal.SIGKILL:
      assert "error: process 0 of 2: " in out[0][2]
    else:  # all stop at the same step, in order
      said = [err.splitlines()[-1] for _, _, err in out]
      assert "stopped at step" in said[0] and said[0] == said[1]
  found = record(train(tmp_path, "run", 4, **how, **CALL))
  assert found["step"] == 32
  assert tiny.rows(run) == tiny.rows(tmp_path / "straight")


@pytest.mark.parametrize(
  ("devices", "each", "words"),
  [
    (2, ("--config.seed=0", "--config.seed=1"), "from process 0 in: seed"),
    (2, ("--config.seed=0", "--config.task.path=no"), "no: cannot be read"),
    (1, (), "data_parallel=1 cannot be shared by 2 processes"),
  ],
)
def test_what_one_process_refuses_ends_both(tmp_path, devices, each, words):
  each = [[arg] for arg in each]
  started = train(tmp_path, "run", devices, processes=2, each=each)
  for i, (status, _, err) in enumerate(ends(started)):
    assert status == 1
    assert f"error: process {i} of 2: " in err.splitlines()[-1]
    assert words in err.splitlines()[-1]
  assert not (tmp_path / "run").exists()


def test_a_directory_in_use_ends_both(tmp_path):
  held = rundir.RunDir(tmp_path / "run")
  held.path.mkdir()
  held.acquire()
  with held:
    out = ends(train(tmp_path, "run", 2, processes=2))
  assert [status for status, _, _ in out] == [1, 1]
  assert all(f"being trained by process {os.getpid()}" in o[2] for o in out)


def test_a_sweep_is_for_one_process(tmp_path):
  config = f"--config={ROOT / 'configs/name_reversal.py'}:masks"
  script = ROOT / "scripts/sweep.py"
  started = start(tmp_path, script, config, "--workdir=w", processes=2)
  for status, _, err in ends(started):
    assert status == 1
    assert err == (
      "error: sweep.py runs in one process, and the environment "
      "(JAX_NUM_PROCESSES, or Slurm's) says that several were launched\n"
    )
