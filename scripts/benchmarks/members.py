"""A sweep of eight small runs in one process, beside eight runs of their own.

Start to end, Python's start and the compiling included, on all cores that this
process may use, as commands run (--pin is for the other rows). The processes
compile each for itself, as on machines of their own; or all but the first read
what the first one compiled. They run one after another.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import numpy as np

from rnnlab import backend

ROOT = pathlib.Path(__file__).parents[2]
TITLE = "8 runs of 1000 steps, names, tanh 96"
SETTINGS = {
  "train.steps": 1000,
  "train.epochs": 1000,  # not the file's, which would end it sooner
  "train.log_every": 500,
  "train.eval_every": 500,
  "train.save_every": 500,
}
CONFIG = str(ROOT / "configs/name_lm.py")
RATES = 1e-3, 2e-3, 4e-3, 8e-3
EXPERIMENT = f"""
import runpy

def get_config(arg=None):
  return runpy.run_path({CONFIG!r})["get_config"]("notebook")

def sweep(add, arg):
  for lr in {RATES}:
    for seed in (0, 1):
      add({{"opt.lr": lr, "seed": seed}})
"""


def measure(how, say) -> dict:
  """{"title", "cores", "seconds": {way: [..]}, "ratio": {way: ..}}.

  The ways take turns. ratio: of the sweep's median to those of the processes.
  cores: those that they had, whatever the other rows have. Raises RuntimeError
  where a command fails or the sweep compiled more than one program.
  """
  seconds = {way: [] for way in WAYS}
  _interleaved(how, seconds)
  medians = {way: float(np.median(each)) for way, each in seconds.items()}
  sweep = medians.pop("sweep")
  ratio = {way: sweep / each for way, each in medians.items()}
  told = (f"{ratio[way]:.2f} of {way} ({medians[way]:.1f} s)" for way in ratio)
  cores = backend.cores()
  say(f"W9  {TITLE}, cores {cores}: {sweep:.1f} s, {', '.join(told)}")
  return {"title": TITLE, "cores": cores, "seconds": seconds, "ratio": ratio}


def _interleaved(how, seconds):
  for i in range(max(2, how.rounds // 4)):
    for way in sorted(seconds, reverse=bool(i % 2)):
      with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        WAYS[way](pathlib.Path(folder))
        seconds[way].append(time.monotonic() - began)


def _sweep(folder):
  (folder / "experiment.py").write_text(EXPERIMENT, encoding="utf-8")
  record = _command(folder, "sweep", "experiment.py", "sweep")
  compilations = {"train_steps": 1, "report": 1}
  if record["compilations"] != [compilations]:
    raise RuntimeError(f"the sweep compiled {record['compilations']}")


def _processes(folder, cache="cache-{}"):
  for i in range(8):
    lr, seed = f"--config.opt.lr={RATES[i // 2]}", f"--config.seed={i % 2}"
    flags = f"{CONFIG}:notebook", str(i), lr, seed
    _command(folder, "train", *flags, cache=cache.format(i))


WAYS = {
  "sweep": _sweep,
  "processes": _processes,
  "processes with one cache": functools.partial(_processes, cache="cache"),
}


def _command(folder, script, config, workdir, *flags, cache="cache"):
  settings = [f"--config.{name}={value}" for name, value in SETTINGS.items()]
  done = subprocess.run(
    [
      *(sys.executable, ROOT / f"scripts/{script}.py", f"--config={config}"),
      *(f"--workdir={workdir}", *settings, *flags),
    ],
    cwd=folder,
    env=os.environ | {"XDG_CACHE_HOME": str(folder / cache)},
    capture_output=True,
    text=True,
  )
  if done.returncode:
    raise RuntimeError(f"{script}.py failed: {done.stderr[-500:]}")
  return json.loads(done.stdout.splitlines()[-1])
