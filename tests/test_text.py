"""Long texts: how they are read, split, kept as tokens, and cut in rows."""

import hashlib
import os
import string

import numpy as np
import pytest

from rnnlab.data import batching, streams, text

LETTERS = np.arange(26)
NONE = np.array([0])


@pytest.fixture
def write(tmp_path, monkeypatch):
  """(content) -> the path of a file; tokens go to a cache of the test."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

  def write(content, name="text.txt"):
    path = tmp_path / name
    if isinstance(content, str):
      content = content.encode("utf-8")
    path.write_bytes(content)
    return str(path)

  return write


@pytest.fixture
def library(tmp_path, monkeypatch):
  """(contents by name) -> a standard library of these files."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

  def library(**contents):
    folder = tmp_path / "library"
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
      (folder / f"{name}.py").write_text(content, encoding="utf-8")
    paths = {"stdlib": str(folder)}
    monkeypatch.setattr(
      text.python_source.sysconfig, "get_paths", lambda: paths
    )

  return library


def whole(found, split):
  return "".join(found.documents(split))


def test_the_first_part_trains_and_the_last_is_held_out(write):
  content = "".join(map(chr, range(500, 1500)))
  path = write(content)
  found = text.load(path)
  assert whole(found, "train") == content[:900]
  assert found.facts["train"] == 900 and found.facts["validation"] == 100
  assert found.facts["characters"] == 1000
  digest = hashlib.sha256(content.encode()).hexdigest()
  assert found.facts["sha256"] == digest
  # None of its characters was ever seen: all are the unknown one.
  assert found.facts["unknown"] == 100
  assert whole(found, "validation") == text.UNKNOWN * 100
  assert found.vocab.symbols == (*content[:900], text.UNKNOWN)
  assert found.tokens["train"].dtype == np.uint16
  assert not text.load(path, held_out=0.0).tokens["validation"].size
  again = text.load(path, 0.25)
  assert whole(again, "train") == content[:750]


@pytest.mark.parametrize("block", [1, 3, 7, 1 << 20])
def test_characters_across_blocks(write, monkeypatch, block):
  monkeypatch.setattr(text, "BLOCK", block)
  content = "\ufeffnaïve Zoë\r\n日本 🙂\n" * 5
  found = text.load(write(content), held_out=0.0)
  assert whole(found, "train") == content[1:]
  assert found.facts["train"] == len(content) - 1
  with pytest.raises(ValueError, match="byte 0x92 at offset 7"):
    text.load(write("日🙂".encode() + b"\x92a"))
  with pytest.raises(ValueError, match="text.txt: not UTF-8, byte 0xe6 at of"):
    text.load(write("aaaa日".encode()[:6]))  # cut inside a character


def test_too_little_is_refused_with_what_was_found(write):
  for content, found in (("", "0 characters"), ("a", "1 characters")):
    with pytest.raises(ValueError, match=found):
      text.load(write(content))
  with pytest.raises(ValueError, match="5 characters.*leaves 0 for validation"):
    text.load(write("abcde"))
  with pytest.raises(ValueError, match="leaves 1 for validation.*at least 2"):
    text.load(write("a" * 19))
  assert text.load(write("ab"), 0.0).facts["train"] == 2
  with pytest.raises(ValueError, match=r"held_out must be in \[0, 1\)"):
    text.load(write("abcde"), 1.0)
  with pytest.raises(ValueError, match="gone: cannot be read, No such file"):
    text.load("gone")


def test_a_library_is_split_by_file(library):
  names = [f"m{i}" for i in range(30)]
  held = [
    name
    for name in names
    if int(hashlib.sha256(f"{name}.py".encode()).hexdigest(), 16) % 10 == 0
  ]
  assert 0 < len(held) < 10
  contents = {name: f"{name} = {i}\n" for i, name in enumerate(names)}
  library(**contents, empty="")
  found = text.load()
  listed = list(found.documents("validation"))
  assert listed == [contents[name] for name in sorted(held)]
  train = list(found.documents("train"))
  assert train == [contents[n] for n in sorted(contents) if n not in held]
  assert found.facts["train_files"] == len(train) + 1  # the empty one too
  assert found.facts["python"].count(".") == 2
  # A renamed file is another text, and no other one changes sides.
  library(zzz="z = 1\n")
  more = text.load()
  assert more.facts["sha256"] != found.facts["sha256"]
  assert list(more.documents("validation")) == listed
  assert list(found.documents("train")[-2:]) == train[-2:]
  with pytest.raises(IndexError):
    found.documents("train")[len(train)]


