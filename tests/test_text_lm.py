"""The stream task: what crosses a chunk's border, and what a number counts."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from conftest import assert_close

from rnnlab import cells, scan, tasks, trained
from rnnlab.data import python_source
from rnnlab.data.vocabulary import UNKNOWN
from rnnlab.train import train
from rnnlab.update import evaluate

N = 403  # so that 10 batches of 4 rows of 8 steps, and then some, can be cut


@pytest.fixture(scope="module")
def path(tmp_path_factory):
  """A text of five letters in no order, and an "x" that only its end has."""
  rng = np.random.default_rng(0)
  content = "".join(rng.choice(list("abcde"), N))
  path = tmp_path_factory.mktemp("text") / "text.txt"
  path.write_text(content[:-3] + "x" + content[-2:], encoding="utf-8")
  return str(path)


def settings(path, **changes):
  task = {"name": "text_lm", "path": path, "steps": 8, "batch_size": 4}
  return {
    "seed": 0,
    "task": task | changes,
    "model": {"embed": 3, "hidden": 5, "cell": {"name": "lstm"}},
    "opt": {"name": "adam", "lr": 0.01},
    "train": {"steps": 24, "log_every": 4, "eval_every": 8, "save_every": 4},
  }


def make(path, **changes):
  return tiny.task(settings(path, **changes))


def drawn(task):
  leaves, tree = jax.tree.flatten(jax.eval_shape(task.init, jax.random.key(0)))
  rng = np.random.default_rng(0)
  return tree.unflatten(
    jnp.asarray(0.5 * rng.normal(size=p.shape), p.dtype) for p in leaves
  )


LINEAR = cells.Cell(  # h = a h + x
  init=None,
  carry=lambda params, batch: jnp.zeros((1, batch)),
  project=lambda params, x_DN: x_DN,
  drive=(lambda a, h_HB, u, before, memory: a * h_HB + u,),
  update=lambda carry, a, memory: (a[0], a[0]),
)


@pytest.mark.parametrize(
  "changes, h, gradient",
  [
    ({"truncation": "detach", "steps": 2}, 1.875, 2.5),
    ({"truncation": "reset", "steps": 2}, 1.5, 1.0),
    ({"truncation": "full", "steps": 2, "chunks": 2}, 1.875, 2.75),
  ],
)
def test_what_crosses_the_border_of_a_chunk(path, changes, h, gradient):
  """h_4 of h_t = h_(t-1) / 2 + 1 and its derivative, in the task's batches."""
  task = make(path, batch_size=1, **changes)

  def step(a, carry, batch):
    flags = batch["reset_BT"]
    x_BTD = jnp.ones((*flags.shape, 1))
    carry, h_BTH = scan.unroll(LINEAR, a, x_BTD, carry, reset_BT=flags)
    return h_BTH[0, -1, 0], carry

  # As the trainer does it: a batch starts from the state, a constant.
  carry, read = jnp.zeros((1, 1)), 0
  for batch in task.train_batches(0):
    run = jax.value_and_grad(step, has_aux=True)
    (last, carry), found = run(jnp.float32(0.5), carry, batch)
    read += batch["inputs_BT"].size
    if read == 4:
      break
  assert float(last) == h and float(found) == gradient


@pytest.mark.parametrize(
  "name", ["lstm", pytest.param("gru", marks=pytest.mark.slow)]
)
def test_ten_passes_of_a_hundred_are_one_of_a_thousand(name):
  settings = {"embed": 3, "hidden": 8, "layers": 2, "cell": {"name": name}}
  for kind, atol in (("float32", 1e-5), ("float64", 1e-12)):
    with jax.enable_x64(kind == "float64"):
      model = tasks.text_lm.lm.make(vocab_size=5, **settings)
      params = jax.tree.map(
        lambda p, kind=kind: p.astype(kind), model.init(jax.random.key(0))
      )
      tokens_BT = np.random.default_rng(1).integers(5, size=(2, 1000))
      apply = jax.jit(model.apply)
      whole = apply(params, tokens_BT, model.carry(params, 2))
      carry, parts = model.carry(params, 2), []
      for part_BT in np.split(tokens_BT, 10, axis=1):
        carry, logits_BTV = apply(params, part_BT, carry)
        parts.append(logits_BTV)
      assert_close((carry, jnp.concatenate(parts, 1)), whole, atol=atol)


