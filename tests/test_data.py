"""Laws of vocabularies and name lists."""

import json
import os
import pathlib
import random
import subprocess
import sys

import numpy as np
import pytest

from rnnlab.data import batching, names
from rnnlab.data.vocabulary import Vocabulary, check_ids

ROOT = pathlib.Path(__file__).parents[1]
AZ = "abcdefghijklmnopqrstuvwxyz"


def python(code, *args, **env):
  """Runs code in a fresh interpreter; its standard output, as bytes."""
  return subprocess.run(
    [sys.executable, "-c", code, *args],
    env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    check=True,
    capture_output=True,
  ).stdout


def write(folder, data):
  path = folder / "names.txt"
  path.write_bytes(data if isinstance(data, bytes) else data.encode("utf-8"))
  return str(path)


def made(n):
  """n names, all different, in no alphabetical order."""
  return [f"n{i * 7919 % 10007}" for i in range(n)]


# Vocabulary


def test_letters_then_start_stop_then_pad():
  vocab = Vocabulary.of([AZ[::-1]])
  assert vocab.size == 28
  assert [vocab.id(s) for s in ("a", "z", "[S]", "[PAD]")] == [0, 25, 26, 27]


def test_inputs_and_targets_of_a_name_are_one_position_apart():
  vocab = Vocabulary.of([AZ])
  ids = [vocab.id("[S]"), *vocab.encode("ada"), vocab.id("[S]")]
  tokens_BT, mask_BT = batching.padded([ids], 7, vocab.id("[PAD]"), 1, 28)
  assert tokens_BT[0, :-1][mask_BT[0, 1:]].tolist() == [26, 0, 3, 0]
  assert tokens_BT[0, 1:][mask_BT[0, 1:]].tolist() == [0, 3, 0, 26]
  assert tokens_BT[0, 5:].tolist() == [27, 27]


@pytest.mark.parametrize("text, position", [(" ", 1), ("Zo", 1), ("He y", 3)])
def test_an_unseen_character_is_refused(text, position):
  vocab = Vocabulary.of(["Helloworld!y"])
  code = f"U\\+{ord(text[position - 1]):04X}"
  with pytest.raises(ValueError, match=f"prompt.*{code}.*position {position} "):
    vocab.encode(text, "prompt")


def test_the_empty_text_has_no_ids():
  vocab = Vocabulary.of(["Helloworld!"])
  assert vocab.encode("").shape == (0,) and vocab.encode("").dtype == np.int32
  assert vocab.decode([]) == ""


def test_text_is_code_points_without_normalisation():
  text = "nai\u0308ve Zoë 日本 🙂 é"
  vocab = Vocabulary.of([text])
  ids = vocab.encode(text)
  assert len(ids) == len(text)
  assert vocab.decode(ids) == text
  assert vocab.decode(ids[::-1]) == text[::-1]
  assert "\u0308" in vocab.symbols and "ï" not in vocab.symbols


def test_a_special_id_shows_as_its_symbol():
  vocab = Vocabulary.of([AZ])
  assert vocab.decode([26, 0, 3, 0, 26]) == "[S]ada[S]"
  for wrong in (28, -1):
    with pytest.raises(ValueError, match=f"id {wrong} at position 1 .* V = 28"):
      vocab.decode([0, wrong])


def test_a_vocabulary_survives_json_and_differs_by_content():
  vocab = Vocabulary.of(["Zoë"])
  assert Vocabulary(json.loads(json.dumps(vocab.symbols))) == vocab
  swapped = Vocabulary((vocab.symbols[1], vocab.symbols[0], *vocab.symbols[2:]))
  assert swapped.size == vocab.size and swapped != vocab


@pytest.mark.parametrize("symbols", [("a", "b", "a"), ("a", ""), ("a", 3)])
def test_repeated_or_empty_symbols_are_refused(symbols):
  with pytest.raises(ValueError, match="vocabulary: "):
    Vocabulary(symbols)


