"""Products of Jacobians by distance, and what is often read in their place."""

import math

import jax
import numpy as np

from rnnlab import figures
from rnnlab.analysis import sensitivity
from rnnlab.instruments import Reading, filled, first_batch

# Examples, unless it is said how many.
FIRST = 16


def read(run, split, first) -> Reading:
  """By recurrence and distance, over the first examples of a split."""
  task, names = run.task, []
  batch = first_batch(task, run.params, split, first or FIRST)

  @jax.jit
  def measure(params):
    found = task.recurrences(params, task.carry(params), batch)
    names[:] = [read.name for read in found]
    return [sensitivity.measure(read) for read in found]

  measured = jax.device_get(measure(run.params))
  overview, tables, record, curves = [["recurrence", *SHOWN]], [], {}, {}
  for name, found in zip(names, measured, strict=True):
    shown = {column: show(found) for column, show in SHOWN.items()}
    overview.append(filled([name, *shown.values()]))
    distance, own = by_distance(found)
    curves[name] = {"distance": distance} | own
    middle = {column: [spread[1] for spread in own[column]] for column in own}
    record[name] = shown | {"distance": distance, "log10": middle}
    tables.append([[f"{name}: distance", *own]])
    for row in zip(distance, *middle.values(), strict=True):
      tables[-1].append([row[0], *map(power_of_ten, row[1:])])

  def draw(path):
    return figures.sensitivity(curves, path)

  return Reading([overview, *tables], record, draw)


def by_distance(found) -> tuple[list, dict]:
  """Distances that a row has, and for each the curves' 10, 50 and 90 %, log10.

  found: of `sensitivity.measure`. The gradient is relative to its norm one step
  before the end.
  """
  there_D = np.isfinite(found["log_bound_DB"]).any(1)
  distance_D1 = found["distance_D"][:, None]
  gradient_DB = found["log_gradient_DB"]
  curves = {
    "product": found["log_gain_DBK"][..., 0],
    "bound": found["log_bound_DB"],
    "radius": distance_D1 * np.log(found["radius_B"]),
    "direct path": found["log_direct_DB"],
    "gradient": gradient_DB - gradient_DB[:1],
  }
  missing_DB = np.isnan(found["log_bound_DB"])
  spreads = {
    name: [
      _spread(log_B[~missing_B])
      for log_B, missing_B, there in zip(
        log_DB, missing_DB, there_D, strict=True
      )
      if there
    ]
    for name, log_DB in curves.items()
    if log_DB is not None
  }
  return found["distance_D"][there_D].tolist(), spreads


def power_of_ten(log10) -> str:
  """A number that may have no float, from its logarithm: 3.2e-431."""
  if not math.isfinite(log10):
    return {-math.inf: "0", math.inf: "inf"}.get(log10, "nan")
  exponent = math.floor(log10)
  mantissa = f"{10 ** (log10 - exponent):.2f}"
  if mantissa == "10.00":
    mantissa, exponent = "1.00", exponent + 1
  return f"{mantissa}e{exponent:+03d}"


def _spread(log_B):
  shares = np.quantile(log_B, (0.1, 0.5, 0.9), method="inverted_cdf")
  return (shares / math.log(10)).tolist()


def _median(name, *index):
  def show(found):
    if found[name] is None:
      return None
    return float(np.nanmedian(found[name][(..., *index)]))

  return show


SHOWN = {
  "steps": _median("length_B"),
  "exponent": _median("exponent_BK", 0),
  "norm": _median("norm_B"),
  "radius": _median("radius_B"),
  **{term: _median("share_B3", i) for i, term in enumerate(sensitivity.TERMS)},
  f"|h|>{sensitivity.SATURATED:g}": _median("saturated_B"),
  "slope": _median("slope_B"),
}
