"""A sweep: the points that a config lists, each trained in its own directory.

workdir/sweep.csv       one row a point, rewritten whole after every point
workdir/<its settings>  the run of a point, the same as a single run's
workdir/lock            held while the sweep lives

Points share nothing but the process, so their order changes no number, and a
sweep that was killed and started again runs what is missing.
"""

import copy
import csv
import functools
import hashlib
import io
import math
import operator
import re
import time
import traceback
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from rnnlab import cli, rundir, strict_json, train, trained
from rnnlab.progress import clock
from rnnlab.update import evaluate

# Runs that differ in these alone are repetitions of one setting.
SEEDS = ("seed", "task.seed")
EXACT, NLL = "val/exact_match", "val/nll"
WORST = f"{EXACT}/worst"


class Point(NamedTuple):
  """One run of a sweep."""

  name: str  # of its directory
  settings: dict  # dotted name -> value, of all that the sweep varies
  config: dict  # all settings, for `train`


def points(sweep, arg, config) -> list[Point]:
  """The points that `sweep(add, arg)` lists, on top of config, a ConfigDict.

  sweep: a config file's function; it calls add({"opt.lr": 1e-3, "seed": 1})
  once a point, with dotted names; None means "not set". ValueError names what
  is no setting of config, a value of another type (as for a flag, an int does
  for a float and nothing else is converted), and points that would be one run.
  """
  listed, varied = {}, {}

  def add(settings):
    changed = copy.deepcopy(config)
    for name, value in settings.items():
      _set(changed, name, value)
    full = strict_json.settle(changed.to_dict(), "the sweep")
    # Of this point's settings alone: another point must not move its run.
    name = _name({field: _get(full, field) for field in settings})
    key = strict_json.dumps(full)
    if key in listed:
      raise ValueError(
        f"the sweep lists one run twice: {listed[key][0]} and {name}"
      )
    listed[key] = name, full
    varied.update(dict.fromkeys(settings))

  sweep(add, arg)
  if not listed:
    raise ValueError(f"the sweep {arg!r} lists no points")
  return [
    Point(name, {field: _get(full, field) for field in varied}, full)
    for name, full in listed.values()
  ]


def run(points, workdir, paddings=()) -> list[dict]:
  """Trains and evaluates the points in turn; returns the rows of sweep.csv.

  The metrics are those of the task's report on the validation split, at the
  best checkpoint, as they stand and again with so many columns of `paddings`
  added ("val/nll/padding=4"). A point that raises is recorded with its error,
  and tried again by the next call; a run that has ended is only evaluated.
  """
  paddings = sorted({0, *paddings})
  if paddings[0] < 0:
    raise ValueError(f"extra padding must be at least 0, not {paddings[0]}")
  rows = [
    {"point": point.name, **point.settings, "status": "waiting", "error": ""}
    for point in points
  ]
  directory = rundir.RunDir(workdir)
  directory.path.mkdir(parents=True, exist_ok=True)
  with directory:
    directory.acquire()
    _write(directory.path, rows)
    for i, point in enumerate(points):
      place = f"point {i + 1} of {len(points)}"
      cli.say(f"{place}: {point.name}")
      rows[i] |= _outcome(point, directory.path / point.name, paddings)
      _write(directory.path, rows)
      cli.say(f"{place}: {_told(rows[i])}{_left(rows)}")
  return rows


def summary(rows, settings) -> list[dict]:
  """One row a setting: the mean over its seeds, best first, failures last.

  rows: of `run`. settings: the names that the sweep varies. "<metric>/interval"
  is half the width of the 95 % interval of the mean, by Student's t; None where
  one run alone has finished.
  """
  fields = [name for name in settings if name not in SEEDS]
  groups = {}
  for row in rows:
    groups.setdefault(tuple(row[name] for name in fields), []).append(row)
  table = []
  for values, members in groups.items():
    done = [row for row in members if row["status"] == "done"]
    mean = dict(zip(fields, values, strict=True))
    mean |= {"points": len(members), "failed": len(members) - len(done)}
    for metric in (EXACT, NLL, WORST):
      if done and metric in done[0]:
        mean[metric], mean[f"{metric}/interval"] = interval(
          [row[metric] for row in done]
        )
    table.append(mean)
  return sorted(table, key=_rank)


def text(table) -> list[list[str]]:
  """The rows of `summary` as rows of text for a person, a header first."""
  columns = dict.fromkeys(name for row in table for name in row)
  shown = [name for name in columns if not name.endswith("/interval")]
  return [shown] + [[_cell(row, name) for name in shown] for row in table]


