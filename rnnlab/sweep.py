"""A sweep: the points that a config lists, each trained in its own directory.

workdir/sweep.csv       one row a point, rewritten whole after every point
workdir/<its settings>  the run of a point, the same as a single run's
workdir/lock            held while the sweep lives

Points that differ in what no compiled program knows of (`program.DATA`) share
one, and can be trained at once. Their order changes no number, and a sweep that
was killed and started again runs what is missing.
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
from concurrent import futures
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from rnnlab import backend, program, rundir, strict_json, train, trained
from rnnlab.instruments import retention
from rnnlab.progress import Progress, clock
from rnnlab.update import evaluate

# Runs that differ in these alone are repetitions of one setting.
SEEDS = ("seed", "task.seed")
EXACT = "val/exact_match"
SHARES = "val/accuracy/identifiers", "val/accuracy"
WORST = f"{EXACT}/worst"
HALF_LIFE = "half-life"


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


def share(points, index, count) -> list[Point]:
  """Part `index` of `count`, from 0 on; neighbours in the list stay together.

  ValueError where there is no such part.
  """
  if not 0 <= index < count:
    raise ValueError(f"part {index} of {count}: it has to be 0 to {count - 1}")
  n = len(points)
  return points[n * index // count : n * (index + 1) // count]


def run(
  points,
  workdir,
  paddings=(),
  together=None,
  stacked=None,
  part="",
  half_lives=False,
  shared=None,
) -> list[dict]:
  """Trains and evaluates the points; returns the rows of sweep.csv.

  The metrics are those of the task's report on the validation split, at the
  best checkpoint and, under "final/", at the last; at the best again with so
  many columns of `paddings` added ("val/nll/padding=4"). A point that raises is
  recorded with its error, and tried again by the next call; a run that has
  ended is left as it is.

  together: train so many points at once; 1 is one after another. stacked: at
  once means in one vmapped call for those that share a program, rather than in
  threads, each of which computes what a run alone does, bit for bit. By default
  one thread a core on a CPU, where that is faster, and else 16 in a call; of
  points that have a wall-clock budget one at a time. part: what the names of
  the table and the lock end with, where several processes have a share each.
  half_lives: measure also what the gates keep on validation examples, before
  the first update and at the best checkpoint: the half-life of the direct path
  in steps, the median over units, a column a gate. shared: a `program.Shared`,
  for who wants to know what was compiled.
  """
  paddings = sorted({*paddings} - {0})
  if paddings and paddings[0] < 0:
    raise ValueError(f"extra padding must be at least 0, not {paddings[0]}")
  if stacked is None:
    stacked = backend.kind() != "cpu"
  together = together or (16 if stacked else backend.cores())
  rows = [
    {"point": point.name, **point.settings, "status": "waiting", "error": ""}
    for point in points
  ]
  directory = rundir.RunDir(workdir)
  directory.path.mkdir(parents=True, exist_ok=True)
  directory.lock = directory.path / f"lock{part}"
  table = directory.path / f"sweep{part}.csv"
  shared = shared or program.Shared()
  more = paddings, half_lives, shared, {}
  with directory, Progress("sweep") as progress:
    directory.acquire()
    _write(table, rows)
    parts = progress.parts([point.name for point in points])
    members = [
      (point.config, directory.path / point.name, own)
      for point, own in zip(points, parts, strict=True)
    ]
    for i, result in _results(members, together, stacked, shared):
      point, workdir, own = points[i], members[i][1], parts[i]
      rows[i] |= _outcome(result, point, workdir, *more)
      own.update(1, _told(rows[i]), keep=True)
      _write(table, rows)
  return rows


def _results(members, together, stacked, shared):
  """(number, result) of each member as it ends.

  members: of (config, workdir, progress). A result is what became of it, a
  record or an Exception, and the seconds.
  """
  rest = {}
  for i, member in enumerate(members):
    if together == 1 or member[0]["train"].get("seconds"):
      yield i, _result(member, shared)
    else:
      rest[i] = member
  if not stacked:
    yield from _threads(rest, together, shared)
    return
  kinds = {i: program.kind(config) for i, (config, *_) in rest.items()}
  for call in _calls(kinds, together):
    if len(call) == 1:
      yield call[0], _result(members[call[0]], shared)
      continue
    began = time.monotonic()
    results = train.train_abreast([members[i] for i in call], shared)
    took = _since(began)
    yield from ((i, (r, took)) for i, r in zip(call, results, strict=True))


def _result(member, shared, signalled=None):
  config, workdir, progress = member
  began = time.monotonic()
  try:
    result = train.train(config, workdir, None, shared, progress, signalled)
  except Exception as error:
    result = error
  return result, _since(began)


def _since(began):
  return round(time.monotonic() - began, 3)


def _threads(members, count, shared):
  """`_results` of members, by number, that are trained `count` at a time.

  jax computes in order what one thread asks for, and beside it what others do:
  small runs, of which each keeps one core busy.
  """

  def job(member):
    if signalled:
      raise SystemExit("stopped by a signal; the same command goes on")
    return _result(member, shared, signalled)

  with (
    train.interruptible() as signalled,
    futures.ThreadPoolExecutor(count) as pool,
  ):
    jobs = {pool.submit(job, member): i for i, member in members.items()}
    try:
      for done in futures.as_completed(jobs):
        yield jobs[done], done.result()
    finally:
      signalled.append(None)  # what is under way saves and ends, no more begin


def _calls(kinds, together):
  """The numbers of the points that are stacked, call by call.

  kinds: {number: of its program}.
  """
  groups, calls = {}, []
  for i, kind in kinds.items():
    groups.setdefault(kind, []).append(i)
  for members in groups.values():
    # Of one size where they divide: as many members, so many programs.
    n = -(-len(members) // together)
    cuts = [len(members) * i // n for i in range(n + 1)]
    calls += [members[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
  return calls


def _outcome(result, point, workdir, *more):
  """What the row of a point says of it once it was run."""
  result, took = result
  try:
    if isinstance(result, Exception):
      raise result
    return {"status": "done"} | _figures(result, point.config, workdir, *more)
  except Exception as error:
    if not isinstance(error, ValueError | OSError):
      traceback.print_exc()  # nothing that a user can get wrong
    return {
      "status": "failed",
      # On one line, whatever its message is.
      "error": " ".join(f"{type(error).__name__}: {error}".split()),
      "seconds": took,
    }


def _figures(record, config, workdir, paddings, half_lives, shared, meters):
  """The best and last figures of a run, as it wrote them down; and more."""
  log = rundir.MetricsLog.read(rundir.RunDir(workdir).metrics)
  figures = {
    row["step"]: {n: v for n, v in row.items() if n.startswith("val/")}
    for row in log
  }
  best, last = record["best_step"], record["step"]
  if best is None:
    raise ValueError("no evaluation after step 0 gave a finite loss")
  found = {
    "metric": next(n for n in record if n.startswith("best/"))[5:],
    "best_step": best,
    "steps": last,
    "seconds": record["seconds"],
    **figures[best],
    **{f"final/{name}": value for name, value in figures[last].items()},
  }
  if not paddings and not half_lives:
    return found
  loaded, kind = trained.load(workdir), program.kind(config)
  for extra in paddings:
    carry = loaded.task.carry(loaded.params)
    batches = loaded.task.eval_batches("validation", extra=extra)
    report = shared.programs[kind].report
    for name, mean in evaluate(report, loaded.params, carry, batches).items():
      column = f"val/{name}/padding={extra}"
      found[column] = mean.value(column)
  if EXACT in found and paddings:
    found[WORST] = min(v for name, v in found.items() if name.startswith(EXACT))
  if half_lives and loaded.task.recurrences:
    data = strict_json.dumps(config["task"])
    meter = meters.setdefault((kind, data), retention.meter(loaded.task))
    for when, params in (("start", loaded.initial()), ("end", loaded.params)):
      for gate, read in meter(params, "validation").items():
        if (median := retention.half_life(read)) is not None:
          found[f"{HALF_LIFE}/{gate}/{when}"] = median
  return found


def summary(rows, settings) -> list[dict]:
  """One row a setting: the mean over its seeds, best first, failures last.

  rows: of `run`. settings: the names that the sweep varies. "metric" is what
  the best checkpoints were chosen by. "<name>/interval" is half the width of
  the 95 % interval of a mean, by Student's t; None where one run alone has
  finished.
  """
  table = []
  for setting, members in _settings(rows, settings):
    done = [row for row in members if row["status"] == "done"]
    mean = setting | {
      "points": len(members),
      "failed": len(members) - len(done),
    }
    mean["metric"] = metric = done[0]["metric"] if done else None
    kept = [n for n in (done or [{}])[0] if n.startswith(HALF_LIFE)]
    for name in (EXACT, *SHARES, metric, f"final/{metric}", WORST, *kept):
      if done and name in done[0]:
        mean[name], mean[f"{name}/interval"] = interval(
          [row[name] for row in done]
        )
    table.append(mean)
  return sorted(table, key=_rank)


def curves(rows, settings, workdir) -> list[dict]:
  """What a figure shows of each setting: its values, and its runs' losses.

  "runs" are pairs (steps, losses) of the evaluations of the runs that were
  done; "final" their best losses, "at" the settings, "level" the loss without a
  memory where the task knows one.
  """
  found = []
  for setting, members in _settings(rows, settings):
    one = {"at": setting, "runs": [], "final": [], "level": None}
    for row in members:
      if row["status"] != "done":
        continue
      path, metric = Path(workdir) / row["point"], row["metric"]
      log = rundir.MetricsLog.read(path / "metrics.jsonl")
      log = [entry for entry in log if metric in entry]
      one["runs"].append([[e["step"], e[metric]] for e in log])
      one["final"].append(row[metric])
      one["metric"] = metric
      one["level"] = rundir.load(path)[1]["data"].get("memoryless")
    found.append(one)
  return found


def _settings(rows, settings):
  """[(the settings without the seeds, the rows that have them)]."""
  fields = [name for name in settings if name not in SEEDS]
  groups = {}
  for row in rows:
    groups.setdefault(tuple(row[name] for name in fields), []).append(row)
  return [
    (dict(zip(fields, values, strict=True)), members)
    for values, members in groups.items()
  ]


def text(table) -> list[list[str]]:
  """The rows of `summary` as rows of text for a person, a header first.

  A setting that all share is left out.
  """
  columns = dict.fromkeys(name for row in table for name in row)
  del columns["metric"]  # a column has its name
  before = [*columns].index("points")
  for name in [*columns][:before]:
    if len(table) > 1 and len({repr(row[name]) for row in table}) == 1:
      del columns[name]
  shown = [name for name in columns if not name.endswith("/interval")]
  return [shown] + [[_cell(row, name) for name in shown] for row in table]


def _cell(row, name):
  value, half = row.get(name, ""), row.get(f"{name}/interval")
  if f"{name}/interval" not in row:
    return "" if value is None else str(value)
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


def _write(path: Path, rows):
  text = io.StringIO()
  columns = dict.fromkeys(name for row in rows for name in row)
  table = csv.DictWriter(text, columns, lineterminator="\n")
  table.writeheader()
  table.writerows(rows)
  rundir.write_whole(path, text.getvalue())


def _told(row):
  if row["status"] == "failed":
    return f"failed: {row['error']}"
  figures = [f"{n} {v:.4f}" for n, v in row.items() if n.startswith("val/")]
  return f"{', '.join(figures)}  {clock(row['seconds'])}"


def _rank(row):
  loss = row.get(row["metric"])
  lost = 2 if loss is None else int(math.isnan(loss))
  return lost, -row.get(EXACT, 0.0), 0.0 if lost else loss
