"""What can be measured of a trained run: one function a question.

Each takes a `trained.Trained` and a split, and returns a `Reading`. A new one
needs a function here, its name in `ALL`, and whatever it draws in `figures`.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

from rnnlab import figures
from rnnlab.analysis import retention


class Reading(NamedTuple):
  """The answer: tables of rows with a header, a record, and how to draw it."""

  tables: list
  record: dict
  draw: Any  # (path) -> path


def read(what, run, split="validation", first=None) -> Reading:
  """Measures `what`, one of ALL, on the first examples of a split.

  first: so many of them; None is what the measure takes by itself. Raises
  ValueError where the run's task shows no recurrence, or has no such data.
  """
  if what not in ALL:
    raise ValueError(f"what can be measured is {', '.join(ALL)}, not {what!r}")
  if run.task.recurrences is None:
    raise ValueError(
      f"{what}: this run's task does not say which recurrences it runs "
      "(Task.recurrences), so there is nothing to measure"
    )
  if not run.task.texts[split]:
    raise ValueError(f"the {split} split is empty: nothing to measure")
  return ALL[what](run, split, first)


def _retention(run, split, first) -> Reading:
  """Half-lives, saturation and slopes of all gates, at the start and now."""
  task = run.task

  names = []

  @jax.jit
  def step(params, carry, batch):
    found = task.recurrences(params, carry, batch)
    names[:] = [read.name for read in found]
    sums = [retention.measure(read) for read in found]
    return task.report(params, carry, batch)[0], sums

  def measured(params):
    carry, sums = task.carry(params), None
    for batch in task.eval_batches(split, None, 0, first):
      carry, more = step(params, carry, batch)
      sums = retention.add(sums, more)
    return {
      f"{name}/{gate}": found
      for name, gates in zip(names, sums, strict=True)
      for gate, found in retention.summary(gates).items()
    }

  before, now = measured(run.initial()), measured(run.params)
  if not now:
    raise ValueError("retention: no cell of this run has a gate")
  rows, record = [["gate", "at step", *_SHOWN]], {}
  for name in now:
    for step_, found in ((0, before[name]), (run.step, now[name])):
      shown = {column: show(found) for column, show in _SHOWN.items()}
      cells = ["" if value is None else value for value in shown.values()]
      rows.append([name, step_, *cells])
      record.setdefault(name, []).append({"step": step_} | shown)

  def draw(path):
    return figures.retention(before, now, run.step, path)

  return Reading([rows], record, draw)


def _quantile(share):
  def show(found):
    if "half_life_H" not in found:
      return None
    # A value of its own: some may be infinite, and none lies between.
    value = np.quantile(found["half_life_H"], share, method="inverted_cdf")
    return float(value)

  return show


_SHOWN = {
  "steps": lambda found: found["steps"],
  "half-life 5%": _quantile(0.05),
  "median": _quantile(0.5),
  "95%": _quantile(0.95),
  "slope": lambda found: float(found["slope_H"].mean()),
  f"|logit|>{retention.LARGE:g}": lambda found: found["large"],
  "at 0": lambda found: found["zero"],
  "at 1": lambda found: found["one"],
}
ALL = {"retention": _retention}