def _cell(row, name):
  value, half = row.get(name, ""), row.get(f"{name}/interval")
  if f"{name}/interval" not in row:
    return str(value)
  return f"{value:.4f}" + ("" if half is None else f" \u00b1{half:.4f}")


# Student's t: half of the 5 % lies above it, at 1, 2, .. degrees of freedom.
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
T_95 += (2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086)


def interval(values) -> tuple[float, float | None]:
  """The mean and half the width of its 95 % interval, None for one value.

  Past 21 values the interval is that of 21: up to 6 % too wide.
  """
  n = len(values)
  if n == 1:
    return values[0], None
  with np.errstate(invalid="ignore"):  # nan and inf stay what they are
    mean, spread = float(np.mean(values)), float(np.std(values, ddof=1))
  return mean, T_95[min(n - 1, len(T_95)) - 1] * spread / math.sqrt(n)


def _get(config, name):
  return functools.reduce(operator.getitem, name.split("."), config)


def _set(config, name, value):
  """Sets a dotted name of a ConfigDict, by the rules of a flag."""
  *sections, field = name.split(".")
  for section in sections:
    inside = isinstance(config, ConfigDict) and section in config
    config = config[section] if inside else None
  known = isinstance(config, ConfigDict) and field in config
  if not known or isinstance(config[field], ConfigDict):
    raise ValueError(f"the sweep sets {name!r}, which is no setting here")
  value = strict_json.settle({field: value}, f"the sweep, {name}")[field]
  try:
    # True is an int to Python, and nobody who writes it means 1.
    if isinstance(value, bool) and config.get_type(field) is not bool:
      raise TypeError
    config[field] = value
  except TypeError:
    raise ValueError(
      f"the sweep sets {name} to {value!r}, {type(value).__name__}, where "
      f"it takes {config.get_type(field).__name__}"
    ) from None


def _name(settings):
  """A directory's name that a person can read and a shell need not quote."""
  text = ",".join(f"{n}={v}" for n, v in sorted(settings.items())) or "base"
  name = re.sub(r"[^\w.,=+-]", "_", text, flags=re.ASCII)[:180]
  if name != text:
    name += "-" + hashlib.sha256(text.encode()).hexdigest()[:8]
  return name


def _outcome(point, workdir, paddings):
  """What the row of a point says of it once it was run."""
  began = time.monotonic()
  try:
    return {"status": "done"} | _run(point.config, workdir, paddings)
  except Exception as error:
    if not isinstance(error, ValueError | OSError):
      traceback.print_exc()  # nothing that a user can get wrong
    return {
      "status": "failed",
      # On one line, whatever its message is.
      "error": " ".join(f"{type(error).__name__}: {error}".split()),
      "seconds": round(time.monotonic() - began, 3),
    }


def _run(config, workdir, paddings):
  record = train.train(config, workdir)
  best = trained.load(workdir)
  report, carry = jax.jit(best.task.report), best.task.carry(best.params)
  found = {
    "best_step": record["best_step"],
    "steps": record["step"],
    "seconds": record["seconds"],
  }
  for extra in paddings:
    batches = best.task.eval_batches("validation", extra=extra)
    for name, mean in evaluate(report, best.params, carry, batches).items():
      column = f"val/{name}/padding={extra}" if extra else f"val/{name}"
      found[column] = mean.value(column)
  if EXACT in found and len(paddings) > 1:
    found[WORST] = min(v for name, v in found.items() if name.startswith(EXACT))
  return found


def _write(workdir: Path, rows):
  text = io.StringIO()
  columns = dict.fromkeys(name for row in rows for name in row)
  table = csv.DictWriter(text, columns, lineterminator="\n")
  table.writeheader()
  table.writerows(rows)
  rundir.write_whole(workdir / "sweep.csv", text.getvalue())


def _told(row):
  if row["status"] == "failed":
    return f"failed: {row['error']}"
  figures = [f"{n} {row[n]:.4f}" for n in (EXACT, NLL, WORST) if n in row]
  return f"{', '.join(figures)}  {clock(row['seconds'])}"


def _left(rows):
  # By what the runs took in all processes: passing over one is quick.
  took = [row["seconds"] for row in rows if row["status"] == "done"]
  waiting = sum(row["status"] == "waiting" for row in rows)
  if not took or not waiting:
    return ""
  return f"  left {clock(waiting * sum(took) / len(took))}"


def _rank(row):
  nll = row.get(NLL)
  lost = 2 if nll is None else int(math.isnan(nll))
  return lost, -row.get(EXACT, 0.0), 0.0 if lost else nll
