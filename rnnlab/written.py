"""What a run's samples are like, as a table next to held-out texts."""

import numpy as np

from rnnlab import metrics
from rnnlab.analysis import evidence
from rnnlab.rundir import MetricsLog, RunDir

SIDES = "samples", "held out"
HEADING = {
  "name": "names",
  "text": "texts",
  "python": "texts (resembling a program is not running)",
}


def measure(run, workdir, samples, prefix="") -> tuple[list, dict]:
  """(rows with a header in front, record): every measure for both sides.

  samples: of the run's `generate`, all with that prefix. Held-out texts are as
  many and, unless they are names, as long. The nll is per character (of names,
  and stop) by the model itself: of what it drew, and on validation as the run
  logged it, if it did at this step.
  """
  task, texts = run.task, [sample["text"] for sample in samples]
  train, held_out = task.texts["train"], task.texts["validation"]
  if task.writes == "name":
    sides = texts, held_out[:: max(len(held_out) // len(texts), 1)]
    sides = texts, sides[1][: len(texts)]
    found = [evidence.of_names(side, train) for side in sides]
  else:
    of = {"python": evidence.of_python, "text": evidence.of_text}[task.writes]
    sides = texts, evidence.like(texts, held_out)
    found = [of(side) for side in sides]
    copied = evidence.longest_copied([*sides[0], *sides[1]], train)
    for own in found:
      own["longest run that training has"] = copied[: len(texts)]
      copied = copied[len(texts) :]
  counts = [
    f"{len(side)} {name}" for side, name in zip(sides, SIDES, strict=True)
  ]
  rows = [[HEADING[task.writes], *counts]]
  nll = _nll_of(samples, task, prefix), _validation(run, workdir)
  record = {"nll": dict(zip(SIDES, nll, strict=True))}
  rows.append(["nll by the model", *("" if x is None else x for x in nll)])
  for name in found[0]:
    both = [_summary(own[name]) for own in found]
    record[name] = {s: value for s, (value, _) in zip(SIDES, both, strict=True)}
    rows.append([name, *(shown for _, shown in both)])
  return rows, record


def _nll_of(samples, task, prefix):
  predicted = sum(len(s["text"]) + (s["end"] == "stop") for s in samples)
  if prefix and task.writes != "name":
    predicted -= len(samples)  # the first character is read
  return -sum(s["logprob"] for s in samples) / max(predicted, 1)


def _validation(run, workdir):
  rows = MetricsLog.read(RunDir(workdir).metrics)
  name = f"val/{run.task.metric}"
  return {row["step"]: row[name] for row in rows if name in row}.get(run.step)


def _summary(values):
  """What is recorded, and shown, of a measure's values."""
  if not values:
    return None, ""
  mean = float(np.mean(values))
  if isinstance(values[0], bool):
    low, high = metrics.wilson(mean, len(values))
    found = {"share": mean, "interval": [float(low), float(high)]}
    return found, f"{mean:.3f} ({low:.3f} to {high:.3f})"
  middle, largest = np.median(values), np.max(values)
  found = {
    "mean": mean,
    "median": float(middle),
    "largest": float(largest),
  }
  return found, f"mean {mean:.3g}, median {middle:.3g}, largest {largest:.3g}"
