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
import numpy as np
from absl import flags

from rnnlab import cli, figures, metrics, settings, trained
from rnnlab.analysis import evidence
from rnnlab.checkpoint import fingerprint
from rnnlab.data.batching import check_seed
from rnnlab.rundir import MetricsLog, RunDir

WORKDIR = flags.DEFINE_string("workdir", None, "The run directory.")
CHECKPOINT = flags.DEFINE_string(
  "checkpoint", "best", "best (on validation), latest, or a step."
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
    WORKDIR.value, CHECKPOINT.value, PATH.value, needs_data=False
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
    record["evidence"] = _evidence(run, samples)
  return record | {"step": run.step, "fingerprint": fingerprint(run.params)}


def _evidence(run, samples):
  """Prints and returns what the samples and held-out texts are like."""
  task, texts = run.task, [sample["text"] for sample in samples]
  train, held_out = task.texts["train"], task.texts["validation"]
  if task.writes == "name":
    step = max(len(held_out) // len(texts), 1)
    columns = texts, list(held_out[::step])[: len(texts)]
    found = [evidence.of_names(column, train) for column in columns]
  else:
    of = getattr(evidence, f"of_{task.writes}")
    columns = texts, evidence.like(texts, held_out)
    found = [of(column) for column in columns]
    copied = evidence.longest_copied(columns[0] + columns[1], train)
    halves = copied[: len(texts)], copied[len(texts) :]
    for measures, half in zip(found, halves, strict=True):
      measures["longest run copied from training"] = half
  # Each sum over all characters, as it is learned; names count their stops.
  ends = sum(sample["end"] == "stop" for sample in samples)
  symbols = sum(map(len, texts)) + ends - len(PREFIX.value and texts)
  own = -sum(sample["logprob"] for sample in samples) / max(symbols, 1)
  rows = MetricsLog.read(RunDir(WORKDIR.value).metrics)
  held_nll = {row["step"]: row.get("val/nll") for row in rows}.get(run.step)
  record = {"nll": {"samples": own, "held out": held_nll}}
  table = [["nll, of the model", own, "" if held_nll is None else held_nll]]
  for measure in found[0]:
    shown = [_spread(measures[measure]) for measures in found]
    table.append([measure, *(text for _, text in shown)])
    record[measure] = dict(
      zip(record["nll"], (s for s, _ in shown), strict=True)
    )
  cli.table(
    [
      [
        "what the texts are like (to resemble a program is not to run)"
        if task.writes == "python"
        else "what the texts are like",
        f"{len(columns[0])} samples",
        f"{len(columns[1])} held-out texts",
      ],
      *table,
    ]
  )
  return record


def _spread(values):
  """What is recorded and shown of a measure's values, one a text."""
  if not values:
    return None, ""
  mean = float(np.mean(values))
  if isinstance(values[0], bool):
    low, high = metrics.wilson(mean, len(values))
    return mean, f"{mean:.3f} ({low:.3f} to {high:.3f})"
  middle, largest = np.quantile(values, (0.5, 1)).tolist()
  found = {"mean": mean, "median": middle, "largest": largest}
  return found, f"mean {mean:.3g}, median {middle:.3g}, largest {largest:.3g}"


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
