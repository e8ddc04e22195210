"""The run directory: its layout, its lock, its record and its metrics.

config.json     the settings, exactly as they were given
facts.json      what else must stay true: vocabulary, data hashes; versions and
                devices, which may change
changes.jsonl   which of these changed on which resume
metrics.jsonl   one row per logged step
checkpoints/    what rnnlab.checkpoint writes
lock            held while a trainer lives

Nothing inside depends on where the directory lies, so it may be moved.
"""

import datetime
import fcntl
import fnmatch
import json
import os
from pathlib import Path

from rnnlab import strict_json

# What a resumed run may change (and changes.jsonl records): how long it runs,
# how often it reports, where the same bytes lie, which libraries and devices
# run it. All else must be equal, since it shaped the arithmetic of what was
# done already.
MAY_CHANGE = (
  "train.*",
  "task.path",
  "task.eval_batch_size",
  "task.buckets",
  "versions.*",
  "devices.*",
)

# What of it may not: which batches an update has read.
MUST_STAY = ("train.accumulate",)

_ABSENT = object()


def write_whole(path: Path, text: str) -> None:
  """Writes a file so that a reader finds the old text or the new, no other."""
  part = path.with_name(path.name + ".part")
  with open(part, "w", encoding="utf-8") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  os.replace(part, path)
  sync_folder(path.parent)


def sync_folder(path: Path) -> None:
  """Makes the renames inside a folder survive a power cut."""
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


