"""What can be measured of a trained run: one question a file."""

import importlib
import pathlib
from typing import Any, NamedTuple

import jax

# A new one is a file here, with `read(run, split, first) -> Reading`, and what
# it draws in rnnlab/figures/instruments.py.
ALL = sorted(
  path.stem
  for path in pathlib.Path(__file__).parent.glob("*.py")
  if path.stem != "__init__"
)


class Reading(NamedTuple):
  """The answer to one question."""

  tables: list  # of rows, each with a header in front
  record: dict
  draw: Any  # (path) -> path: the same as a figure


def read(what, run, split="validation", first=None) -> Reading:
  """Measures `what`, one of ALL, of a `trained.Trained` on examples of a split.

  first: so many, from the split's start; None is what the measure takes by
  itself. Raises ValueError where there is nothing to measure.
  """
  if what not in ALL:
    raise ValueError(f"what can be measured is {', '.join(ALL)}, not {what!r}")
  if run.task.recurrences is None:
    raise ValueError(
      f"{what}: this run's task does not say which recurrences it runs "
      "(Task.recurrences), so there is nothing to measure"
    )
  if not run.task.texts.get(split):
    raise ValueError(f"the {split} split holds no examples: nothing to measure")
  module = importlib.import_module(f"rnnlab.instruments.{what}")
  return module.read(run, split, first)


# Steps of a stream that are looked at, which has no end of its own.
STREAM = 128


def first_batch(task, params, split, rows) -> dict:
  """The first `rows` examples of a split, or all there are, as one batch.

  Of a stream it is the first steps: it may be cut anywhere.
  """
  rows = min(rows, len(task.texts[split]))
  batch = next(iter(task.eval_batches(split, rows, 0, rows)))
  if not jax.tree.leaves(jax.eval_shape(task.carry, params)):
    return batch
  return {name: array[:, :STREAM] for name, array in batch.items()}


def filled(row) -> list:
  """A table's row, with nothing where a value is None."""
  return ["" if value is None else value for value in row]
