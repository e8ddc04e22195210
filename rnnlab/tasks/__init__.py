"""Tasks: data, loss and report in one record, one task a file."""

import importlib
import pathlib
from typing import Any, NamedTuple

from rnnlab.settings import bind


class Task(NamedTuple):
  """What the trainer and the commands need to know of a task.

  `loss` and `report` return sums and counts (`metrics.Mean`), never averages.
  Batches are dicts of numpy arrays of one shape, the last ones included;
  training batch i is a function of (data seed, i) alone.
  """

  vocab: Any  # data.vocabulary.Vocabulary, stored with the run; or None
  init: Any  # (key) -> params
  carry: Any  # (params) -> carry over batches; () where they are independent
  loss: Any  # (params, carry, batch, key) -> Mean, (carry, {name: Mean})
  report: Any  # (params, carry, batch) -> carry, {name: Mean}
  generate: Any  # (params, key, prompts, **how) -> list of dicts to show
  # What a prompt is: a "prefix" to go on, a "source", or an "example"'s number.
  reads: Any = "prefix"
  writes: Any = None  # of a "prefix": "name", "text" or "python"
  noisy: Any = False  # whether every second source symbol is noise
  metric: Any = "nll"  # of `report`: what is shown, and selects the best
  unit: Any = "tokens"  # what its count counts
  recurrences: Any = None  # (params, carry, batch) -> [layers.Recurrence]
  # (params) -> [analysis.context.Claim]: what its outputs may read.
  contexts: Any = None
  # Of the data; a task made without data, which can generate, has none.
  facts: Any = None  # dict: digest, sizes, repeats, for the record
  texts: Any = None  # dict: split -> its examples, as a person reads them;
  # numbers where examples are drawn, and no "train" where it has no end
  sequences: Any = None  # (split) -> ids that a text task predicts, by text
  per_epoch: Any = None  # how many training batches are an epoch; None: no end
  train_batches: Any = None  # (start) -> batches from number start on, no end
  eval_batches: Any = None  # (split, size, extra, first) -> the split, in order
  accumulated: Any = 1  # how many batches stand in one, see `update`
  details: Any = None  # (params, split, size, extra, first) -> tables


def check_limit(limit) -> None:
  """Refuses a number of symbols to generate that no memory has room for."""
  if not 1 <= limit <= 10**6:
    raise ValueError(f"limit must be in 1 .. 1,000,000, not {limit}")


def make(name=None, **settings) -> Task:
  """The task of the file `tasks/<name>.py`; a wrong setting raises by name."""
  path = pathlib.Path(__file__).with_name(f"{name}.py")
  if not str(name).isidentifier() or name == "__init__" or not path.exists():
    raise ValueError(f"there is no task named {name!r} in rnnlab/tasks")
  module = importlib.import_module(f"rnnlab.tasks.{name}")
  return module.make(**bind(module.make, "task", settings))