def test_a_special_symbol_cannot_be_a_character_or_another_special():
  for specials in (["#"], ["a"], ["[S]", "[S]"], [""]):
    with pytest.raises(ValueError, match="vocabulary: "):
      Vocabulary.of([AZ], specials)
  with pytest.raises(ValueError, match="no character"):
    Vocabulary.of([])
  with pytest.raises(ValueError, match=r"no symbol '\[UNK\]'"):
    Vocabulary.of([AZ]).id("[UNK]")


def test_ids_do_not_depend_on_the_hash_seed():
  code = (
    "import json; from rnnlab.data.vocabulary import Vocabulary;"
    "print(json.dumps(Vocabulary.of(['zebra', 'Zoë 日本', '🙂!']).symbols))"
  )
  (symbols,) = {python(code, PYTHONHASHSEED=str(seed)) for seed in range(5)}
  assert json.loads(symbols) == [*" !Zabeorzë日本🙂", "[S]", "[PAD]"]


@pytest.mark.parametrize("wrong", [5, -1, -100])
def test_ids_outside_the_vocabulary_are_refused(wrong):
  place = f"id {wrong} at row 1, position 2 .*V = 5"
  with pytest.raises(ValueError, match=place):
    check_ids(np.array([[0, 1, 4], [0, 1, wrong]]), 5)
  with pytest.raises(ValueError, match=place):
    batching.padded([[4], [0, 1, wrong]], 4, 0, 2, 5)
  with pytest.raises(ValueError, match=f"id {wrong} .*V = 5"):
    batching.padded([[4]], 4, wrong, 2, 5)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.float32, bool])
def test_storage_that_cannot_hold_the_ids_is_refused(dtype):
  ids = np.zeros((2, 3), dtype)
  with pytest.raises(ValueError, match=np.dtype(dtype).name):
    check_ids(ids, 300)
  with pytest.raises(ValueError, match=np.dtype(dtype).name):
    batching.padded(ids, 4, 0, 2, 300)
  check_ids(np.array([[255]], np.uint8), 256)


# Names


def test_blank_lines_outer_blanks_and_repeats(tmp_path):
  got = names.read(write(tmp_path, "ada\n\n  bo \nada\n\t\nEve"))
  assert got.texts == ["ada", "bo", "ada", "Eve"]
  assert got.lines == [1, 3, 4, 6]
  assert (got.blank, got.repeats) == (2, 1)
  assert "2 blank" in str(got) and "1 names repeated" in str(got)
  assert got.where(3).endswith("names.txt, line 6")
  once = names.drop_repeats(got)
  assert once.texts == ["ada", "bo", "Eve"] and once.lines == [1, 3, 6]
  assert once.sha256 == got.sha256


def test_marks_returns_and_inner_blanks(tmp_path):
  got = names.read(write(tmp_path, "\ufeffmary ann\r\nJo\x0bE\u2028L\r\n"))
  assert got.texts == ["mary ann", "Jo\x0bE\u2028L"]
  assert got.lines == [1, 2] and got.blank == 0


def test_a_byte_that_is_not_utf8_is_named(tmp_path):
  path = write(tmp_path, b"ada\nd\x92arcy\n")
  with pytest.raises(ValueError) as error:
    names.read(path)
  assert str(error.value) == f"{path}: not UTF-8, byte 0x92 at offset 5"


def test_what_cannot_be_read_is_named(tmp_path):
  for path in (tmp_path / "none.txt", tmp_path):
    with pytest.raises(ValueError, match=f"{path}: cannot be read"):
      names.read(str(path))
  with pytest.raises(ValueError, match="names.txt: no names, .* is empty"):
    names.read(write(tmp_path, ""))
  with pytest.raises(ValueError, match="names.txt: no names, only 2 blank"):
    names.read(write(tmp_path, " \n\t\n"))


def test_paths_from_here_and_from_home(tmp_path, monkeypatch):
  write(tmp_path, "ada")
  monkeypatch.setenv("HOME", str(tmp_path))
  assert names.read("~/names.txt").texts == ["ada"]
  monkeypatch.chdir(tmp_path)
  assert names.read("names.txt").source == "names.txt"


