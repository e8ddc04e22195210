"""Slow points of what runs by itself, under an input that is held at zero."""

import numpy as np

from rnnlab import cli, figures
from rnnlab.analysis import fixed_points
from rnnlab.instruments import Reading, first_batch

# Examples whose states are started from, unless it is said how many.
FIRST = 64
# Points that are shown of a recurrence, the slowest ones.
SHOWN = 8


def read(run, split, first) -> Reading:
  """By recurrence: its slow points and the eigenvalues there."""
  task = run.task
  batch = first_batch(task, run.params, split, first or FIRST)
  tables, record, found = [], {}, {}
  for each in task.recurrences(run.params, task.carry(run.params), batch):
    try:
      points = found[each.name] = fixed_points.find(each)
    except ValueError as error:
      cli.say(f"left out: {error}")
      continue
    largest_P = np.abs(points.eigenvalues_PN[:, 0])
    growing_P = (np.abs(points.eigenvalues_PN) > 1).sum(1)
    columns = {
      "speed": points.speed_P,
      "starts": points.starts_P,
      "largest |eigenvalue|": largest_P,
      "growing directions": growing_P,
    }
    listed = {name: x[:SHOWN].tolist() for name, x in columns.items()}
    tables.append([[each.name, *listed]])
    for p, row in enumerate(zip(*listed.values(), strict=True), start=1):
      tables[-1].append([f"point {p}", f"{row[0]:.2e}", *row[1:]])
    record[each.name] = {"points": len(points.speed_P)} | listed
  if not found:
    raise ValueError("fixed_points: nothing of this run runs by itself")

  def draw(path):
    return figures.fixed_points(found, SHOWN, path)

  return Reading(tables, record, draw)
