"""What a gradient loses that goes K steps back, at the start and now."""

import jax

from rnnlab import cli, figures
from rnnlab.analysis import truncation
from rnnlab.instruments import Reading, first_batch

# Examples, unless it is said how many.
FIRST = 16


def read(run, split, first) -> Reading:
  """By recurrence and K, over the first examples of a split."""
  task, without = run.task, []
  batch = first_batch(task, run.params, split, first or FIRST)

  @jax.jit
  def measure(params):
    found = {}
    for each in task.recurrences(params, task.carry(params), batch):
      try:
        found[each.name] = truncation.measure(each)._replace(full=None)
      except ValueError as error:
        without.append(str(error))
    return found

  before, now = jax.device_get((measure(run.initial()), measure(run.params)))
  cli.say(*(f"left out: {name}" for name in without))
  if not now:
    raise ValueError("truncation: no recurrence of this run has a loss")
  tables, record = [], {}
  for name in now:
    tables.append([[name, "at step", "cosine", "norm", "bias"]])
    for step, found in ((0, before[name]), (run.step, now[name])):
      shown = {
        "step": step,
        "cosine": found.cosine_K.tolist(),
        "norm": found.norm_K.tolist(),
        "bias": found.bias_K.tolist(),
      }
      record.setdefault(name, []).append(shown)
    T = len(found.cosine_K)
    for K in sorted({min(2**i, T) for i in range(T.bit_length() + 1)}):
      for shown in record[name]:
        values = (shown[what][K - 1] for what in ("cosine", "norm", "bias"))
        tables[-1].append([f"K={K}", shown["step"], *values])

  def draw(path):
    return figures.truncation(before, now, run.step, path)

  return Reading(tables, record, draw)