def test_an_evaluation_does_not_depend_on_any_size(path):
  task = make(path)
  params, report = drawn(task), jax.jit(task.report)

  def sums(task, *how):
    batches = task.eval_batches("train", *how)
    return evaluate(report, params, task.carry(params), batches)["nll"]

  # One document is one row, and its first character is all that is not told.
  want = sums(task)
  assert want.count == task.facts["train"] - 1 == N - 1 - 40
  for other, how in (
    (task, [4, 5]),
    (make(path, steps=3, batch_size=2), []),
    (make(path, eval_batch_size=3), []),
  ):
    found = sums(other, *how)
    assert found.count == want.count
    assert found.total == pytest.approx(want.total, rel=1e-6)
  # By hand: one pass over all of it.
  model = tasks.text_lm.lm.make(vocab_size=6, never=(5,), **MODEL)
  tokens_N = task.vocab.encode(task.texts["train"][0])
  logits_NV = model.apply(params, tokens_N[None, :-1])[1][0]
  nll_N = -jax.nn.log_softmax(logits_NV)[np.arange(N - 41), tokens_N[1:]]
  known = (N - 40) / (N - 39)
  by_hand = float(nll_N.sum()) - (N - 41) * math.log(known)
  assert want.total == pytest.approx(by_hand, rel=1e-6)


MODEL = {"embed": 3, "hidden": 5, "cell": {"name": "lstm"}}


def test_a_new_character_costs_its_share_of_what_is_left(path):
  task = make(path)
  assert task.facts["unknown"] == 1
  assert task.vocab.symbols == (*"abcde", UNKNOWN)
  params, n = drawn(task), task.facts["train"]
  T = 6
  batch = {
    "inputs_BT": np.zeros((1, T), int),
    "targets_BT": np.arange(T)[None],
    "reset_BT": np.ones((1, T), bool),
  }
  masks = np.eye(T, dtype=bool)[:, None]
  report, carry = jax.jit(task.report), task.carry(params)
  nll_T = [
    float(report(params, carry, batch | {"mask_BT": mask})[1]["nll"].total)
    for mask in masks
  ]
  others = 0x110000 - 0x800 - 5
  assert nll_T[5] == pytest.approx(math.log((n + 1) * others))
  # All positions read the same from a fresh state: one distribution.
  p_T = np.exp(-np.array(nll_T)) * [1, 1, 1, 1, 1, others]
  assert p_T.sum() == pytest.approx(1, abs=1e-6)
  total = evaluate(
    report, params, task.carry(params), task.eval_batches("validation")
  )
  assert math.isfinite(total["nll"].value()) and total["nll"].count == 39


def test_the_state_is_carried_and_fresh_where_an_epoch_starts(path):
  task = make(path)
  params = drawn(task)
  report, per_epoch = jax.jit(task.report), task.per_epoch
  assert per_epoch == (N - 41) // 32
  fresh, losses = task.carry(params), []
  carry = jax.tree.map(lambda c: c + 3, fresh)  # of another epoch
  feed = task.train_batches(per_epoch - 1)
  for _ in range(3):
    batch = next(feed)
    carry, sums = report(params, carry, batch)
    losses.append(float(sums["nll"].total))
  first, second = (next(task.train_batches(i)) for i in (0, 1))
  after, sums = report(params, fresh, first)
  assert float(sums["nll"].total) == losses[1]
  assert float(report(params, after, second)[1]["nll"].total) == losses[2]
  assert float(report(params, fresh, second)[1]["nll"].total) != losses[2]
  # With "reset" what came before makes no difference at all.
  task = make(path, truncation="reset")
  batch = next(task.train_batches(1))
  for start in (fresh, after):
    again = jax.jit(task.report)(params, start, batch)[1]["nll"]
    assert float(again.total) == pytest.approx(
      float(report(params, fresh, second)[1]["nll"].total), rel=1e-6
    )