def test_the_interpreters_own_library_is_found():
  found = text.load()
  assert min(found.facts[f"{split}_files"] for split in text.SPLITS) > 5
  assert found.facts["train"] > 10**6
  assert found.vocab.size < 2**8 and found.tokens["train"].dtype == np.uint8
  assert any("import" in document for document in found.documents("validation"))


def test_tokens_are_mapped_and_kept(write, monkeypatch):
  path = write("ab" * 50)
  found = text.load(path)
  assert isinstance(found.tokens["train"], np.memmap)
  assert not found.tokens["train"].flags.writeable
  folder = text.cache.folder("texts")
  files = sorted(folder.iterdir())
  assert [file.suffix for file in files] == [".tokens"] * 2
  before = [file.stat().st_mtime_ns for file in files]
  text.load(path)
  assert [file.stat().st_mtime_ns for file in files] == before
  # Damaged, cut short or empty: written again, never read.
  for damage in (lambda b: b[:-1], lambda b: b"\1" + b[1:], lambda b: b""):
    for file in files:
      file.write_bytes(damage(file.read_bytes()))
    assert whole(text.load(path), "train") == "ab" * 45
  # Another text, another split and another vocabulary have their own files.
  text.load(path, 0.5)
  text.load(write("ac" * 50))
  assert len(list(folder.iterdir())) == 6

  def fail(*args):
    raise OSError("disk full")

  monkeypatch.setattr(os, "replace", fail)
  with pytest.raises(OSError, match="disk full"):
    text.load(write("xy" * 50))
  assert len(list(folder.iterdir())) == 6  # nothing half-written stays


def test_a_stored_vocabulary_has_to_fit(write):
  path = write("abab" * 5)
  symbols = ["a", "b", text.UNKNOWN]
  assert text.load(path, 0.1, symbols).vocab.symbols == tuple(symbols)
  with pytest.raises(ValueError, match="other characters than the run's"):
    text.load(path, 0.1, ["a", text.UNKNOWN])


# Streams


def read(rows_BT):
  return ["".join(string.ascii_lowercase[i] for i in row) for row in rows_BT]


def test_row_b_goes_on_in_row_b_of_the_next_batch():
  batches = [streams.train_batch(LETTERS, NONE, 2, 4, i) for i in range(4)]
  inputs = [read(batch["inputs_BT"]) for batch in batches]
  targets = [read(batch["targets_BT"]) for batch in batches]
  epoch = [["abcd", "mnop"], ["efgh", "qrst"], ["ijkl", "uvwx"]]
  assert inputs == [*epoch, epoch[0]]
  assert targets[:3] == [["bcde", "nopq"], ["fghi", "rstu"], ["jklm", "vwxy"]]
  assert streams.windows(26, 2, 4) == 3
  assert streams.dropped(26, 2, 4) == 2  # y and z, as inputs
  for i, batch in enumerate(batches):
    assert batch["mask_BT"].all()
    # Fresh where the epoch starts, and nowhere else.
    assert batch["reset_BT"].any(1).tolist() == [i % 3 == 0] * 2
    assert not batch["reset_BT"][:, 1:].any()
    assert set(batch) == {"inputs_BT", "targets_BT", "mask_BT", "reset_BT"}


@pytest.mark.parametrize(
  "content, inputs, targets",
  [
    ("hello", ["hell"], ["ello"]),
    ("abcdefghi", ["abcd", "efgh"], ["bcde", "fghi"]),
  ],
)
def test_the_last_target_is_the_true_next_character(content, inputs, targets):
  tokens_N = np.array([ord(c) - ord("a") for c in content])
  found = [
    streams.train_batch(tokens_N, NONE, 1, 4, i)
    for i in range(streams.windows(len(tokens_N), 1, 4))
  ]
  assert [read(batch["inputs_BT"])[0] for batch in found] == inputs
  assert [read(batch["targets_BT"])[0] for batch in found] == targets


