"""Three masks: three boundaries, each of which can be switched off alone."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reversing
from reversing import draw, jit, totals, whole

from rnnlab import metrics
from rnnlab.models import seq2seq
from rnnlab.tasks import name_reversal

WORDS = ["ada", "sophia", "o", "mathieu", "bo", "eve"]
MASKS = ("loss_mask", "source_mask", "length_handling")


@pytest.fixture
def task(tmp_path):
  """(off, settings) -> the task with these masks switched off."""

  def make(*off, **settings):
    switches = {name: name not in off for name in MASKS}
    return reversing.make(tmp_path, WORDS, **switches, **settings)

  return make


@pytest.fixture
def spied(monkeypatch):
  """A list that gets what every decoder is given: (encoded, first carry)."""
  seen, make = [], seq2seq.make

  @functools.wraps(make)
  def spying(**settings):
    model = make(**settings)

    def decode(params, encoded, carry, *args, **kwargs):
      seen.append((encoded, carry))
      return model.decode(params, encoded, carry, *args, **kwargs)

    return model._replace(decode=decode)

  monkeypatch.setattr(seq2seq, "make", spying)
  return seen


def loss(task, params, batch):
  return task.loss(params, (), batch, jax.random.key(0))[0]


def grads(task):
  """(params, batch) -> (count, total), gradient of the loss."""

  def total(params, batch):
    mean = loss(task, params, batch)
    return mean.total, mean.count

  return jit(jax.value_and_grad(total, has_aux=True))


# The eight combinations


@pytest.mark.exhaustive
@pytest.mark.parametrize(
  "off", [off for n in range(4) for off in itertools.combinations(MASKS, n)]
)
def test_every_combination_learns_and_each_switch_moves_its_boundary(
  task, off, spied
):
  made = task(*off)
  params, batch = draw(made), whole(made, extra=2)
  (total, count), gradient = grads(made)(params, batch)
  leaves = [np.asarray(g) for g in jax.tree.leaves(gradient)]
  assert np.isfinite(total) and all(np.isfinite(g).all() for g in leaves)
  assert any(np.any(g != 0) for g in jax.tree.leaves(gradient["encoder"]))
  real = {k: v for k, v in batch.items() if "real" in k}
  assert count == (
    batch["target_there_BU"].sum()
    if "loss_mask" in off
    else real["target_real_BU"].sum()
  )
  spied.clear()
  loss(made, params, batch)
  ((encoded, carry),) = spied
  which = "there" if "source_mask" in off else "real"
  assert (encoded.source.mask_BS == batch[f"source_{which}_BS"]).all()
  # The first state is that of a model that reads so many steps.
  model = seq2seq.make(vocab_size=made.vocab.size, **reversing.LECTURE)
  which = "there" if "length_handling" in off else "real"
  want = model.encode(
    params, batch["source_BS"], steps_BS=batch[f"source_{which}_BS"]
  ).carry
  other = model.encode(
    params,
    batch["source_BS"],
    steps_BS=batch[f"source_{'real' if which == 'there' else 'there'}_BS"],
  ).carry
  for a, b, c in zip(*map(jax.tree.leaves, (carry, want, other)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6)
    assert np.abs(a - c).max(axis=1).min() > 1e-3


# What padding can do with all masks on: nothing


def test_padding_reaches_neither_the_loss_nor_a_gradient(task, monkeypatch):
  made = task()
  params, batch = draw(made), whole(made)
  delta_BUV = np.zeros((*batch["targets_BU"].shape, made.vocab.size))

  def nll(params, delta_BUV, batch):
    def shifted(logits, targets):
      return metrics.cross_entropy(logits + delta_BUV, targets)

    with monkeypatch.context() as patch:
      patch.setattr(name_reversal, "cross_entropy", shifted)
      return loss(made, params, batch).total

  run = jit(jax.value_and_grad(nll, argnums=(0, 1)))
  want = run(params, delta_BUV, batch)
  reached_BUV = np.asarray(want[1][1] != 0)
  real_BU = batch["target_real_BU"]
  assert not reached_BUV[~real_BU].any()
  assert reached_BUV[real_BU].any(-1).all()
  # Pad is no class either: its logit is reached nowhere.
  assert not reached_BUV[..., made.vocab.id("[PAD]")].any()
  for content in (0, 3):
    other = {
      name: np.where(batch[f"{mask}_real_B{name[-1]}"], batch[name], content)
      for name, mask in (
        ("source_BS", "source"),
        ("inputs_BU", "target"),
        ("targets_BU", "target"),
      )
    }
    found = run(params, delta_BUV, batch | other)
    for a, b in zip(*map(jax.tree.leaves, (found, want)), strict=True):
      np.testing.assert_array_equal(a, b)
  # NaN in place of what padding reads.
  pad = made.vocab.id("[PAD]")
  poisoned = params | {"embed_VD": params["embed_VD"].at[pad].set(jnp.nan)}
  assert run(poisoned, delta_BUV, batch)[0] == want[0]


def test_the_loss_is_that_of_the_examples_one_by_one(task):
  made = task()
  params, batch = draw(made), whole(made, extra=5)
  total = jit(lambda batch: loss(made, params, batch))
  sums = metrics.to_host(total(batch))
  ones = [metrics.to_host(total(b)) for b in made.eval_batches("train", 1)]
  assert sums.count == sum(one.count for one in ones)
  assert math.isclose(sums.total, sum(o.total for o in ones), rel_tol=1e-5)


@pytest.mark.exhaustive
def test_a_zero_pad_embedding_does_not_stop_the_update(task, spied):
  for off in ((), ("length_handling",)):
    made = task(*off)
    params, pad = draw(made), made.vocab.id("[PAD]")
    params["embed_VD"] = params["embed_VD"].at[pad].set(0)
    for extra in (0, 4):
      loss(made, params, whole(made, extra=extra))
    one, four = (jax.tree.leaves(carry)[0] for _, carry in spied)
    moved_B = np.abs(one - four).max(axis=1)
    assert (moved_B > 1e-3).all() if off else (moved_B < 1e-6).all()
    spied.clear()


# What padding does where a mask is off


@pytest.mark.slow
@pytest.mark.parametrize("off", MASKS)
def test_padding_changes_the_numbers_where_a_mask_is_off(task, off):
  made, on = task(off), task()
  params = draw(made)
  plain, padded = (totals(made, params, size=8, extra=e) for e in (0, 7))
  if off == "loss_mask":
    # What is supervised is no matter of what is reported.
    want = totals(on, params, size=8)
    for name, mean in want.items():
      np.testing.assert_allclose(padded[name].total, mean.total, rtol=1e-5)
    counts = [loss(made, params, whole(made, extra=e)).count for e in (0, 7)]
    assert counts[1] == counts[0] + 7 * len(made.texts["train"])
    assert counts[0] > loss(on, params, whole(on)).count
  else:
    assert abs(plain["nll"].value() - padded["nll"].value()) > 1e-3
    share = [t["attention/padding"].value() for t in (plain, padded)]
    if off == "source_mask":
      assert 0.01 < share[0] < share[1]
    else:
      assert share == [0, 0]
  counts = {name: mean.count for name, mean in plain.items()}
  assert counts == {name: mean.count for name, mean in padded.items()}


def test_rows_that_are_no_examples_are_not_supervised_in_any_case(task):
  made = task("loss_mask")
  params, n = draw(made), len(made.texts["train"])
  whole_, wide = (next(made.eval_batches("train", n + k)) for k in (0, 3))
  sums = [metrics.to_host(loss(made, params, b)) for b in (whole_, wide)]
  assert sums[0].count == sums[1].count
  assert math.isclose(sums[0].total, sums[1].total, rel_tol=1e-5)


# Pad is never written


@pytest.mark.parametrize("beam", [1, 3])
def test_pad_is_never_written(task, beam):
  made = task()
  params, pad = draw(made), made.vocab.id("[PAD]")
  loud = params | {
    "out": params["out"] | {"b_V": params["out"]["b_V"].at[pad].set(1e4)}
  }
  how = {"limit": 6, "beam": beam}
  want = made.generate(params, None, ["ada", "sophia"], **how)
  found = made.generate(loud, None, ["ada", "sophia"], **how)
  for a, b in zip(found, want, strict=True):
    assert a["text"] == b["text"] and "[PAD]" not in a["text"]
    assert a["logprob"] == b["logprob"] > -100
  if beam == 1:
    batch = whole(made)
    assert loss(made, loud, batch).total == loss(made, params, batch).total
    off = task("loss_mask")
    assert loss(off, loud, batch).total > loss(off, params, batch).total + 1e4


# After the stop


def test_after_the_stop_a_row_is_done(task):
  made = task()
  params, stop = draw(made, seed=3), made.vocab.id("[S]")

  def write(bias, sources, **how):
    out = params["out"] | {"b_V": params["out"]["b_V"].at[stop].set(bias)}
    return made.generate(params | {"out": out}, None, sources, **how)

  for sample in write(1e4, ["ada", "o"], limit=4):
    assert sample["text"] == "" and sample["end"] == "stop"
    assert sample["attention_US"].shape == (1, len(sample["source"]))
    assert sample["logprob"] == 0
  for sample in write(-1e4, ["ada", "o"], limit=4):
    assert len(sample["text"]) == 4 and sample["end"] == "limit"
    assert sample["attention_US"].shape == (4, len(sample["source"]))
  sources = ["ada", "sophia", "o", "ma", "thieu", "bove"]
  mixed = write(2.0, sources, limit=9)
  lengths = {len(s["text"]) for s in mixed}
  assert {0, 2, 9} <= lengths
  for sample in mixed:
    n = len(sample["text"])
    assert n == 9 if sample["end"] == "limit" else n < 9
    weights_US = sample["attention_US"]
    assert weights_US.shape == (min(n + 1, 9), len(sample["source"]))
    np.testing.assert_allclose(weights_US.sum(1), 1, atol=1e-5)


@pytest.mark.parametrize(
  "sources, words",
  [
    ([], "at least one"),
    (["ada", ""], "none empty"),
    (["ada", "o Z"], r"source 'o Z': character ' ' \(U\+0020\) at position 2"),
  ],
)
def test_a_source_that_cannot_be_read_is_refused(task, sources, words):
  made = task()
  with pytest.raises(ValueError, match=words):
    made.generate(draw(made), None, sources)


@pytest.mark.parametrize(
  "settings, words",
  [
    ({"noise": "loud"}, "task.noise is 'fresh' or 'fixed', not 'loud'"),
    ({"batch_size": 0}, "task.batch_size must be at least 1, not 0"),
    ({"eval_batch_size": -1}, "task.eval_batch_size must be at least 1"),
    ({"buckets": 0}, "task.buckets must be at least 1, not 0"),
    ({"seed": 2**32}, "task.seed is 4294967296"),
    ({"mask": True}, "task.mask is no setting"),
    ({"model": reversing.LECTURE | {"cel": {}, "hiden": 3}}, "model.hiden is"),
  ],
)
def test_a_wrong_setting_is_named(task, settings, words):
  with pytest.raises(ValueError, match=words):
    task(**settings)


def test_dropout_does_not_see_the_padding(tmp_path):
  model = reversing.LECTURE | {"dropout": 0.4}
  task = reversing.make(tmp_path, reversing.words(), model=model)
  params = reversing.draw(task)
  (wide,) = itertools.islice(task.eval_batches("train", 8, 5, 8), 1)
  (plain,) = itertools.islice(task.eval_batches("train", 8, 0, 8), 1)
  assert wide["source_BS"].shape > plain["source_BS"].shape
  loss = reversing.jit(lambda p, b, k: task.loss(p, (), b, k)[0])
  key = jax.random.key(3)
  one, other = loss(params, plain, key), loss(params, wide, key)
  np.testing.assert_allclose(one.total, other.total, rtol=1e-6)
  again = loss(params, plain, jax.random.key(4))
  assert abs(float(again.total - one.total)) > 1e-3
