r"""Measures one thing of a trained run, as tables and a figure.

Examples:
  python scripts/analyze.py --workdir=runs/names --what=retention \
    --figure=retention.png
"""

from absl import flags

from rnnlab import cli, figures, instruments, trained

WORKDIR = flags.DEFINE_string("workdir", None, "The run directory.")
WHAT = flags.DEFINE_enum(
  "what", None, [*instruments.ALL, "all"], "What to measure."
)
CHECKPOINT = flags.DEFINE_string(
  "checkpoint", "best", "best (by validation nll), latest, or a step."
)
WEIGHTS = flags.DEFINE_enum(
  "weights",
  None,
  list(trained.WEIGHTS),
  "Parameters: of the last update, or averaged; by default as trained.",
)
SPLIT = flags.DEFINE_enum(
  "split", "validation", ["train", "validation", "test"], "On which examples."
)
FIRST = flags.DEFINE_integer(
  "first", None, "Only so many examples, from the split's start.", lower_bound=1
)
FIGURE = flags.DEFINE_string(
  "figure", None, "A file for the figure; with --what=all a folder for all."
)
PATH = flags.DEFINE_string("path", None, "The run's data file, if it moved.")


def main():
  if FIGURE.value:
    figures.require()
  run = trained.load(
    WORKDIR.value, CHECKPOINT.value, PATH.value, weights=WEIGHTS.value
  )
  cli.say(*run.notes)
  everything = WHAT.value == "all"
  record, failed = {}, []
  for what in instruments.ALL if everything else [WHAT.value]:
    try:
      reading = instruments.read(what, run, SPLIT.value, FIRST.value)
    except ValueError as error:
      if not everything:
        raise
      cli.say(f"left out: {error}")
      continue
    for rows in reading.tables:
      cli.table(rows)
    record[what] = reading.record
    failed += reading.record.get("failed", [])
    if FIGURE.value:
      path = f"{FIGURE.value}/{what}.png" if everything else FIGURE.value
      cli.say(f"wrote {reading.draw(path)}")
  record |= {"failed": failed} if failed else {}
  return record | {"step": run.step, "split": SPLIT.value}


if __name__ == "__main__":
  flags.mark_flags_as_required(["workdir", "what"])
  cli.run(main)
