"""Pairs: noise, shift, shapes, and files of one and of two columns."""

import itertools

import numpy as np
import pytest

from rnnlab.data import batching, names, pairs
from rnnlab.data.vocabulary import Vocabulary

AZ = Vocabulary.of(["abcdefghijklmnopqrstuvwxyz"])
STOP, PAD = AZ.id("[S]"), AZ.id("[PAD]")
WORDS = ["ada", "sophias", "o", "mathieu", "bo", "eve", "leonora", "kai"]


@pytest.fixture
def listed(tmp_path):
  """(lines) -> the file of these lines as it was read."""

  def read(*lines):
    path = tmp_path / "pairs.tsv"
    path.write_text("\n".join(lines), encoding="utf-8")
    return names.read(path)

  return read


@pytest.fixture
def batcher(listed):
  def make(*lines, vocab=AZ, seed=0, buckets=1):
    read = listed(*lines)
    return pairs.Batcher(pairs.of(read), vocab, read.where, seed, buckets)

  return make


def text(row, mask=None):
  return AZ.decode(row if mask is None else row[mask])


def examples(batches):
  """The real rows of batches: a list of (source, inputs, targets)."""
  found = []
  for batch in batches:
    for b in np.flatnonzero(batch["target_real_BU"][:, 0]):
      source_S = batch["source_BS"][b, batch["source_real_BS"][b]]
      real_U = batch["target_real_BU"][b]
      inputs_U, targets_U = batch["inputs_BU"][b], batch["targets_BU"][b]
      found.append((text(source_S), text(inputs_U[real_U]), targets_U[real_U]))
  return [(s, i, text(t)) for s, i, t in found]


# One example, by hand


def test_sophia(monkeypatch, batcher):
  sophia, urxzwq = (AZ.encode(t)[None] for t in ("sophia", "urxzwq"))
  assert text(pairs.interleave(sophia, urxzwq)[0]) == "suorpxhziwaq"
  drawn = urxzwq[[0, 0, 0]]
  monkeypatch.setattr(pairs, "noise", lambda *key: drawn)
  made = batcher("bo", "sophia", "ada")
  batch = made.batch([1], 2, epoch=0)
  (found,) = examples([batch])
  assert found == ("suorpxhziwaq", "[S]aihpos", "aihpos[S]")
  assert batch["source_BS"].shape == (2, 12) and (made.target_width == 7)


def test_ada_has_four_supervised_positions_beside_a_longer_name(
  monkeypatch, batcher
):
  drawn = np.tile(AZ.encode("xyzxyz"), (2, 1))
  monkeypatch.setattr(pairs, "noise", lambda *key: drawn)
  batch = batcher("ada", "sophia").batch([0, 1], 3, epoch=0)
  assert text(batch["source_BS"][0]) == "axdyaz" + 6 * "[PAD]"
  assert batch["inputs_BU"][0].tolist() == [STOP, 0, 3, 0, PAD, PAD, PAD]
  assert batch["targets_BU"][0].tolist() == [0, 3, 0, STOP, PAD, PAD, PAD]
  assert batch["target_real_BU"].sum(1).tolist() == [4, 7, 0]
  assert batch["source_real_BS"].sum(1).tolist() == [6, 12, 0]
  # The third row is no example: nothing of it is there at all.
  for name in ("source", "target"):
    there_BT = batch[f"{name}_there_B{'S' if name == 'source' else 'U'}"]
    assert there_BT[:2].all() and not there_BT[2].any()
  assert (batch["source_BS"][2] == PAD).all()
  assert (batch["inputs_BU"][2] == PAD).all()


# The shift


def audit(batch):
  """Raises unless inputs start at [S] and targets are one ahead of them."""
  inputs_BU, targets_BU = batch["inputs_BU"], batch["targets_BU"]
  real_BU = batch["target_real_BU"]
  assert (inputs_BU[real_BU[:, 0], 0] == STOP).all()
  both_BU = real_BU[:, 1:]
  assert (inputs_BU[:, 1:] == targets_BU[:, :-1])[both_BU].all()
  last_B = real_BU.sum(1)[real_BU[:, 0]] - 1
  assert (targets_BU[real_BU[:, 0], last_B] == STOP).all()
  assert (targets_BU[real_BU] == STOP).sum() == real_BU[:, 0].sum()
  for ids_BU in (inputs_BU, targets_BU):
    assert (ids_BU[~real_BU] == PAD).all() and (ids_BU[real_BU] != PAD).all()


def test_every_target_is_the_next_input(batcher):
  made = batcher(*WORDS, buckets=3)
  parts = {"train": range(8)}
  feed = itertools.islice(made.train(range(8), 3, True)(0), 7)
  for batch in [*feed, *made.once(parts, 3)("train", None, 2)]:
    audit(batch)
    wrong = batch | {"targets_BU": batch["inputs_BU"]}
    with pytest.raises(AssertionError):
      audit(wrong)


# Noise


