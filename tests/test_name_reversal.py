"""Name reversal: what is reported, and that it is what the model writes."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reversing
from reversing import WIRINGS, draw, read, totals, whole

from rnnlab import metrics, tasks, trained
from rnnlab import train as trainer


def levenshtein(a, b):
  """The edit distance of two texts, as the textbook has it."""
  row = list(range(len(b) + 1))
  for i, x in enumerate(a, 1):
    above, row = row, [i]
    for j, y in enumerate(b, 1):
      row.append(min(above[j] + 1, row[-1] + 1, above[j - 1] + (x != y)))
  return row[-1]


def edits(pairs, width=None):
  """metrics.edit_distance of pairs of texts, as rows of one batch."""
  sides = []
  for texts in zip(*pairs, strict=True):
    length_B = np.array([len(t) for t in texts])
    ids_BT = np.full((len(texts), width or max(length_B.max(), 1)), 99)
    for b, t in enumerate(texts):
      ids_BT[b, : len(t)] = [ord(c) for c in t]
    sides += [jnp.asarray(ids_BT), jnp.asarray(length_B)]
  return np.asarray(jax.jit(metrics.edit_distance)(*sides)).tolist()


FIVE = [("aihpos",) * 2, ("ada", "adaa"), ("eve", ""), ("", "x"), ("", "")]


def test_the_edit_distances_of_five_pairs():
  assert edits(FIVE) == [0, 1, 3, 1, 0]
  assert edits(FIVE, width=20) == [0, 1, 3, 1, 0]
  assert edits([(b, a) for a, b in FIVE]) == [0, 1, 3, 1, 0]
  cer = metrics.Mean(sum(edits(FIVE)), sum(len(a) for a, _ in FIVE))
  assert cer.value() == 5 / 12
  exact = [d == 0 for d in edits(FIVE)]
  assert metrics.to_host(metrics.Mean.of(jnp.array(exact))).value() == 0.4


def test_the_edit_distance_is_levenshteins():
  rng = np.random.default_rng(0)
  texts = [
    "".join(rng.choice(list("abc"), rng.integers(0, 8))) for _ in range(400)
  ]
  pairs = list(zip(texts[::2], texts[1::2], strict=True))
  assert "" in texts and edits(pairs) == [levenshtein(a, b) for a, b in pairs]


# The report


BIG = reversing.LECTURE | {"embed": 12, "hidden": 16}


@pytest.fixture(scope="module")
def learned(tmp_path_factory):
  """(task, params, report): some names are reversed, and some are not."""
  folder = tmp_path_factory.mktemp("learned")
  task = reversing.make(folder, reversing.words(), model=BIG, noise="fixed")
  params = reversing.train(task, 60)
  return task, params, totals(task, params, size=64)


def assert_same(found, want, atol=2e-6):
  """The counts and whole totals exactly; the values to the tolerance."""
  assert found.keys() == want.keys()
  for name, mean in want.items():
    assert found[name].count == mean.count, name
    if name in ("exact_match", "cer", "stopped"):
      assert found[name].total == mean.total, name
    close = math.isclose(
      found[name].value(), mean.value(), rel_tol=atol, abs_tol=atol
    )
    assert close, (name, found[name], mean)


@pytest.mark.slow
def test_the_report_does_not_depend_on_how_the_examples_are_cut(
  learned, tmp_path
):
  one, params, want = learned
  three = reversing.make(tmp_path, reversing.words(), model=BIG, buckets=3)
  assert 0.2 < want["exact_match"].value() < 0.95
  assert 0 < want["cer"].value() < 1
  for task, size, extra in ((one, 1, 0), (one, 8, 7), (three, 8, 0)):
    assert_same(totals(task, params, size=size, extra=extra), want)


@pytest.mark.exhaustive
@pytest.mark.parametrize("wiring", ["bahdanau", "feeding", "fixed"])
def test_the_report_is_exact_in_every_wiring(wiring, tmp_path):
  words, model = reversing.words(12), WIRINGS[wiring]
  one = reversing.make(tmp_path, words, model=model)
  two = reversing.make(tmp_path, words, model=model, buckets=2)
  params = draw(one)
  want = totals(one, params, size=1)
  assert want["cer"].total > 0
  assert_same(totals(two, params, size=4, extra=7), want)
  mass = {k: v.value() for k, v in want.items() if k.startswith("attention/")}
  if wiring == "fixed":
    assert not mass
  else:
    assert_attends(mass)


def assert_attends(mass):
  names, noise, padding = (
    mass["attention/" + kind] for kind in ("names", "noise", "padding")
  )
  assert padding == 0 and names > 0.01 and noise > 0.01
  assert abs(names + noise - 1) < 1e-5


def test_attention_is_told_by_kind_where_there_is_noise(learned, tmp_path):
  _, _, want = learned
  assert_attends({k: m.value() for k, m in want.items() if "/" in k})
  pairs = reversing.make(tmp_path, ["ada\tx", "bo\ty"])
  report = jax.eval_shape(pairs.report, draw(pairs), (), whole(pairs))[1]
  assert "nll" in report and not any("/" in name for name in report)


def test_what_is_reported_is_what_is_written(learned):
  task, params, found = learned
  batch = whole(task)
  sources, targets = read(task, batch, "source"), read(task, batch)
  limit = max(map(len, reversing.words())) + 1
  written = task.generate(params, None, sources, limit=limit)
  texts = [w["text"] for w in written]
  right = [
    w["text"] == t and w["end"] == "stop"
    for w, t in zip(written, targets, strict=True)
  ]
  assert found["exact_match"] == metrics.Mean(sum(right), len(right))
  total = sum(map(levenshtein, targets, texts))
  assert found["cer"] == metrics.Mean(total, sum(map(len, targets)))
  assert found["stopped"].total == sum(w["end"] == "stop" for w in written)
  assert found["nll"].count == sum(map(len, targets)) + len(targets)
  # Row i of a batch belongs to source i, alone or in company.
  for i in (0, 5, 11):
    (alone,) = task.generate(params, None, [sources[i]], limit=limit)
    attention_US = alone.pop("attention_US")
    np.testing.assert_allclose(
      attention_US, written[i].pop("attention_US"), atol=1e-6
    )
    assert attention_US.shape[1] == len(sources[i])
    assert math.isclose(
      alone.pop("logprob"), written[i]["logprob"], rel_tol=1e-5
    )
    assert alone.items() <= written[i].items()


def test_the_tables_add_up_to_the_report(learned):
  task, params, want = learned
  tables = task.details(params, "train", 8, 3)
  lengths, places = tables["by_length"], tables["by_position"]
  counts = [len(t) for t in task.texts["train"]]
  assert [r["source_length"] for r in lengths] == [
    2 * n for n in sorted(set(counts))
  ]
  for row in lengths:
    assert row["examples"] == counts.count(row["source_length"] // 2)
    row["tokens"] = row["examples"] * (row["source_length"] // 2 + 1)
  assert [r["position"] for r in places] == [*range(1, max(counts) + 2)]
  for row in places:
    assert row["tokens"] == sum(n + 1 >= row["position"] for n in counts)

  def average(rows, name, weight):
    weights = [weight(row) for row in rows]
    return np.average([row[name] for row in rows], weights=weights)

  by = {
    "exact_match": lambda row: row["examples"],
    "cer": lambda row: row["tokens"] - row["examples"],
    "nll": lambda row: row["tokens"],
    "free_running_nll": lambda row: row["tokens"],
  }
  for name, weight in by.items():
    found = average(lengths, name, weight)
    assert math.isclose(found, want[name].value(), rel_tol=1e-5)
    if "nll" in name:
      found = average(places, name, weight)
      assert math.isclose(found, want[name].value(), rel_tol=1e-5)
  # Before the first symbol there is nothing to choose.
  first = places[0]
  assert math.isclose(first["nll"], first["free_running_nll"], rel_tol=1e-5)


# Teacher-forced and free-running


def test_on_its_own_choices_both_nlls_are_the_same(tmp_path):
  sources = reversing.words(12)
  first = reversing.make(tmp_path, [f"{s}\t{s}" for s in sources])
  params = draw(first, seed=3)
  written = first.generate(params, None, sources, limit=9)
  done = [w for w in written if w["text"] and w["end"] == "stop"]
  assert len(done) > 3 and len({w["text"] for w in done}) > 1
  symbols = list(first.vocab.symbols)
  lines = [f"{w['source']}\t{w['text']}" for w in done]
  task = reversing.make(tmp_path, lines, symbols=symbols)
  for split in ("train", "test"):
    found = totals(task, params, split)
    assert found["exact_match"].value() == 1 and found["cer"].value() == 0
    forced, free = found["nll"], found["free_running_nll"]
    assert math.isclose(forced.value(), free.value(), rel_tol=1e-5)
    drawn = [w["logprob"] for w in done if w["source"] in task.texts[split]]
    assert math.isclose(forced.total, -sum(drawn), rel_tol=1e-5)


@pytest.mark.exhaustive
def test_predicting_the_next_symbol_does_not_establish_an_answer(tmp_path):
  # Nothing tells which letter comes first; after it, everything is certain.
  lines = ["x\taaaa", "x\tbbbb"] * 8
  task = reversing.make(tmp_path, lines, unique=False, split="hash")
  split = max(task.texts, key=lambda s: len(task.texts[s]))
  params = reversing.train(task, 150, lr=0.05)
  tables = task.details(params, split)
  (found,) = tables["by_length"]
  assert found["examples"] == 16 and found["exact_match"] == 0.5
  assert math.isclose(found["nll"], math.log(2) / 5, abs_tol=0.02)
  assert found["free_running_nll"] > 1
  first, *after = tables["by_position"]
  assert math.isclose(first["nll"], math.log(2), abs_tol=0.02)
  assert math.isclose(first["free_running_nll"], first["nll"], rel_tol=1e-5)
  for row in after[:3]:
    assert row["nll"] < 0.03 and row["free_running_nll"] > 1


# End to end


@pytest.mark.exhaustive
def test_a_run_on_two_columns_compiles_once_a_shape(tmp_path):
  words = reversing.words(60, longest=9)
  lines = [f"{w}\t{w.upper()}!" for w in words]
  path = tmp_path / "pairs.tsv"
  path.write_text("\n".join(lines), encoding="utf-8")
  task = {
    "name": "name_reversal",
    "path": str(path),
    "split": "shuffle",
    "batch_size": 2,
    "eval_batch_size": 2,
  }
  records = {}
  for buckets in (1, 2):
    config = {
      "seed": 0,
      "task": task | {"buckets": buckets},
      "model": reversing.LECTURE,
      "opt": {"name": "adam", "lr": 0.02, "schedule": "cosine"},
      "train": {"steps": 30, "steps_per_call": 5, "eval_every": 15},
    }
    workdir = tmp_path / str(buckets)
    records[buckets] = record = trainer.train(config, workdir)
    assert record["step"] == 30
    made = tasks.make(**config["task"], model=config["model"])
    feeds = {
      "train_steps": itertools.islice(made.train_batches(0), 30),
      "report": made.eval_batches("validation"),
    }
    shapes = {
      name: {batch["source_BS"].shape for batch in batches}
      for name, batches in feeds.items()
    }
    assert record["compilations"] == {k: len(s) for k, s in shapes.items()}
    assert len(shapes["train_steps"]) == buckets
  one, two = records[1], records[2]
  assert math.isclose(one["val/nll"], two["val/nll"], rel_tol=1e-4)
  assert math.isclose(one["best/val/nll"], two["best/val/nll"], rel_tol=1e-4)
  kept = trained.load(tmp_path / "2")
  assert kept.task.texts["test"][0] in words
  (written,) = kept.task.generate(kept.params, None, ["abc"], limit=5)
  assert written["source"] == "abc" and len(written["text"]) <= 5
