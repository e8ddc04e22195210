"""Evaluates a run on one split: sums over all of it, divided once.

Examples:
  python scripts/evaluate.py --workdir=runs/names --split=test
  python scripts/evaluate.py --workdir=runs/reversal --figure=by_length.png
"""

import sys
import time

import jax
from absl import flags

from rnnlab import cli, figures, metrics, parallel, trained
from rnnlab.analysis import ngram
from rnnlab.checkpoint import fingerprint
from rnnlab.update import evaluate

WORKDIR = flags.DEFINE_string("workdir", None, "The run directory.")
SPLIT = flags.DEFINE_enum(
  "split", "validation", ["train", "validation", "test"], "Which examples."
)
CHECKPOINT = flags.DEFINE_string(
  "checkpoint", "best", "best (on validation), latest, or a step."
)
WEIGHTS = flags.DEFINE_enum(
  "weights",
  None,
  list(trained.WEIGHTS),
  "Parameters: of the last update, or averaged; by default as trained.",
)
BATCH_SIZE = flags.DEFINE_integer(
  "batch_size",
  None,
  "Examples a batch: the speed changes, the numbers do not.",
  lower_bound=1,
)
NOTEBOOK_AVERAGE = flags.DEFINE_integer(
  "notebook_average",
  None,
  "B: also print what the sum of batch means over len // B would have claimed.",
  lower_bound=1,
)
NGRAM = flags.DEFINE_integer(
  "ngram",
  None,
  "n: also the nll of an interpolated n-gram of the training texts (of a text, "
  "its first character included).",
  lower_bound=1,
)
EXTRA_PADDING = flags.DEFINE_integer(
  "extra_padding", 0, "Columns of padding that no row needs.", lower_bound=0
)
FIRST = flags.DEFINE_integer(
  "first", None, "Only so many examples, from the split's start.", lower_bound=1
)
FIGURE = flags.DEFINE_string(
  "figure", None, "A file for the tables: exact match by length, or by label."
)
PATH = flags.DEFINE_string("path", None, "The run's data file, if it moved.")
DATA_PARALLEL = flags.DEFINE_integer(
  "data_parallel",
  1,
  "Devices that share each batch; 0: all there are.",
  lower_bound=0,
)


def main():
  with parallel.together():
    mesh = parallel.mesh(DATA_PARALLEL.value)
    run = trained.load(
      WORKDIR.value, CHECKPOINT.value, PATH.value, weights=WEIGHTS.value
    )
  cli.say(*run.notes)
  task, split, params = run.task, SPLIT.value, run.params
  if split not in task.texts:
    raise ValueError(
      "training examples are drawn without end: --split=validation or test"
    )
  if not task.texts[split]:
    raise ValueError(f"the {split} split is empty: nothing to evaluate")
  if FIGURE.value:
    figures.require()
    if not task.details:
      raise ValueError("--figure: this task has no tables by length or label")
  how = split, BATCH_SIZE.value, EXTRA_PADDING.value, FIRST.value
  report = jax.jit(task.report, out_shardings=parallel.whole(mesh))
  spread = parallel.replicate(mesh, params)
  carry = task.carry(spread)

  def batches(*how):
    return (parallel.split(mesh, batch) for batch in task.eval_batches(*how))

  def sums():
    return evaluate(report, spread, carry, batches(*how))

  sums()  # compiles, so that the time below is that of the work
  began = time.monotonic()
  found = sums()
  seconds = time.monotonic() - began
  main = found.pop(task.metric)
  record = {"split": split, task.metric: main.value()}
  if task.metric == "nll":
    record["ppl"] = metrics.perplexity(main.value())
    record["bits"] = metrics.bits(main.value())
  if "memoryless" in task.facts:
    record["memoryless"] = task.facts["memoryless"]
  record |= {
    task.unit: main.count,
    "examples": min(len(task.texts[split]), FIRST.value or sys.maxsize),
  }
  record |= {name: mean.value(name) for name, mean in found.items()}
  if match := found.get("exact_match"):
    interval = metrics.wilson(match.value(), match.count)
    record["exact_match/interval"] = [float(end) for end in interval]
  if FIRST.value is None and f"{split}_in_train" in task.facts:
    record["in_train"] = task.facts[f"{split}_in_train"]
  if size := NOTEBOOK_AVERAGE.value:
    means = [
      metrics.to_host(report(spread, carry, batch)[1])[task.metric].value()
      for batch in batches(split, size, 0, FIRST.value)
    ]
    claimed = metrics.notebook_average(means, record["examples"], size)
    record["notebook_average"] = claimed
  if n := NGRAM.value:
    if not task.sequences:
      raise ValueError("--ngram: this task predicts no text")
    texts = task.sequences("train"), task.sequences(split)[: FIRST.value]
    total, count = ngram.nll(*texts, task.vocab.size, n)
    record[f"{n}-gram"] = total / count
  record |= {
    "step": run.step,
    "checkpoint": CHECKPOINT.value,
    "fingerprint": fingerprint(params),
    "examples/s": round(record["examples"] / seconds),
  }
  cli.table(record)
  if task.details:
    tables = task.details(params, *how)
    for rows in tables.values():
      cli.table([list(rows[0]), *(row.values() for row in rows)])
    if FIGURE.value and parallel.first():
      if "by_length" in tables:
        drawn = figures.by_length(tables["by_length"], FIGURE.value)
      else:
        drawn = figures.by_label(*tables.values(), FIGURE.value)
      cli.say(f"wrote {drawn}")
    record |= tables
  return record


if __name__ == "__main__":
  flags.mark_flag_as_required("workdir")
  cli.run(main, processes=True)
