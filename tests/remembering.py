"""Copying and adding, small enough to be run inside a test."""

import jax
import numpy as np

from rnnlab import tasks

MODEL = {"hidden": 5, "cell": {"name": "rnn", "recurrent": "identity"}}
SMALL = {"batch_size": 6, "eval_batch_size": 8, "validation": 20, "test": 12}
TASKS = {
  "copying": {"items": 2, "lag": 3, "symbols": 4},
  "copying-all": {"items": 2, "lag": 3, "symbols": 4, "loss": "all"},
  "adding": {"length": 7},
}


def make(name, **settings):
  own = SMALL | TASKS.get(name, {}) | {"model": MODEL}
  return tasks.make(name.split("-")[0], **own | settings)


def drawn(task):
  """Parameters with no zeros left, so that nothing is hidden by one."""
  leaves, tree = jax.tree.flatten(jax.eval_shape(task.init, jax.random.key(0)))
  rng = np.random.default_rng(0)
  return tree.unflatten(
    rng.normal(size=p.shape).astype(p.dtype) for p in leaves
  )


def config(name, **changes):
  settings = {
    "seed": 0,
    "task": {"name": name.split("-")[0], **SMALL, **TASKS[name], "seed": 0},
    "model": MODEL,
    "opt": {"name": "adam", "lr": 0.01},
    "train": {"steps": 20, "log_every": 4, "eval_every": 8, "save_every": 4},
  }
  for dotted, value in changes.items():
    section, field = dotted.split(".")
    settings[section] = settings[section] | {field: value}
  return settings
