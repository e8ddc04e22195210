r"""Trains what a config file says, in a run directory; the same command again
goes on where it stopped.

Example:
  python scripts/train.py --config=configs/name_lm.py --workdir=runs/names \
    --config.model.cell.name=gru --config.train.seconds=120
"""

from absl import flags
from ml_collections import config_flags

import rnnlab
from rnnlab import cli
from rnnlab.train import train

CONFIG = config_flags.DEFINE_config_file(
  "config",
  None,
  "The experiment: a file of configs/, `:variant` after it if it has any. "
  "Single settings: --config.opt.lr=1e-3.",
  lock_config=True,
)
WORKDIR = flags.DEFINE_string("workdir", None, "The run directory.")


def main():
  record = train(CONFIG.value.to_dict(), WORKDIR.value, rnnlab.PROCESS_START)
  cli.table({k: v for k, v in record.items() if not isinstance(v, dict)})
  return record


if __name__ == "__main__":
  flags.mark_flags_as_required(["config", "workdir"])
  cli.run(main, processes=True)