class RunDir:
  """The paths of one run, and its lock where `claim` made it.

  As a context manager it gives the lock back at the end; the end of the
  process gives it back in any case.
  """

  def __init__(self, path: str | os.PathLike):
    if not os.fspath(path):
      raise ValueError("the run directory (--workdir) has an empty name")
    self.path = Path(path).absolute()
    self.config = self.path / "config.json"
    self.facts = self.path / "facts.json"
    self.changes = self.path / "changes.jsonl"
    self.metrics = self.path / "metrics.jsonl"
    self.checkpoints = self.path / "checkpoints"
    self.lock = self.path / "lock"
    self._held = None

  def acquire(self) -> None:
    """Takes the lock; ValueError names the process that holds it."""
    file = open(self.lock, "a+", encoding="utf-8")
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      with file:
        file.seek(0)
        holder = file.read().strip()
      raise ValueError(
        f"{self.path} is being trained by process {holder}; wait for it to "
        "end or name another directory"
      ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    self._held = file

  def release(self) -> None:
    """Gives the lock back."""
    if self._held:
      self._held.close()

  def __enter__(self):
    return self

  def __exit__(self, *error):
    self.release()


def claim(workdir: str | os.PathLike, config: dict, facts: dict) -> RunDir:
  """The run directory, locked for training with this config and these facts.

  A new one gets both written down. In an old one both must be equal to what is
  written; where only names in MAY_CHANGE differ, the change is recorded and
  the new value written. config is as `settle` returns it. ValueError lists
  every other difference with both values, names the process that trains here
  already, and refuses a directory whose results have no config.json.
  """
  run = RunDir(workdir)
  if run.path.exists() and not run.path.is_dir():
    raise ValueError(f"{run.path} is a file; a run needs a directory")
  results = [p.name for p in (run.metrics, run.checkpoints) if p.exists()]
  if results and not run.config.exists():
    raise ValueError(
      f"{run.path} holds {' and '.join(results)} but no config.json, so it "
      "cannot be resumed; name another directory"
    )
  run.path.mkdir(parents=True, exist_ok=True)
  run.acquire()
  try:
    # Where nothing was done yet, a first attempt that failed binds nobody.
    if results and run.config.exists():
      changes = _changes(run, config, facts)
      if not changes:
        return run
      # The record first: killed in between, it tells a change twice, never
      # loses one.
      told = run.changes.read_text("utf-8") if run.changes.exists() else ""
      write_whole(run.changes, told + changes)
    # config.json last: with it a directory becomes a run.
    write_whole(run.facts, strict_json.dumps(facts, indent=1) + "\n")
    write_whole(run.config, strict_json.dumps(config, indent=1) + "\n")
  except BaseException:
    run.release()
    raise
  return run


def load(workdir: str | os.PathLike) -> tuple[dict, dict]:
  """(config, facts) of a run, for tools that read it; takes no lock."""
  run, values = RunDir(workdir), []
  for path in (run.config, run.facts):
    try:
      values.append(strict_json.loads(path.read_text(encoding="utf-8")))
      if not isinstance(values[-1], dict):
        raise ValueError("it holds no fields")
    except (FileNotFoundError, NotADirectoryError):
      raise ValueError(
        f"{run.path} is not a run directory: it has no {path.name}"
      ) from None
    except ValueError as error:
      raise ValueError(f"{path} is damaged: {error}") from error
  return tuple(values)


class MetricsLog:
  """metrics.jsonl: one strict JSON line per row, each row with its "step"."""

  def __init__(self, path: str | os.PathLike):
    self.path = Path(path).absolute()

  def append(self, row: dict) -> None:
    """Adds a row of numbers, strings and None, as `plain_json` writes it."""
    with open(self.path, "a", encoding="utf-8") as file:
      file.write(strict_json.plain_json(row) + "\n")

  def rewind(self, step: int) -> list[str]:
    """Drops what a resume from `step` will write again; notes what it was."""
    if not self.path.exists():
      return []
    rows, cut = _whole_rows(self.path)
    dropped = [row["step"] for row, _ in rows if row["step"] > step]
    notes = [f"{self.path.name}: dropped a last line cut short"] if cut else []
    if dropped:
      notes.append(
        f"{self.path.name}: dropped {len(dropped)} rows, steps {dropped[0]} "
        f"to {dropped[-1]}, to be written again"
      )
    kept = "".join(line + "\n" for row, line in rows if row["step"] <= step)
    write_whole(self.path, kept)
    return notes

  @staticmethod
  def read(path: str | os.PathLike) -> list[dict]:
    """The rows, non-finite values as floats again; [] before the first.

    A last line cut short, as a killed run leaves it, is passed over; damage
    elsewhere is a ValueError with the line number.
    """
    if not Path(path).exists():
      return []
    rows = [row for row, _ in _whole_rows(Path(path))[0]]
    for row in rows:
      row |= {k: float(v) for k, v in row.pop("nonfinite", {}).items()}
    return rows


def _whole_rows(path):
  """([(row, line)], whether a line cut short followed them)."""
  lines = path.read_bytes().split(b"\n")
  if not lines[-1]:
    lines.pop()
  rows = []
  for number, line in enumerate(lines, start=1):
    try:
      text = line.decode()
      row = json.loads(text, parse_constant=strict_json.refuse_word)
      if not isinstance(row, dict) or "step" not in row:
        raise ValueError("it is no row with a step")
      rows.append((row, text))
    except ValueError as error:
      if number == len(lines):
        return rows, True
      raise ValueError(f"{path}, line {number} is damaged: {error}") from error
  return rows, False


def _changes(run, config, facts):
  """The lines for changes.jsonl; ValueError where a change is not allowed."""
  now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
  lines, refused = "", []
  for old, new in zip(load(run.path), (config, facts), strict=True):
    old, new = _flatten(old), _flatten(new)
    for name in sorted(old.keys() | new.keys()):
      pair = old.get(name, _ABSENT), new.get(name, _ABSENT)
      if _ABSENT not in pair and _same(*pair):
        continue
      may = any(fnmatch.fnmatchcase(name, pattern) for pattern in MAY_CHANGE)
      if may and name not in MUST_STAY:
        row = {"time": now, "field": name, "old": pair[0], "new": pair[1]}
        row = {key: v for key, v in row.items() if v is not _ABSENT}
        lines += strict_json.dumps(row) + "\n"
      else:
        refused.append(_difference(name, *pair))
  if refused:
    raise ValueError(
      f"{run.path} was started with other settings or data and cannot be "
      f"resumed with these: {'; '.join(refused)}"
    )
  return lines


def _flatten(value, name=""):
  if not isinstance(value, dict) or not value:
    return {name: value}
  flat = {}
  for key, inner in value.items():
    flat |= _flatten(inner, f"{name}.{key}" if name else key)
  return flat


def _same(old, new):
  # By their text: 1, 1.0 and True differ, and nan equals nan.
  return strict_json.dumps(old) == strict_json.dumps(new)


def _difference(name, old, new):
  sequences = all(isinstance(v, tuple | list) for v in (old, new))
  if sequences and max(len(old), len(new)) > 8:
    # A vocabulary: where it differs says more than all of it.
    at, shared = 0, min(len(old), len(new))
    while at < shared and _same(old[at], new[at]):
      at += 1
    old, new = (v[at] if at < len(v) else _ABSENT for v in (old, new))
    name = f"{name}[{at}]"
  old, new = ("nothing" if v is _ABSENT else repr(v) for v in (old, new))
  return f"{name} was {old}, now {new}"
