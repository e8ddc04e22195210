"""What training takes for every length and chunk, and what generating takes."""

import math

from rnnlab import figures
from rnnlab.analysis import memory
from rnnlab.instruments import Reading

# Lengths that are predicted, and those that are compiled too.
LENGTHS = tuple(2**i for i in range(6, 14))
COMPILED = (256, 2048)


def read(run, split, first) -> Reading:
  """By cell of the run: bytes for `first` rows, 8 unless it is said."""
  task, B = run.task, first or 8
  batch = next(iter(task.eval_batches(split, 1, 0, 1)))
  rows = [["cell", "steps", "scan", "chunk", "predicted MiB", "compiled MiB"]]
  record, curves = {}, {}
  for each in _cells(
    task.recurrences(run.params, task.carry(run.params), batch)
  ):
    name, cell, params, d_in = each
    step = memory.step_of(cell, params, d_in)
    own = curves[name] = {"predicted": {}, "compiled": {}}
    for scan in ("plain", "per step", "chunks"):
      own["predicted"][scan] = [
        (T, memory.predict([step], B, T, _chunk(scan, step, T)))
        for T in LENGTHS
      ]
    for T in COMPILED:
      for scan in ("plain", "per step", "chunks"):
        chunk = _chunk(scan, step, T)
        said = memory.predict([step], B, T, chunk)
        found = memory.compiled(cell, params, B, T, d_in, chunk)
        own["compiled"].setdefault(scan, []).append((T, found))
        shown = [name, T, scan, "" if chunk is None else chunk]
        rows.append([*shown, said / 2**20, found / 2**20])
        record.setdefault(name, []).append(
          {"steps": T, "scan": scan, "chunk": chunk}
          | {"predicted": said, "compiled": found, "rows": B}
        )
      found = memory.generating(cell, params, B, T, d_in)
      own["compiled"].setdefault("generating", []).append((T, found))
      rows.append([name, T, "generating", "", "", found / 2**20])

  def draw(path):
    return figures.memory(curves, B, path)

  return Reading([rows], record, draw)


def _chunk(scan, step, T):
  if scan != "chunks":
    return None if scan == "plain" else 1
  # About the least there is, at a power of two.
  least = T * step.carry / (step.kept + step.x)
  return max(2, 2 ** round(math.log2(math.sqrt(least))))


def _cells(recurrences):
  """(name, cell, params, width of the input): of every distinct size."""
  seen = {}
  for each in recurrences:
    if each.memory is not None:
      continue  # what it attends to is of the source's length too
    x = each.x
    d_in = (x.table_VD if hasattr(x, "table_VD") else x).shape[-1]
    key = str(memory.step_of(each.cell, each.params, d_in))
    seen.setdefault(key, (each.name, each.cell, each.params, d_in))
  if not seen:
    raise ValueError(
      "memory: all that this run runs reads a memory of a source"
    )
  return list(seen.values())