def test_noise_is_a_function_of_seed_epoch_and_example(batcher):
  made = batcher(*WORDS, seed=5)
  alone = {n: examples([made.batch([n], 1, 3)])[0] for n in range(8)}
  for size, order, buckets in ((8, range(8), 1), (3, [7, 2, 5], 3)):
    other = batcher(*WORDS, seed=5, buckets=buckets)
    for extra in (0, 4):
      found = examples([other.batch(np.array(order), size, 3, extra)])
      assert found == [alone[n] for n in order]
  sources = {
    key: [batcher(*WORDS, seed=key[0]).batch(range(8), 8, key[1])["source_BS"]]
    for key in ((5, 3), (5, 4), (6, 3), (3, 5))
  }
  tables = [np.stack(s).tobytes() for s in sources.values()]
  assert len(set(tables)) == 4


def test_noise_is_uniform_over_the_letters_and_only_between_them():
  table_NT = pairs.noise((4000, 5), 26, 0, 1)
  counts = np.bincount(table_NT.ravel(), minlength=26)
  assert len(counts) == 26
  # 25 degrees of freedom: beyond 64 once in 30 thousand.
  expected = table_NT.size / 26
  assert ((counts - expected) ** 2 / expected).sum() < 64
  with pytest.raises(ValueError, match="read-only"):
    table_NT[0, 0] = 0


def test_fixed_noise_is_that_of_evaluation_and_fresh_noise_changes(batcher):
  made = batcher(*WORDS)
  held = sorted(examples(made.once({"train": range(8)}, 5)("train")))
  for fresh in (False, True):
    feed = made.train(range(8), 3, fresh)
    epochs = [list(itertools.islice(feed(3 * e), 3)) for e in range(3)]
    sources = [sorted(examples(epoch)) for epoch in epochs]
    targets = [sorted(t for *_, t in epoch) for epoch in sources]
    assert targets == [sorted(w[::-1] + "[S]" for w in WORDS)] * 3
    assert len({str(s) for s in [held, *sources]}) == (4 if fresh else 1)
    # Batch i is a function of i alone.
    for a, b in zip(epochs[2], itertools.islice(feed(6), 3), strict=True):
      assert all((a[k] == b[k]).all() for k in a)


def test_the_letters_of_a_name_stand_at_even_places(batcher):
  for source, _, target in examples(
    batcher(*WORDS).once({"a": range(8)}, 8)("a")
  ):
    assert source[::2] + "[S]" == target[:-3][::-1] + "[S]"
    assert len(source) == 2 * len(target[:-3])
    assert set(source) <= set("abcdefghijklmnopqrstuvwxyz")


# Files of two columns


def test_two_columns_are_taken_as_they_stand(batcher, listed):
  lines = ["a b\tx", "", "  ada\tsome words  ", "z\té日"]
  made = pairs.of(listed(*lines))
  assert made.sources == ["a b", "ada", "z"]
  assert made.targets == ["x", "some words", "é日"]
  assert not made.noisy
  vocab = Vocabulary.of(made.sources + made.targets)
  batch = batcher(*lines, vocab=vocab).batch([2, 0], 2, epoch=7)
  decode = vocab.decode
  assert decode(batch["source_BS"][0]) == "z[PAD][PAD]"
  assert decode(batch["source_BS"][1]) == "a b"
  assert decode(batch["targets_BU"][0][:3]) == "é日[S]"
  assert batch["source_real_BS"].sum(1).tolist() == [1, 3]
  assert pairs.of(listed("ada", "é日")) == pairs.Pairs(
    ["ada", "é日"], ["ada", "日é"], True
  )


@pytest.mark.parametrize(
  "lines, words",
  [
    (["a\tb", "", "c"], "pairs.tsv, line 3: 1 columns, .* has 2"),
    (["a\tb", "c\td\te"], "line 2: 3 columns, .* has 2"),
    (["a\tb\tc", "a\tb"], "line 1: 3 columns, .* has 2"),
    (["a", "", "", "b\tc"], "line 4: 2 columns, .* has 1"),
    (["a\tb", "\tc"], "line 2: 1 columns"),
    (["a\tb", "c\t "], "line 2: 1 columns"),
    (["a\tb", "c\t\td"], "line 2: 3 columns"),
  ],
)
def test_a_line_of_other_columns_is_named(listed, lines, words):
  with pytest.raises(ValueError, match=words):
    pairs.of(listed(*lines))


@pytest.mark.parametrize(
  "lines, words",
  [
    (["ada", "", "zoë"], r"line 3: character 'ë' \(U\+00EB\) at position 3"),
    (["a\tb", "x\tzoë"], r"line 2: character 'ë' .* at position 3"),
    (["a\tb", "xë\tz"], r"line 2: character 'ë' .* at position 2"),
  ],
)
def test_an_unknown_character_is_named_with_its_line(batcher, lines, words):
  with pytest.raises(ValueError, match=words):
    batcher(*lines)