@pytest.mark.slow
def test_documents_in_a_row_are_documents_alone(tmp_path, monkeypatch):
  for name in [f"m{i}" for i in range(25)]:
    content = f"{name} = {name[1:]}\n" * (1 + int(name[1:]) % 4)
    (tmp_path / f"{name}.py").write_text(content)
  paths = {"stdlib": str(tmp_path)}
  monkeypatch.setattr(python_source.sysconfig, "get_paths", lambda: paths)
  task = make("")
  params, report = drawn(task), jax.jit(task.report)

  def nll(*how):
    batches = task.eval_batches("train", *how)
    return evaluate(report, params, task.carry(params), batches)["nll"]

  packed = nll(2)
  sums = [nll(2, 0, n) for n in (1, 2)]
  model = tasks.text_lm.lm.make(
    vocab_size=task.vocab.size, never=(task.vocab.size - 1,), **MODEL
  )
  texts, alone = task.sequences("train"), []
  apply, longest = jax.jit(model.apply), max(map(len, texts))
  for ids in texts:
    # What stands behind a text reaches nothing in it.
    padded_BT = np.zeros((1, longest), np.int32)
    padded_BT[0, : len(ids)] = ids
    logits_NV = apply(params, padded_BT)[1][0, : len(ids) - 1]
    logp_NV = jax.nn.log_softmax(logits_NV)
    alone.append(-float(logp_NV[np.arange(len(ids) - 1), ids[1:]].sum()))
  n = task.facts["train"]
  for found, wanted in (
    (packed, alone),
    (sums[0], alone[:1]),
    (sums[1], alone[:2]),
  ):
    new = found.count * math.log(n / (n + 1))
    assert found.total + new == pytest.approx(sum(wanted), rel=1e-5)
  assert packed.count == n - task.facts["train_files"]


@pytest.fixture(scope="module")
def straight(path, tmp_path_factory):
  folder = tmp_path_factory.mktemp("straight")
  return train(settings(path), folder / "run"), folder / "run"


def test_a_run_goes_on_with_its_state_as_if_not_ended(path, straight, tmp_path):
  record, workdir = straight
  for at in (6, 17):
    tiny.kill(settings(path), tmp_path / "run", at)
  again = train(settings(path), tmp_path / "run")
  assert again["fingerprint"] == record["fingerprint"]
  assert tiny.rows(tmp_path / "run") == tiny.rows(workdir)


def test_update_10000_is_as_update_10(path, straight):
  """One program for all: the batches' shapes do not grow, nor the state's."""
  record, _ = straight
  assert record["step"] == 24 > 2 * make(path).per_epoch
  assert record["compilations"]["train_steps"] == 1
  task = make(path)
  early, late = (next(task.train_batches(i)) for i in (10, 10_000))
  assert jax.tree.map(np.shape, early) == jax.tree.map(np.shape, late)
  carry = task.carry(drawn(task))
  assert jax.eval_shape(task.report, drawn(task), carry, late)[0] == (
    jax.eval_shape(lambda: carry)
  )


def test_nothing_is_learned_from_what_has_no_order(straight):
  record, _ = straight
  assert record["val/nll"] > math.log(5) - 0.05
  assert record["data"]["dropped"] == N - 40 - 11 * 32


def test_generation_goes_on_from_prompts(straight):
  loaded = trained.load(straight[1])
  task, key = loaded.task, jax.random.key(3)

  def generate(prompts, **how):
    return task.generate(loaded.params, key, prompts, **{"limit": 9} | how)

  both = generate(["abca", ""])
  assert [len(s["text"]) for s in both] == [13, 9]
  assert both[0]["text"].startswith("abca") and both[1]["end"] == "limit"
  assert set("".join(s["text"] for s in both)) <= set("abcde")
  assert generate(["abca"])[0]["text"] == both[0]["text"]
  assert generate(["a"], limit=1)[0]["logprob"] > math.log(0.01)
  with pytest.raises(ValueError, match=r"prompt 'ax': character 'x'"):
    generate(["ax"])
  bare = settings(task.facts and straight[0] and "gone")
  bare["task"] |= {"symbols": list(task.vocab.symbols), "data": False}
  alone = tiny.task(bare).generate(loaded.params, key, ["abca"], limit=9)
  assert alone[0]["text"] == both[0]["text"]


@pytest.mark.parametrize(
  "words, changes",
  [
    ("truncation is one of .*not 'cut'", {"truncation": "cut"}),
    ("chunks=2 is the window of task.truncation='full'", {"chunks": 2}),
    ("shuffle=True cannot be had with .*'detach'", {"shuffle": True}),
    ("task.steps must be at least 1, not 0", {"steps": 0}),
    ("task.eval_batch_size must be at", {"eval_batch_size": 0}),
    ("363 characters; .*=91 rows of 4 steps needs 365", {"batch_size": 91}),
    ("task.held_out must be in", {"held_out": -0.1}),
  ],
)
def test_what_is_wrong_is_refused_by_name(path, words, changes):
  with pytest.raises(ValueError, match=words):
    make(path, **{"steps": 4} | changes)
