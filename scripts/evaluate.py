"""Evaluates a run on one split: sums over all of it, divided once.

Example:
  python scripts/evaluate.py --workdir=runs/names --split=test
"""

import time

import jax
from absl import flags

from rnnlab import cli, metrics, trained
from rnnlab.checkpoint import fingerprint
from rnnlab.update import evaluate

WORKDIR = flags.DEFINE_string("workdir", None, "The run directory.")
SPLIT = flags.DEFINE_enum(
  "split", "validation", ["train", "validation", "test"], "Which examples."
)
CHECKPOINT = flags.DEFINE_string(
  "checkpoint", "best", "best (by validation nll), latest, or a step."
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
PATH = flags.DEFINE_string("path", None, "The run's data file, if it moved.")


def main():
  run = trained.load(WORKDIR.value, CHECKPOINT.value, PATH.value)
  cli.say(*run.notes)
  task, split = run.task, SPLIT.value
  if not task.texts[split]:
    raise ValueError(f"the {split} split is empty: nothing to evaluate")
  report, carry = jax.jit(task.report), task.carry(run.params)

  began = time.monotonic()
  batches = task.eval_batches(split, BATCH_SIZE.value)
  sums = evaluate(report, run.params, carry, batches)
  nll = sums.pop("nll")
  record = {
    "split": split,
    "nll": nll.value(),
    "ppl": metrics.perplexity(nll.value()),
    "bits": metrics.bits(nll.value()),
    "tokens": nll.count,
    "examples": len(task.texts[split]),
  }
  record |= {name: mean.value(name) for name, mean in sums.items()}
  seconds = time.monotonic() - began
  if split != "train":
    record["in_train"] = task.facts[f"{split}_in_train"]
  if size := NOTEBOOK_AVERAGE.value:
    means = [
      metrics.to_host(report(run.params, carry, batch)[1])["nll"].value()
      for batch in task.eval_batches(split, size)
    ]
    claimed = metrics.notebook_average(means, record["examples"], size)
    record["notebook_average"] = claimed
  record |= {
    "step": run.step,
    "checkpoint": CHECKPOINT.value,
    "fingerprint": fingerprint(run.params),
    "seconds": round(seconds, 3),
  }
  cli.table(record)
  return record


if __name__ == "__main__":
  flags.mark_flag_as_required("workdir")
  cli.run(main)
