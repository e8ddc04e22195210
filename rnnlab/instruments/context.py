"""Which inputs reach each output, compared with what is declared."""

from rnnlab import figures
from rnnlab.analysis import context
from rnnlab.instruments import Reading


def read(run, split, first) -> Reading:
  """By claim of the task; random points are drawn, so no split has a part.

  The record says under "failed" which claims do not hold.
  """
  if run.task.contexts is None:
    raise ValueError(
      "context: this run's task does not say what its outputs may read "
      "(Task.contexts), so there is nothing to compare"
    )
  claims = run.task.contexts(run.params)
  rows, record, found, failed = [["output of", *SHOWN]], {}, {}, []
  for claim in claims:
    found[claim.name] = (claim, context.audit(claim))
    shown = {name: show(*found[claim.name]) for name, show in SHOWN.items()}
    rows.append([claim.name, *shown.values()])
    record[claim.name] = shown
    if found[claim.name][1].leaks:
      failed.append(context.told(*found[claim.name]))
  tables = [rows] + [[["leak", text]] for text in failed]
  if failed:
    record["failed"] = failed

  def draw(path):
    return figures.context(found, path)

  return Reading(tables, record, draw)


SHOWN = {
  "declared": lambda claim, found: context.declared(claim),
  "reads": lambda claim, found: context.reads(found),
  "leaks": lambda claim, found: len(found.leaks),
  "not used": lambda claim, found: len(found.unused),
  "outputs": lambda claim, found: found.may_US.shape[0],
  "inputs": lambda claim, found: found.may_US.shape[1],
}