# Shapes


def padding(batches):
  real_BS = np.concatenate([b["source_real_BS"].ravel() for b in batches])
  return 1 - real_BS.mean()


@pytest.mark.parametrize("buckets", [1, 2, 3, 8, 20])
def test_buckets_bound_the_shapes_and_change_no_row(batcher, buckets):
  rng = np.random.default_rng(0)
  lengths = np.minimum(rng.geometric(0.2, 60), 30)
  words = ["".join(rng.choice(list("abcd"), n)) for n in lengths]
  one, made = batcher(*words), batcher(*words, buckets=buckets)
  parts = {"train": range(60)}
  for size in (1, 4, 60):
    want = list(one.once(parts, size)("train"))
    found = list(made.once(parts, size)("train"))
    assert examples(found) == examples(want)
    # Row i is example i of the file, ties in length included.
    assert [t for *_, t in examples(found)] == [w[::-1] + "[S]" for w in words]
    shapes = {(b["source_BS"].shape, b["inputs_BU"].shape) for b in found}
    assert len(shapes) <= buckets
    if size == 1 and buckets in (2, 3, 8):
      assert len(shapes) == buckets
      assert padding(found) < padding(want) - 0.15
    for batch in found:
      assert {v.shape[0] for v in batch.values()} == {size}
      assert batch["source_BS"].dtype == batch["inputs_BU"].dtype == np.int32
  widths = {b["source_BS"].shape[1] for b in one.once(parts, 7)("train")}
  assert widths == {2 * lengths.max()}


@pytest.mark.parametrize("buckets", [1, 3])
def test_what_is_there_ends_with_the_longest_row_and_extra_padding(
  batcher, buckets
):
  made = batcher(*WORDS, buckets=buckets)
  for indices in ([0], [2, 4], [1, 2, 3], list(range(8))):
    longest = max(len(WORDS[n]) for n in indices)
    for extra in (0, 7):
      batch = made.batch(indices, 9, 0, extra)
      plain = made.batch(indices, 9, 0)
      for name, width in (("source", 2 * longest), ("target", longest + 1)):
        axis = "S" if name == "source" else "U"
        there_BT = batch[f"{name}_there_B{axis}"]
        real_BT = batch[f"{name}_real_B{axis}"]
        want_T = np.arange(there_BT.shape[1]) < width + extra
        assert (there_BT[: len(indices)] == want_T).all()
        assert not there_BT[len(indices) :].any()
        assert not (real_BT & ~there_BT).any()
      for key, rows in plain.items():
        wide = batch[key]
        assert wide.shape[1] == rows.shape[1] + extra
        if "there" not in key:
          assert (wide[:, : rows.shape[1]] == rows).all()
          fill = PAD if key.endswith(("source_BS", "s_BU")) else False
          assert (wide[:, rows.shape[1] :] == fill).all()


def test_nothing_is_cut(batcher):
  words = ["abc", "abcdef", "abcdefghi"]
  for buckets in (1, 2, 3):
    made = batcher(*words, buckets=buckets)
    found = examples(made.once({"a": [2, 0, 1]}, 2)("a"))
    for n, (source, inputs, targets) in zip([2, 0, 1], found, strict=True):
      assert source[::2] == words[n]
      assert inputs == "[S]" + words[n][::-1]
      assert targets == words[n][::-1] + "[S]"


def test_an_epoch_shows_every_example_once_in_the_order_of_its_seed(batcher):
  made = batcher(*WORDS, buckets=3, seed=4)
  part = [6, 1, 3, 0, 2]
  for epoch in range(2):
    feed = itertools.islice(made.train(part, 2, False)(3 * epoch), 3)
    targets = [t[:-3][::-1] for *_, t in examples(feed)]
    order = batching.epoch_order(5, 4, epoch)
    assert targets == [WORDS[part[i]] for i in order]


def test_padding_is_counted_as_batches_of_their_longest_hold_it(batcher):
  made = batcher("a", "abc", "ab", "abcd", "a")
  part = np.array([0, 1, 2, 3])
  told = made.padding(part, 2)
  rows = steps = real = 0
  for _, batch in zip(range(2), made.train(part, 2, False)(0), strict=False):
    there, letters = batch["source_there_BS"], batch["source_real_BS"]
    rows += int((there.sum(1) > letters.sum(1)).sum())
    steps, real = steps + int(there.sum()), real + int(letters.sum())
  assert told == {
    "padded_source_rows": rows / 4,
    "padded_source_steps": round(1 - real / steps, 4),
  }


@pytest.mark.parametrize("lines", ["ada\t\nbo\tx\n", "\tada\n", "a\tb\t\n"])
def test_an_empty_column_is_not_stripped_away(tmp_path, lines):
  path = tmp_path / "pairs.txt"
  path.write_text(lines, encoding="utf-8")
  with pytest.raises(ValueError, match="line 1: . columns.*never empty"):
    pairs.of(names.read(str(path), tabs=True))
