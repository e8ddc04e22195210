r"""Generates texts from a run, and says which of them it may have copied.

Example:
  python scripts/sample.py --workdir=runs/names --n=20 --prefix=s \
    --temperature=0.8
"""

import collections

import jax
from absl import flags

from rnnlab import cli, trained
from rnnlab.checkpoint import fingerprint
from rnnlab.data.batching import check_seed

WORKDIR = flags.DEFINE_string("workdir", None, "The run directory.")
N = flags.DEFINE_integer("n", 10, "How many.", lower_bound=1)
PREFIX = flags.DEFINE_string("prefix", "", "What every text starts with.")
TEMPERATURE = flags.DEFINE_float(
  "temperature", 1.0, "Below 1 is safer, 0 always takes the likeliest symbol."
)
TOP_K = flags.DEFINE_integer("top_k", 0, "Draw from the k likeliest; 0 is off.")
TOP_P = flags.DEFINE_float(
  "top_p", 1.0, "Draw from the likeliest that make up this mass; 1 is off."
)
SEED = flags.DEFINE_integer(
  "seed", 0, "Same seed, same texts; the first of 20 is the one of --n=1."
)
LIMIT = flags.DEFINE_integer(
  "limit", 64, "Symbols after the prefix at most, the stop symbol included."
)
CHECKPOINT = flags.DEFINE_string(
  "checkpoint", "best", "best (by validation nll), latest, or a step."
)
PATH = flags.DEFINE_string("path", None, "The run's data file, if it moved.")


def main():
  check_seed("seed", SEED.value)
  run = trained.load(
    WORKDIR.value, CHECKPOINT.value, PATH.value, needs_data=False
  )
  cli.say(*run.notes)
  samples = run.task.generate(
    run.params,
    jax.random.key(SEED.value),
    [PREFIX.value] * N.value,
    limit=LIMIT.value,
    temperature=TEMPERATURE.value,
    top_k=TOP_K.value,
    top_p=TOP_P.value,
  )
  counts = collections.Counter()
  if run.task.texts:
    homes = {
      text: split
      for split in ("test", "validation", "train")
      for text in run.task.texts[split]
    }
    for sample in samples:
      sample["found_in"] = homes.get(sample["text"], "nowhere")
    counts = collections.Counter(sample["found_in"] for sample in samples)
  header = ("text", "log-probability", "end", "found in")
  cli.table(
    [header]
    + [
      (s["text"], f"{s['logprob']:.3f}", s["end"], s.get("found_in", "unknown"))
      for s in samples
    ]
  )
  return {
    "samples": samples,
    "found_in": dict(counts),
    "step": run.step,
    "fingerprint": fingerprint(run.params),
  }


if __name__ == "__main__":
  flags.mark_flag_as_required("workdir")
  cli.run(main)
