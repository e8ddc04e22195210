"""The name task: what a batch holds, what the loss counts, what is refused."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from conftest import assert_close

from rnnlab import metrics, optim, tasks, update
from rnnlab import train as trainer
from rnnlab.data import batching
from rnnlab.models import lm
from rnnlab.tasks import name_lm

AZ = [*"abcdefghijklmnopqrstuvwxyz", "[S]", "[PAD]"]
MODEL = {"embed": 3, "hidden": 4, "cell": {"name": "rnn"}}


@pytest.fixture
def task(tmp_path):
  """(texts, settings) -> the task on a file of these texts."""

  def make(*texts, model=MODEL, **settings):
    path = tmp_path / "names.txt"
    path.write_text("\n".join(texts), encoding="utf-8")
    return tasks.make("name_lm", model=model, path=str(path), **settings)

  return make


def whole(task, split):
  """All batches of a split as one, and its texts."""
  batches = list(task.eval_batches(split))
  return {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}


# Batches


def test_ada(task):
  made = task("ada", "eve", "o", batch_size=3, symbols=AZ)
  assert made.vocab.size == 28 and made.texts["train"] == ["ada", "eve", "o"]
  batch = whole(made, "train")
  assert batch["inputs_BT"][0].tolist()[:4] == [26, 0, 3, 0]
  assert batch["targets_BT"][0].tolist()[:4] == [0, 3, 0, 26]
  assert batch["mask_BT"].sum(1)[:3].tolist() == [4, 4, 2]
  assert batch["inputs_BT"][2].tolist() == [26, 14, 27, 27]
  assert batch["targets_BT"][2].tolist() == [14, 26, 27, 27]


def audit(batch, start):
  """Raises unless every row starts at `start` and targets are one ahead."""
  inputs_BT, targets_BT, mask_BT = (
    batch[k] for k in ("inputs_BT", "targets_BT", "mask_BT")
  )
  full_B = mask_BT[:, 0]
  assert (inputs_BT[full_B, 0] == start).all()
  assert (np.diff(mask_BT.astype(int)) <= 0).all()  # real first, then padding
  both_BT = mask_BT[:, 1:]
  assert (inputs_BT[:, 1:] == targets_BT[:, :-1])[both_BT].all()
  lengths_B = mask_BT.sum(1)[full_B]
  assert (targets_BT[full_B, lengths_B - 1] == start).all()


def test_every_target_is_the_next_input(task):
  made = task(*tiny.names(), batch_size=8, eval_batch_size=16)
  start = made.vocab.id("[S]")
  feed = itertools.islice(made.train_batches(0), 14)
  for batch in [*feed, *made.eval_batches("validation")]:
    audit(batch, start)
    for wrong in (
      batch | {"targets_BT": batch["inputs_BT"]},
      batch | {"inputs_BT": batch["targets_BT"]},
    ):
      with pytest.raises(AssertionError):
        audit(wrong, start)


def test_the_split_keeps_a_name_on_one_side_whatever_the_batches(task):
  texts = tiny.names(90) + tiny.names(90)[:10]
  made = task(*texts, batch_size=8)
  assert sum(map(len, made.texts.values())) == 100 == made.facts["names"]
  sides = [set(side) for side in made.texts.values()]
  assert not any(a & b for a, b in itertools.combinations(sides, 2))
  assert made.facts["repeats"] == 10
  assert made.facts["validation_in_train"] == made.facts["test_in_train"] == 0
  other = task(*texts, batch_size=3, eval_batch_size=1, seed=9, split_seed=4)
  assert other.texts == made.texts
  assert sum(map(len, task(*texts, unique=True).texts.values())) == 90
  shuffled = task(*texts, split="shuffle")
  assert [len(side) for side in shuffled.texts.values()] == [80, 10, 10]
  assert shuffled.facts["validation_in_train"] > 0


def test_batches_depend_on_the_data_seed_alone(task, tmp_path, monkeypatch):
  def first(**settings):
    feed = task(*tiny.names(), batch_size=8, **settings).train_batches(0)
    return list(itertools.islice(feed, 3))

  want = first()
  assert_close(first(model=MODEL | {"dropout": 0.5}), want, atol=0)
  with pytest.raises(AssertionError):
    assert_close(first(seed=1), want, atol=0)

  def trained(seed):
    read = []

    def before(i, batch):
      if i == 3:
        raise tiny.Killed
      read.append(batch)
      return batch

    with monkeypatch.context() as patch, pytest.raises(tiny.Killed):
      tiny.wrap(patch, before)
      trainer.train(tiny.config(tmp_path, seed=seed), tmp_path / str(seed))
    return read

  assert_close(trained(1), trained(0), atol=0)


@pytest.mark.parametrize("seed", [-1, 2**32, 2**63])
def test_a_seed_out_of_range_is_refused_by_name(task, seed, tmp_path):
  with pytest.raises(ValueError, match=f"task.seed is {seed}"):
    task("ada", seed=seed)
  with pytest.raises(ValueError, match=f"task.split_seed is {seed}"):
    task("ada", split_seed=seed)
  with pytest.raises(ValueError, match=f"^seed is {seed}"):
    trainer.train(tiny.config(tmp_path, seed=seed), tmp_path / "run")
  assert not (tmp_path / "run").exists()


# Loss


def test_a_name_of_n_letters_has_n_plus_1_factors(task, x64):
  texts = ["ada", "bo", "ada", "abcd"]
  made = task(*texts, batch_size=8, symbols=AZ)
  params = made.init(jax.random.key(0))
  batch = whole(made, "train")
  mean, (_, sums) = jax.jit(made.loss)(params, (), batch, None)
  assert mean.count == sums["nll"].count == 4 + 3 + 4 + 5
  model = lm.make(vocab_size=28, never=(27,), **MODEL)
  _, logits_BTV = jax.jit(model.apply)(params, batch["inputs_BT"])
  probs_BTV, product = np.asarray(jax.nn.softmax(logits_BTV)), 1.0
  for b, text in enumerate(texts):
    for t, symbol in enumerate([*made.vocab.encode(text), 26]):
      product *= probs_BTV[b, t, symbol]
  np.testing.assert_allclose(mean.total, -math.log(product), rtol=1e-12)


def test_padding_reaches_neither_the_loss_nor_a_gradient(task, monkeypatch):
  made = task("ada", "bo", "e", batch_size=5)
  params = made.init(jax.random.key(0))
  batch = next(made.train_batches(0))
  delta_BTV = np.zeros((*batch["mask_BT"].shape, made.vocab.size))

  def nll(params, delta_BTV, batch):
    def shifted(logits, targets):
      return metrics.cross_entropy(logits + delta_BTV, targets)

    with monkeypatch.context() as patch:
      patch.setattr(name_lm, "cross_entropy", shifted)
      return made.loss(params, (), batch, None)[0].total

  run = jax.jit(jax.value_and_grad(nll, argnums=(0, 1)))
  want = run(params, delta_BTV, batch)
  reached_BTV = np.asarray(want[1][1] != 0)
  assert not reached_BTV[~batch["mask_BT"]].any()
  assert reached_BTV[batch["mask_BT"]].any(-1).all()
  for content in (0, 3):
    other = {
      k: np.where(batch["mask_BT"], batch[k], content)
      for k in ("inputs_BT", "targets_BT")
    }
    assert_close(run(params, delta_BTV, batch | other), want, atol=0)
  # Seven more positions, and five more rows, of padding.
  wider = {k: np.pad(batch[k], ((0, 5), (0, 7))) for k in batch}
  delta_BTV = np.pad(delta_BTV, ((0, 5), (0, 7), (0, 0)))
  total, (grads, _) = run(params, delta_BTV, wider)
  assert_close((total, grads), (want[0], want[1][0]), atol=1e-5)


def test_a_batch_without_a_supervised_position_counts_nothing(task):
  made = task("ada", "bo", batch_size=2)
  params = made.init(jax.random.key(0))
  (batch,) = made.eval_batches("train", 2)
  empty = batch | {"mask_BT": np.zeros_like(batch["mask_BT"])}

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def total(params):
    mean, _ = made.loss(params, (), empty, jax.random.key(0))
    return mean.total, mean.count

  (sums, count), grads = total(params)
  assert sums == count == 0
  assert all((np.asarray(g) == 0).all() for g in jax.tree.leaves(grads))


@pytest.mark.exhaustive
def test_nothing_predicts_random_letters(task):
  rng = np.random.default_rng(0)
  words = {"".join(rng.choice(list("abcd"), 5)): None for _ in range(600)}
  model = {"embed": 8, "hidden": 16, "cell": {"name": "rnn"}}
  made = task(*words, model=model, batch_size=64)
  optimizer = optim.make(name="adam", lr=0.01, steps=200)
  state = update.init_state(made, optimizer, jax.random.key(0))
  feed = list(itertools.islice(made.train_batches(0), 200))
  batches_K = jax.tree.map(lambda *rows: np.stack(rows), *feed)
  steps = jax.jit(update.make_train_steps(made, optimizer))
  state, _ = steps(
    *(state, batches_K, np.int32(200), np.float32(0)), optimizer.numbers
  )
  held_out = whole(made, "validation")
  nll = made.report(state.params, (), held_out)[1]["nll"].value()
  # Five letters of ln 4 each, and a stop that is certain: no target was seen.
  bound = 5 * math.log(4) / 6
  assert bound - 0.01 < nll < bound + 0.1


# Little data, and wrong data


def test_five_names_in_batches_of_eight(task):
  made = task("ada", "bo", "eve", "kai", "leo", batch_size=8)
  for batch in (*made.eval_batches("train", 8), next(made.train_batches(0))):
    assert batch["inputs_BT"].shape == (8, 4)
    assert (batch["mask_BT"].sum(1) == 0).sum() == 3
    assert batch["mask_BT"].sum() == 19


def test_without_validation_names_training_works_and_tells_no_figure(tmp_path):
  (tmp_path / "names.txt").write_text("a\naa\naaa", encoding="utf-8")
  config = tiny.config(tmp_path, **{"task.split": "hash"})
  record = trainer.train(config, tmp_path / "run")
  assert record["data"]["validation"] == 0 and record["step"] == 20
  assert record["val/nll"] is record["best/val/nll"] is None
  rows = tiny.rows(tmp_path / "run")
  assert rows[-1]["train/nll"] < rows[0]["train/nll"]
  assert not any("val/nll" in row for row in rows)


@pytest.mark.parametrize(
  "words, settings",
  [
    ("task.batch_size must be at least 1, not 0", {"batch_size": 0}),
    ("split rule 'random'", {"split": "random"}),
    ("task.bach_size is no setting", {"bach_size": 3}),
    (r"names.txt, line 3: character 'x' \(U\+0078\)", {"symbols": ["a", "d"]}),
    ("leaves 0 to train on", {"names": ["otto"]}),
  ],
)
def test_what_is_wrong_is_named(task, words, settings):
  settings = {"names": ["ada", "", "xa"]} | settings
  with pytest.raises(ValueError, match=words):
    task(*settings.pop("names"), **settings)


# Generation


def test_prompts_are_refused_empty_or_gone_on_from(task):
  made = task("ada", "bo", "eve")
  params, key = made.init(jax.random.key(0)), jax.random.key(1)
  write = functools.partial(made.generate, params, key, limit=5)
  for prompt, words in ((" ", "U.0020. at position 1"), ("aZ", "position 2")):
    with pytest.raises(ValueError, match=f"prompt {prompt!r}: .*{words}"):
      write(["a", prompt])
  with pytest.raises(ValueError, match="limit must be in 1 .. 1,000,000"):
    made.generate(params, key, ["a"], limit=0)
  samples = write(["", "ad", "bo", ""])
  assert [s["text"][:2] for s in samples[1:3]] == ["ad", "bo"]
  for sample, prompt in zip(samples, ["", "ad", "bo", ""], strict=True):
    drawn = len(sample["text"]) - len(prompt)
    assert drawn == 5 if sample["end"] == "limit" else drawn < 5
  # What is reported is the loss the text would have as an example.
  done = [sample for sample in samples if sample["end"] == "stop"]
  ids = [[6, *made.vocab.encode(sample["text"]), 6] for sample in done]
  batch = name_lm.shift(*batching.padded(ids, 9, 7, len(done), 8), 7)
  total = made.report(params, (), batch)[1]["nll"].total
  assert done and abs(total + sum(s["logprob"] for s in done)) < 1e-5


def test_the_stored_vocabulary_is_enough_to_write(task, tmp_path):
  made = task("ada", "bo", "eve")
  params, key = made.init(jax.random.key(0)), jax.random.key(1)
  want = made.generate(params, key, ["", "a"], limit=9)
  (tmp_path / "names.txt").unlink()
  symbols = list(made.vocab.symbols)
  bare = tasks.make(
    "name_lm", model=MODEL, path="gone", symbols=symbols, data=False
  )
  assert bare.generate(params, key, ["", "a"], limit=9) == want
  broken = jax.tree.map(lambda p: p * jnp.nan, params)
  (failed,) = bare.generate(broken, key, ["a"], limit=9)
  assert failed["text"] == "a" and failed["end"] == "failed"
