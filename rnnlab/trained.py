"""A trained model back from its run directory, for commands that read it."""

from typing import Any, NamedTuple

import jax

from rnnlab import checkpoint, rundir, settings, tasks, update
from rnnlab.plan import Plan


class Trained(NamedTuple):
  """A run's task and the parameters of one of its checkpoints."""

  task: Any
  params: Any
  step: int
  notes: list  # what had to be passed over, for a person to read
  initial: Any  # () -> the parameters before the first update


# The parameters of the last update, or their average over the past ones.
WEIGHTS = {"raw": ".params", "average": ".average"}


def load(
  workdir, which="best", path=None, needs_data=True, weights=None
) -> Trained:
  """The task and parameters of a run.

  which: "best" (on validation), "latest", or a step. path: where the data
  file lies now, if it moved; its content must be the run's. Without data a run
  can still generate, in its stored vocabulary: with needs_data=False a file
  that is gone or changed is a note. weights: of WEIGHTS; None is what the
  trainer evaluated. Raises ValueError for what is not there, is damaged, or
  does not fit.
  """
  config, facts = rundir.load(workdir)
  for name in ("seed", "task", "model", "train", "vocabulary", "data"):
    if name not in config | facts:
      raise ValueError(f"{workdir} is damaged: its files hold no {name!r}")
  given = config["task"] | {"model": config["model"]}
  if facts["vocabulary"] is not None:
    given["symbols"] = facts["vocabulary"]
  if path is not None:
    given["path"] = path
  notes = []
  try:
    task = tasks.make(**given)
    was, now = facts["data"], task.facts
    if odd := [f for f in was | now if was.get(f) != now.get(f)]:
      raise ValueError(
        f"these are not the data of {workdir}: "
        + "; ".join(f"{f} was {was.get(f)}, now {now.get(f)}" for f in odd)
      )
  except ValueError as error:
    if needs_data:
      raise
    notes.append(f"without the data: {error}")
    task = tasks.make(**given, data=False)
  part = _part(workdir, config, weights)
  params, step, passed = _restore(workdir, which, task, part)

  @jax.jit
  def initial():
    return update.init_params(task, jax.random.key(config["seed"]))[0]

  return Trained(task, params, step, notes + passed, initial)


def _part(workdir, config, weights):
  average = config.get("opt", {}).get("average")
  if weights is None:
    plan = Plan(**settings.bind(Plan, "train", config["train"]))
    return f".{plan.evaluated(average)}"
  if weights == "average" and average is None:
    raise ValueError(f"{workdir} keeps no average of its parameters")
  return WEIGHTS[weights]


def _restore(workdir, which, task, part):
  directory = rundir.RunDir(workdir).checkpoints
  like = jax.eval_shape(task.init, jax.random.key(0))

  def restore(step=None):
    return checkpoint.restore(directory, like, step, part=part)

  if which not in ("best", "latest"):
    if not str(which).isdecimal():
      raise ValueError(f"checkpoint is best, latest or a step, not {which!r}")
    found = restore(int(which))
  else:
    found = restore()
  if found is None:
    raise ValueError(f"{directory} holds no checkpoint yet")
  notes = [f"passed over checkpoint {note}" for note in found.skipped]
  if which == "best":
    best = found.facts["best_step"]
    if best is None:
      raise ValueError(
        f"{directory} holds no best checkpoint, since no validation after step "
        "0 gave a finite loss; there is --checkpoint=latest"
      )
    if best != found.step:
      found = restore(best)
  return found.state, found.step, notes
