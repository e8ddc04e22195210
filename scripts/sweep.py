r"""Trains and evaluates every point that a config file's sweep lists; the same
command again runs only what is missing.

Example:
  python scripts/sweep.py --config=configs/name_reversal.py:masks \
    --workdir=runs/masks --extra_padding=4,12
"""

import json
import runpy

from absl import flags
from ml_collections import config_flags

from rnnlab import cli, strict_json, sweep

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
  rows = sweep.run(points, WORKDIR.value, map(int, EXTRA_PADDING.value))
  table = sweep.summary(rows, settings)
  failed = [row for row in rows if row["status"] == "failed"]
  cli.table(sweep.text(table))
  if failed:
    cli.table([(f"failed: {row['point']}", row["error"]) for row in failed])
  return {
    "points": len(rows),
    "failed": len(failed),
    "table": [json.loads(strict_json.plain_json(row)) for row in table],
    "workdir": WORKDIR.value,
  }


if __name__ == "__main__":
  flags.mark_flags_as_required(["config", "workdir"])
  flags.register_validator(
    "extra_padding",
    lambda given: all(extra.isdecimal() for extra in given),
    "whole numbers from 0 on, with commas between",
  )
  cli.run(main)
