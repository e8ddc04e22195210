r"""Generates from a run: continues a prefix, answers sources, shows examples.

Examples:
  python scripts/sample.py --workdir=runs/names --n=20 --prefix=s \
    --temperature=0.8
  python scripts/sample.py --workdir=runs/reversal --sources=suorpxhziwaq \
    --figure=attention.png
  python scripts/sample.py --workdir=runs/copying --n=5
  python scripts/sample.py --workdir=runs/text --n=200 --evidence
"""

import collections

import jax
from absl import flags

from rnnlab import cli, figures, settings, trained, written
from rnnlab.checkpoint import fingerprint
from rnnlab.data.batching import check_seed

WORKDIR = flags.DEFINE_string("workdir", None, "The run directory.")
CHECKPOINT = flags.DEFINE_string(
  "checkpoint", "best", "best (on validation), latest, or a step."
)
WEIGHTS = flags.DEFINE_enum(
  "weights",
  None,
  list(trained.WEIGHTS),
  "Parameters: of the last update, or averaged; by default as trained.",
)
PATH = flags.DEFINE_string("path", None, "The run's data file, if it moved.")
N = flags.DEFINE_integer("n", 10, "How many texts.", lower_bound=1)
PREFIX = flags.DEFINE_string("prefix", "", "What every text starts with.")
SEED = flags.DEFINE_integer(
  "seed", 0, "Same seed, same texts; the first of 20 is the one of --n=1."
)
SOURCES = flags.DEFINE_list(
  "sources", None, "For a task with sources: these, with commas between."
)
FIGURE = flags.DEFINE_string(
  "figure", None, "With --sources: a file for their attention maps."
)
EVIDENCE = flags.DEFINE_bool(
  "evidence", False, "Also measure the texts, next to held-out ones (prefix)."
)
# How to generate; those that are set go to the task, which checks them.
HOW = (
  flags.DEFINE_integer("limit", None, "Symbols at most, the stop included."),
  flags.DEFINE_float(
    "temperature", None, "Below 1 is safer, 0 takes the likeliest (prefix)."
  ),
  flags.DEFINE_integer(
    "top_k", None, "Draw from the k likeliest; 0 is off (prefix)."
  ),
  flags.DEFINE_float(
    "top_p", None, "Draw from the likeliest of this mass; 1 is off (prefix)."
  ),
  flags.DEFINE_integer("beam", None, "Hypotheses kept; 1 is greedy (sources)."),
  flags.DEFINE_float(
    "alpha", None, "Of a beam: log-probability / length^alpha (sources)."
  ),
)


def main():
  check_seed("seed", SEED.value)
  run = trained.load(
    WORKDIR.value,
    CHECKPOINT.value,
    PATH.value,
    needs_data=False,
    weights=WEIGHTS.value,
  )
  cli.say(*run.notes)
  task = run.task
  if FIGURE.value:
    figures.require()
  if EVIDENCE.value and not (task.writes and task.texts):
    raise ValueError(
      f"--evidence: {WORKDIR.value} "
      + ("writes no texts" if not task.writes else "has lost its data")
    )
  needs, idle, prompts = {
    "prefix": ("--prefix, not --sources", (SOURCES,), [PREFIX.value] * N.value),
    "source": ("--sources", (PREFIX, N, SEED), SOURCES.value),
    "example": ("--n alone", (PREFIX, SOURCES, SEED), range(N.value)),
  }[task.reads]
  if odd := [f.name for f in idle if flags.FLAGS[f.name].present]:
    raise ValueError(
      f"{WORKDIR.value} holds a task that needs {needs}: --{odd[0]} means "
      "nothing to it"
    )
  if prompts is None:
    raise ValueError(f"{WORKDIR.value} holds a task that needs {needs}")
  how = {flag.name: flag.value for flag in HOW}
  how = settings.bind(
    task.generate, "sample", how, ("params", "key", "prompts")
  )
  key = jax.random.key(SEED.value)
  samples = task.generate(run.params, key, prompts, **how)
  if FIGURE.value:
    if "attention_US" not in samples[0]:
      raise ValueError(
        "--figure: nothing here attends, or a beam was asked for"
      )
    path = figures.attention_maps(samples, FIGURE.value, task.noisy)
    cli.say(f"wrote {path}")
  for sample in samples:
    sample.pop("attention_US", None)
  record = {"samples": samples}
  if task.writes == "name" and task.texts:
    record["found_in"] = _look_up(samples, task.texts)
  cli.table([list(samples[0]), *(sample.values() for sample in samples)])
  if EVIDENCE.value:
    rows, record["evidence"] = written.measure(
      run, WORKDIR.value, samples, PREFIX.value
    )
    cli.table(rows)
  return record | {"step": run.step, "fingerprint": fingerprint(run.params)}


def _look_up(samples, texts):
  """Says of every sample in which split it stands; returns the counts."""
  homes = {
    text: split
    for split in ("test", "validation", "train")
    for text in texts[split]
  }
  for sample in samples:
    sample["found_in"] = homes.get(sample["text"], "nowhere")
  return dict(collections.Counter(s["found_in"] for s in samples))


if __name__ == "__main__":
  flags.mark_flag_as_required("workdir")
  cli.run(main)