def test_too_short_for_a_batch():
  assert streams.windows(9, 2, 4) == 1
  words = "has 8 characters.*batch_size=2 rows of 4 steps needs 9"
  with pytest.raises(ValueError, match=words):
    streams.windows(8, 2, 4)


def test_documents_are_reset_and_their_first_character_is_not_predicted():
  starts = np.array([0, 3, 6, 7, 12])  # abc def g hijkl mno...
  batches = [streams.train_batch(LETTERS, starts, 1, 5, i) for i in range(3)]
  reset_T = np.concatenate([batch["reset_BT"][0] for batch in batches])
  mask_T = np.concatenate([batch["mask_BT"][0] for batch in batches])
  assert np.flatnonzero(reset_T).tolist() == [0, 3, 6, 7, 12]
  assert np.flatnonzero(~mask_T).tolist() == [2, 5, 6, 11]
  reset = streams.train_batch(LETTERS, NONE, 1, 5, 1, carried=False)
  assert reset["reset_BT"].tolist() == [[True] + [False] * 4]


def test_shuffled_windows_are_whole_and_all_of_them():
  """Their order changes from epoch to epoch; inside them time does not."""
  n, order = 2 * 3 * 4 + 1, []
  for epoch in range(2):
    seen = []
    for i in range(3):
      batch = streams.train_batch(
        np.arange(n), NONE, 2, 4, 3 * epoch + i, carried=False, seed=5
      )
      assert (np.diff(batch["inputs_BT"]) == 1).all()
      np.testing.assert_array_equal(batch["targets_BT"], batch["inputs_BT"] + 1)
      seen += batch["inputs_BT"][:, 0].tolist()
    assert sorted(seen) == [0, 4, 8, 12, 16, 20]
    order.append(seen)
  assert order[0] != order[1]
  assert order[0] == (4 * batching.epoch_order(6, 5, 0)).tolist()


@pytest.mark.parametrize("steps", [1, 3, 8, 100])
@pytest.mark.parametrize("batch", [None, 1, 2, 3, 8])
def test_an_evaluation_predicts_every_character_once(batch, steps):
  rng = np.random.default_rng(0)
  starts = np.array([0, 7, 8, 20, 23])
  tokens_N = rng.integers(100, size=40)
  first = np.append(tokens_N[starts], -1)
  rows = {}
  for found in streams.eval_batches(tokens_N, starts, batch, steps, extra=2):
    width = found["inputs_BT"].shape[1] - 2
    assert width == steps or width < steps and not rows
    assert not found["real_BT"][:, width:].any()
    assert not (found["mask_BT"] & ~found["real_BT"]).any()
    for b, own in enumerate(zip(*found.values(), strict=True)):
      rows.setdefault(b, []).append(np.stack(own)[:, :width])
  if batch:
    assert len(rows) == batch
  else:
    assert len(rows) == 3  # the longest has 17 of 40
  pairs, seen = [], 0
  for own in rows.values():
    inputs, targets, mask, reset, real = np.concatenate(own, 1)
    past = []
    for t in np.flatnonzero(real):
      past = [inputs[t]] if reset[t] else [*past, inputs[t]]
      if mask[t]:
        pairs.append((*past, targets[t]))
      seen += 1
  # Each target with all of its document before it, and nothing else.
  ends = [*starts[1:], 40]
  wanted = [
    tuple(tokens_N[a : t + 1])
    for a, b in zip(starts, ends, strict=True)
    for t in range(a + 1, b)
  ]
  assert sorted(pairs) == sorted(wanted) and len(first) == 6
  assert seen <= 40


def test_rows_of_an_evaluation_are_about_as_long():
  rng = np.random.default_rng(1)
  starts = np.append(0, np.sort(rng.choice(np.arange(1, 999), 40, False)))
  rows = {}
  for found in streams.eval_batches(np.arange(1000), starts, 4, 16):
    for b, real_T in enumerate(found["real_BT"]):
      rows[b] = rows.get(b, 0) + real_T.sum()
  assert sum(rows.values()) >= 1000 - 41
  assert max(rows.values()) < 1000 / 4 + 60
