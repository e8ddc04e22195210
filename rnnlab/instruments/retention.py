"""Half-lives, saturation and slopes of all gates, at the start and now."""

import functools

import jax
import numpy as np

from rnnlab import figures
from rnnlab.analysis import retention
from rnnlab.instruments import Reading, filled


def meter(task):
  """A function (params, split, first) -> {"<recurrence>/<gate>": what it is}.

  Of `retention.summary`, over all examples of the split unless `first` says
  fewer. Compiled once for all parameters.
  """
  names = []

  @jax.jit
  def step(params, carry, batch):
    found = task.recurrences(params, carry, batch)
    names[:] = [read.name for read in found]
    sums = [retention.measure(read) for read in found]
    return task.report(params, carry, batch)[0], sums

  def measured(params, split, first=None):
    carry, sums = task.carry(params), None
    for batch in task.eval_batches(split, None, 0, first):
      carry, more = step(params, carry, batch)
      sums = retention.add(sums, more)
    return {
      f"{name}/{gate}": found
      for name, gates in zip(names, sums, strict=True)
      for gate, found in retention.summary(gates).items()
    }

  return measured


def read(run, split, first) -> Reading:
  """By gate, before the first update and at the step of the run."""
  measured = meter(run.task)
  before = measured(run.initial(), split, first)
  now = measured(run.params, split, first)
  if not now:
    raise ValueError("retention: no cell of this run has a gate")
  rows, record = [["gate", "at step", *SHOWN]], {}
  for name in now:
    for step_, found in ((0, before[name]), (run.step, now[name])):
      shown = {column: show(found) for column, show in SHOWN.items()}
      rows.append(filled([name, step_, *shown.values()]))
      record.setdefault(name, []).append({"step": step_} | shown)

  def draw(path):
    return figures.retention(before, now, run.step, path)

  return Reading([rows], record, draw)


def half_life(found, share=0.5):
  """So many units of a gate have at most this; None off the direct path."""
  if "half_life_H" not in found:
    return None
  # A value of its own: some may be infinite, and none lies between.
  value = np.quantile(found["half_life_H"], share, method="inverted_cdf")
  return float(value)


SHOWN = {
  "steps": lambda found: found["steps"],
  "half-life 5%": functools.partial(half_life, share=0.05),
  "median": half_life,
  "95%": functools.partial(half_life, share=0.95),
  "slope": lambda found: float(found["slope_H"].mean()),
  f"|logit|>{retention.LARGE:g}": lambda found: found["large"],
  "at 0": lambda found: found["zero"],
  "at 1": lambda found: found["one"],
}
