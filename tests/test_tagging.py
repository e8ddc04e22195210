"""Tagging as a task: chunks, sums, tables, and a run from start to end."""

import jax
import numpy as np
import pytest
import tiny
from test_scripts import command, record

from rnnlab import instruments, tasks, trained
from rnnlab import train as trainer
from rnnlab.data import roles
from rnnlab.metrics import Mean
from rnnlab.tasks import tagging
from rnnlab.update import evaluate

MODEL = {"embed": 4, "hidden": 5, "cell": {"name": "rnn"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """Thirty programs, of which one does not parse."""
  path, rng = tmp_path_factory.mktemp("source"), np.random.default_rng(0)
  for i in range(30):
    names = rng.choice(list("abcdefgh"), 3)
    text = "def {}({}):\n  return {}(1)  # so\n".format(*names)
    if i == 7:
      text = "def = 1\n"
    (path / f"m{i}.py").write_text(text * int(rng.integers(1, 4)))
  return path


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    yield


def make(folder, model=None, **settings):
  sizes = {"steps": 8, "margin": 3, "batch_size": 4, "eval_batch_size": 5}
  return tasks.make(
    "tagging", path=str(folder), model=MODEL | (model or {}), **sizes | settings
  )


@pytest.fixture(scope="module")
def params(folder):
  return make(folder).init(jax.random.key(0))


@pytest.mark.parametrize("margin", [0, 3, 100])
@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_every_character_of_a_split_counts_once(folder, split, margin):
  task = make(folder, margin=margin)
  found, shapes = [], set()
  for batch in task.eval_batches(split):
    counted = batch["counted_BT"]
    assert not (counted & ~batch["mask_BT"]).any()
    tokens = batch["tokens_BT"][counted].tolist()
    found += zip(tokens, batch["labels_BT"][counted].tolist(), strict=True)
    shapes.add(counted.shape)
  assert shapes == {(5, 8 + 2 * margin)}
  assert len(found) == task.facts[split]
  files = sorted(folder.glob("*.py"), key=lambda f: f.name)
  kept = [f for f in files if f.name != "m7.py"]
  parts = tagging.python_source.split([f.name for f in kept])[split]
  text = "".join(kept[i].read_text() for i in parts)
  assert task.vocab.decode([token for token, _ in found]) == text
  labels = np.concatenate([roles.label(kept[i].read_text())[0] for i in parts])
  assert [label for _, label in found] == labels.tolist()


def test_a_margin_is_of_the_same_file_and_counts_elsewhere(folder):
  task = make(folder)
  width = 0
  for batch in task.eval_batches("train"):
    for row, mask_T in zip(batch["tokens_BT"], batch["mask_BT"], strict=True):
      text = task.vocab.decode(row[mask_T])
      assert text in "".join(f.read_text() for f in folder.glob("*.py"))
      width = max(width, int(mask_T.sum()))
  assert width == 8 + 2 * 3


def test_training_batches_are_a_function_of_their_number(folder):
  task = make(folder)
  first = [b for b, _ in zip(task.train_batches(0), range(5), strict=False)]
  again = next(task.train_batches(4))
  for name, array in first[4].items():
    assert np.array_equal(array, again[name])
  assert task.facts["unparsed"] == 1 and task.facts["unknown"] >= 0
  assert task.per_epoch == -(-task.facts["train_chunks"] // 4)


def test_sums_do_not_depend_on_the_batches_or_on_padding(folder, params):
  task = make(folder)
  report, found = jax.jit(task.report), []
  for how in ((5, 0), (2, 0), (5, 4)):
    batches = task.eval_batches("validation", *how)
    found.append(evaluate(report, params, (), batches))
  for other in found[1:]:
    for name, mean in found[0].items():
      assert mean.count == other[name].count
      assert mean.total == pytest.approx(other[name].total, rel=1e-5)
  assert found[0]["nll"].count == task.facts["validation"]


def test_the_tables_add_up_to_the_report(folder, params):
  task = make(folder)
  batches = task.eval_batches("validation")
  total = evaluate(task.report, params, (), batches)
  tables = task.details(params, "validation")
  for rows in tables.values():
    n = [row["characters"] for row in rows]
    right = sum(row["accuracy"] * k for row, k in zip(rows, n, strict=True))
    assert sum(n) == total["accuracy"].count
    assert right == pytest.approx(total["accuracy"].total)
  by_label, by_place = tables["by_label"], tables["by_place"]
  nll = sum(row["nll"] * row["characters"] for row in by_label)
  assert nll == pytest.approx(total["nll"].total, rel=1e-5)
  names = total["accuracy/identifiers"]
  assert sum(row["identifiers"] for row in by_place) == names.count
  own = [row for row in by_label if row["label"] in roles.NAMES]
  assert sum(row["characters"] for row in own) == names.count
  assert [row["label"] for row in by_label] == [
    name for name in roles.LABELS if name in {row["label"] for row in by_label}
  ]
  assert by_place[0]["place"] == "0" and names.count > 0
  assert isinstance(names, Mean)


def test_a_character_that_training_lacks_is_unknown(folder):
  task = make(folder)
  unknown = task.vocab.size - 1
  assert task.vocab.ids("d\U0001f600").tolist() == [task.vocab.id("d"), unknown]
  assert task.vocab.symbols[unknown] == tagging.UNKNOWN


@pytest.mark.parametrize(
  "words, settings",
  [
    ("task.steps must be at least 1, not 0", {"steps": 0}),
    ("task.margin must be at least 0, not -1", {"margin": -1}),
    ("task.batch_size must be at least 1", {"batch_size": 0}),
    ("task.seed is -1", {"seed": -1}),
    ("model.direction is one of", {"model": {"direction": "up"}}),
    ("other characters than the run's", {"symbols": ["a", "[?]"]}),
  ],
)
def test_a_wrong_setting_is_refused_by_name(folder, words, settings):
  with pytest.raises(ValueError, match=words):
    make(folder, **settings)


def test_a_folder_without_a_program_is_refused(tmp_path):
  (tmp_path / "x.py").write_text("def = 1")
  with pytest.raises(ValueError, match="1 files, 1 of which do not parse"):
    make(tmp_path)


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
  """A run of few updates, alternating: its directory."""
  workdir = tmp_path_factory.mktemp("tagging") / "run"
  config = tiny.config(tmp_path_factory.mktemp("names"))
  config["task"] = {"name": "tagging", "path": str(folder), "steps": 16}
  config["task"] |= {"margin": 4, "batch_size": 4, "eval_batch_size": 4}
  config["model"] = MODEL | {"direction": "alternating", "layers": 2}
  config["train"] |= {"steps": 5, "eval_every": 5}
  trainer.train(config, workdir)
  return workdir


def test_a_run_is_trained_shown_and_measured(run, tmp_path):
  assert tiny.rows(run)[-1]["val/accuracy/identifiers"] >= 0
  loaded = trained.load(run)
  (sample,) = loaded.task.generate(loaded.params, None, ["def f(a):"])
  parts = [part.rsplit(" ", 1) for part in sample["labels"].split(" | ")]
  left = iter("def f(a):")  # what it takes for blanks is not shown
  assert all(c in left for text, _ in parts for c in text)
  assert {label for _, label in parts} <= set(roles.LABELS)
  reading = instruments.read("context", loaded)
  assert reading.record["label"]["leaks"] == 0
  assert reading.draw(tmp_path / "c.png").stat().st_size > 5_000


@pytest.mark.exhaustive
def test_the_commands_of_a_run(run, tmp_path):
  figure = tmp_path / "e.png"
  found = command(
    "scripts/evaluate.py", f"--workdir={run}", f"--figure={figure}"
  )
  out = record(found)
  assert out["characters"] == sum(r["characters"] for r in out["by_label"])
  assert figure.stat().st_size > 5_000
  audit = command(
    "scripts/analyze.py",
    f"--workdir={run}",
    "--what=context",
    f"--figure={tmp_path / 'c.png'}",
  )
  assert record(audit)["context"]["label"]["declared"] == "full"
