r"""Trains and evaluates every point that a config file's sweep lists; the same
command again runs only what is missing.

Examples:
  python scripts/sweep.py --config=configs/memory.py:copying \
    --workdir=runs/copying
  python scripts/sweep.py --config=configs/name_reversal.py:masks \
    --workdir=runs/masks --extra_padding=4,12
  python scripts/sweep.py --config=configs/memory.py:adding \
    --workdir=runs/adding --shard=$SLURM_ARRAY_TASK_ID/4
"""

import json
import re
import runpy
from pathlib import Path

from absl import flags
from ml_collections import config_flags

from rnnlab import cli, figures, program, strict_json, sweep

CONFIG = config_flags.DEFINE_config_file(
  "config",
  None,
  "The experiment: a file of configs/ that has a sweep, `:variant` after it. "
  "Single settings, for all points: --config.train.epochs=5.",
  lock_config=True,
)
WORKDIR = flags.DEFINE_string(
  "workdir", None, "The directory of sweep.csv; inside, a directory a run."
)
EXTRA_PADDING = flags.DEFINE_list(
  "extra_padding",
  [],
  "Evaluate again with so many more columns of padding, as in 4,12: a model "
  "that is masked right gives the same numbers.",
)
TOGETHER = flags.DEFINE_integer(
  "together",
  None,
  "Train so many points at once; 1: one after another. By default one a core "
  "on a CPU and else 16.",
  lower_bound=1,
)
STACKED = flags.DEFINE_bool(
  "stacked",
  None,
  "Whether those that share a program are one vmapped call, or have a thread "
  "each. By default threads on a CPU, where they are faster.",
)
HALF_LIVES = flags.DEFINE_bool(
  "half_lives",
  False,
  "Measure also what the gates keep, before training and at the best "
  "checkpoint: half-lives in steps, medians over units.",
)
SHARD = flags.DEFINE_string(
  "shard",
  None,
  "i/n: run part i of n alone, from 0/n on, in the same workdir, as a job of "
  "an array does. The command without it then makes the whole table.",
)


def main():
  flag = flags.FLAGS["config"]
  path, _, arg = config_flags.get_config_filename(flag).partition(":")
  listed = runpy.run_path(path).get("sweep")
  if not listed:
    raise ValueError(f"{path} has no function sweep(add, arg)")
  points = sweep.points(listed, arg or None, CONFIG.value)
  settings = points[0].settings
  for name in config_flags.get_override_values(flag):
    if name in settings:
      raise ValueError(
        f"the sweep varies {name}, --config.{name} cannot set it"
      )
  part = ""
  if SHARD.value:
    index, count = map(int, SHARD.value.split("/"))
    points, part = sweep.share(points, index, count), f"-{index}-of-{count}"
  shared = program.Shared()
  rows = sweep.run(
    points,
    WORKDIR.value,
    map(int, EXTRA_PADDING.value),
    together=TOGETHER.value,
    stacked=STACKED.value,
    part=part,
    half_lives=HALF_LIVES.value,
    shared=shared,
  )
  table = sweep.summary(rows, settings)
  curves = sweep.curves(rows, settings, WORKDIR.value)
  try:
    figure = Path(WORKDIR.value) / f"sweep{part}.png"
    cli.say(f"wrote {figures.sweep(curves, figure)}")
  except ValueError as error:  # the runs stay what they are
    cli.say(f"no figure: {error}")
  failed = [row for row in rows if row["status"] == "failed"]
  cli.table(sweep.text(table))
  if failed:
    cli.table([(f"failed: {row['point']}", row["error"]) for row in failed])
  return {
    "points": len(rows),
    "failed": len(failed),
    "table": [json.loads(strict_json.plain_json(row)) for row in table],
    "compilations": [dict(p.compilations) for p in shared.programs.values()],
    "workdir": WORKDIR.value,
  }


if __name__ == "__main__":
  flags.mark_flags_as_required(["config", "workdir"])
  flags.register_validator(
    "extra_padding",
    lambda given: all(extra.isdecimal() for extra in given),
    "whole numbers from 0 on, with commas between",
  )
  flags.register_validator(
    "shard",
    lambda given: given is None or re.fullmatch(r"\d+/[1-9]\d*", given),
    "two whole numbers, as in 0/4",
  )
  cli.run(main)
