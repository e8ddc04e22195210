"""Runs small enough to be trained inside a test."""

import hashlib
import pathlib

import numpy as np
import pytest

from rnnlab import rundir, tasks
from rnnlab import train as trainer

# What a row tells of the machine instead of the run.
CLOCKS = ("tokens/s", "characters/s", "seconds")


class Killed(BaseException):
  """Ends a run inside the test as a kill would: nothing handles it."""


def names(n=60):
  """n different names of 1 to 6 letters, a to e, in an arbitrary order."""
  rng, found = np.random.default_rng(0), {}
  while len(found) < n:
    found["".join(rng.choice(list("abcde"), rng.integers(1, 7)))] = None
  return list(found)


def config(folder, **changes):
  """Settings of a run of 20 updates on 48 names; changes by dotted name."""
  path = pathlib.Path(folder) / "names.txt"
  if not path.exists():
    path.write_text("\n".join(names()) + "\n", encoding="utf-8")
  settings = {
    "seed": 0,
    "task": {
      "name": "name_lm",
      "path": str(path),
      "split": "shuffle",
      "batch_size": 8,
      "eval_batch_size": 8,
      "seed": 0,
    },
    "model": {
      "embed": 4,
      "hidden": 8,
      "layers": 1,
      "dropout": 0.3,
      "cell": {"name": "rnn"},
    },
    "opt": {"name": "adam", "lr": 0.01, "schedule": "cosine", "warmup": 4},
    "train": {
      "steps": 20,
      "log_every": 1,
      "eval_every": 10,
      "save_every": 5,
      "keep": 1,
    },
  }
  for name, value in changes.items():
    *sections, field = name.split(".")
    inner = settings
    for section in sections:
      inner = inner[section]
    inner[field] = value
  return settings


def task(settings):
  """The task of these settings."""
  return tasks.make(**settings["task"], model=settings["model"])


def wrap(monkeypatch, before=lambda i, batch: batch, **replace):
  """Lets the next runs train on before(i, batch) in place of batch i.

  before may raise. replace: fields of the task, as functions of the old value.
  """
  make = tasks.make

  def wrapped(**settings):
    task = make(**settings)

    def train_batches(start):
      for i, batch in enumerate(task.train_batches(start), start):
        yield before(i, batch)

    new = {
      name: change(getattr(task, name)) for name, change in replace.items()
    }
    return task._replace(train_batches=train_batches, **new)

  monkeypatch.setattr(trainer.tasks, "make", wrapped)


def kill(settings, workdir, at):
  """Trains until `at` updates are done, then ends the run as a kill would."""

  call = trainer.Run._call

  def killed(loop):
    stop, _ = loop.ready
    if loop.step <= at < stop:
      raise Killed
    return call(loop)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(trainer.Run, "_call", killed)
    try:
      trainer.train(settings, workdir)
    except Killed:
      return
  raise AssertionError(f"update {at} was never reached")


def rows(workdir):
  """The rows of metrics.jsonl without what depends on the machine."""
  found = rundir.MetricsLog.read(rundir.RunDir(workdir).metrics)
  return [{k: v for k, v in r.items() if k not in CLOCKS} for r in found]


def rates(workdir):
  """{step: the rate its row tells}."""
  return {row["step"]: row["lr"] for row in rows(workdir) if "lr" in row}


def cosine(count, steps=20, peak=0.01, warmup=4):
  """The rate of update `count`, in float64."""
  if count < warmup:
    return peak * count / warmup
  share = min((count - warmup) / (steps - warmup), 1)
  return peak * 0.5 * (1 + np.cos(np.pi * share))


def digests(folder):
  """{path: sha256} of every file, the lock apart."""
  folder = pathlib.Path(folder)
  return {
    str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
    for path in folder.rglob("*")
    if path.is_file() and path.name != "lock"
  }