def test_reading_takes_no_locale_and_no_block_size(tmp_path):
  name = "naïve Zoë 日本 🙂"
  path = write(tmp_path, "\n".join([name] * 9000))
  assert os.path.getsize(path) > 3 * 2**16
  code = (
    "import sys; from rnnlab.data import names;"
    "got = names.read(sys.argv[1]);"
    "print(ascii(set(got.texts)), sum(map(len, got.texts)))"
  )
  out = python(code, path, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
  assert out.decode().split("\n")[0] == f"{ascii({name})} {9000 * len(name)}"


def test_the_embedded_names_are_the_documented_ones():
  got = names.read()
  assert len(got.texts) == 35588 and got.repeats == got.blank == 0
  assert set("".join(got.texts)) == set(AZ)
  assert {len(text) for text in got.texts} == set(range(2, 16))
  assert got.sha256 in (ROOT / "rnnlab/data/NAMES.md").read_text("utf-8")
  parts = names.split(got.texts, "hash", 0)
  assert list(map(len, parts.values())) == [32018, 1801, 1769]
  assert list(parts) == ["train", "validation", "test"]


@pytest.mark.parametrize("rule", names.RULES)
def test_a_split_uses_every_index_once(rule):
  texts = made(1000)
  parts = names.split(texts, rule, 7)
  assert sorted(sum(parts.values(), [])) == list(range(1000))
  assert parts == names.split(texts, rule, 7)
  assert all(parts.values())


def test_hash_split_keeps_a_name_on_one_side_and_moves_no_other():
  texts = made(900)
  parts = names.split(texts + texts[:100], "hash", 7)
  sides = [{(texts + texts)[i] for i in part} for part in parts.values()]
  assert sum(map(len, sides)) == len(set.union(*sides)) == 900
  assert parts["train"] == sorted(parts["train"])
  shorter = names.split(texts, "hash", 8)
  for side, part in shorter.items():
    assert part == [i for i in parts[side] if i < 900]


def test_shuffle_split_depends_on_its_seed_and_cuts_at_tenths():
  texts = made(97)
  parts = names.split(texts, "shuffle", 7)
  assert list(map(len, parts.values())) == [77, 10, 10]
  order = [texts[i] for i in sum(parts.values(), [])]
  random.Random(7).shuffle(texts)
  assert order == texts
  assert parts != names.split(made(97), "shuffle", 8)


def test_contamination_counts_repeats():
  assert names.seen_in(["ada", "bo", "bo"], ["bo", "eve", "bo", "ada"]) == 3
  assert names.seen_in(["ada"], []) == 0


def test_an_unknown_split_rule_is_refused():
  with pytest.raises(ValueError, match="'random' is not one of hash, shuffle"):
    names.split(["ada"], "random", 0)


def test_lines_too_long_are_dropped_whole_and_counted(tmp_path):
  path = tmp_path / "pairs.txt"
  lines = ["abc\tx", "abcdef\ty", "ab\txyzxyzxyz", "a\tb", "abcdefghi\tz"]
  path.write_text("\n".join(lines * 8), encoding="utf-8")
  columns = str.split
  whole = names.load(str(path), "shuffle", 3, columns=columns)
  assert not any("too_long" in fact for fact in whole.facts)
  made = names.load(
    str(path), "shuffle", 3, max_length=6, columns=lambda t: t.split("\t")
  )
  assert sum(made.facts[f"{side}_too_long"] for side in made.indices) == 16
  for side, part in made.indices.items():
    kept = [made.listed.texts[i] for i in part]
    # Who is on which side is what it was; the long ones are gone.
    before = [whole.listed.texts[i] for i in whole.indices[side]]
    assert kept == [t for t in before if max(map(len, t.split("\t"))) <= 6]
    assert made.facts[f"{side}_too_long"] == len(before) - len(kept)
    assert made.facts[side] == len(kept)
    assert [made.listed.where(i) for i in part] == [
      f"{path}, line {number}"
      for number in (whole.listed.lines[i] for i in whole.indices[side])
      if max(map(len, (lines * 8)[number - 1].split("\t"))) <= 6
    ]
  with pytest.raises(ValueError, match="max_length must be at least 1, not 0"):
    names.load(str(path), "hash", 3, max_length=0)
