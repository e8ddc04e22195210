"""What is measured of generated texts, on texts where it is known."""

import time

import jax
import numpy as np
import pytest
import tiny

from rnnlab import trained, written
from rnnlab.analysis import evidence


@pytest.mark.parametrize(
  "text, balance, token, parse",
  [
    ("f(x[1], {2: 3})\n", True, True, True),
    ("", True, True, True),
    ("f(x\n", False, False, False),
    ("f(x])\n", False, None, False),
    ("f)x(\n", False, True, False),
    ("s = '(' + \"[\"  # {\n", True, True, True),
    ("'''(\n\n[ ''' + f(1)\n", True, True, True),
    ("'''(\n\n[\n", True, False, False),
    ("x = 'it\\'s ('\n", True, True, True),
    ("def f():\nreturn 1\n", True, True, False),
    ("  x = 1\n y = 2\n", True, False, False),
    ("return = class\n", True, True, False),
    ("x = $\n", True, False, False),
    ("x = '\\d'\n", True, True, True),  # a warning for Python, none here
    ("x = 1\0\n", True, None, False),
    ("(" * 3000 + ")" * 3000, True, None, False),  # too deep for the parser
  ],
)
def test_what_python_makes_of_it(text, balance, token, parse):
  assert evidence.balances(text) is balance
  assert evidence.parses(text) is parse
  if token is not None:
    assert evidence.tokenises(text) is token


def test_the_longest_beginning_that_parses():
  assert evidence.parsed_lines("x = 1\ny = 2\nz = (\n1\n") == 0.5
  assert evidence.parsed_lines("x = (\n1)\n") == 1
  assert evidence.parsed_lines(")\n") == 0
  assert evidence.parsed_lines("") == 1
  assert evidence.whole_lines("ab\ncd") == "ab\n"
  assert evidence.whole_lines("ab") == ""


def test_repetition():
  assert evidence.repetition("a" * 20, 4) == 1 - 1 / 17
  assert evidence.repetition("abcdefghij", 4) == 0
  assert evidence.repetition("abcabcabc", 3) == 1 - 3 / 7
  assert evidence.repetition("abc") == 0


def test_the_longest_copied_run():
  rng = np.random.default_rng(0)

  def draw(n):
    return "".join(rng.choice(list("abc"), n))

  corpus = [draw(200), draw(3), draw(150)]
  texts = [draw(n) for n in (40, 1, 0, 30, 60)] + [corpus[0][50:90], "zzz"]
  texts += [texts[0], "z" + corpus[2][-20:] + corpus[0][:20]]

  def by_hand(text):
    return max(
      (
        j - i
        for i in range(len(text))
        for j in range(i + 1, len(text) + 1)
        if any(text[i:j] in piece for piece in corpus)
      ),
      default=0,
    )

  found = evidence.longest_copied(texts, iter(corpus))
  assert found == [by_hand(text) for text in texts]
  assert found[5] == 40 and found[6] == 0 and found[8] < 40


def test_a_long_corpus_is_read_in_one_pass():
  rng = np.random.default_rng(0)
  corpus = "".join(rng.choice(list("abcdefgh"), 200_000))
  texts = [corpus[i : i + 100] for i in range(0, 3000, 300)]
  began = time.process_time()
  assert evidence.longest_copied(texts, [corpus]) == [100] * 10
  assert time.process_time() - began < 5


def test_held_out_pieces_are_as_long_and_start_at_a_line():
  lines = [f"line {i:03}\n" for i in range(90)]
  documents = ["".join(lines[:30]), "", "".join(lines[30:])]
  texts = ["x" * n for n in (5, 40, 300, 17)]
  pieces = evidence.like(texts, documents)
  assert [len(piece) for piece in pieces] == [5, 40, 300, 17]
  assert all(piece.startswith("line ") for piece in pieces[:2])
  assert all(any(piece in d for d in documents) for piece in pieces)
  assert len(set(pieces)) == 4
  assert evidence.like(["x" * 50], ["ab\n"]) == ["ab\n"]
  assert evidence.like(["x"], []) == []


def test_names_new_and_repeated():
  found = evidence.of_names(["ada", "bo", "ada"], ["ada", "eve"])
  assert found["not in training"] == [False, True, False]
  assert found["not said before"] == [True, True, False]
  assert found["length"] == [3, 2, 3]


@pytest.mark.parametrize("kind", ["name", "text", "python"])
def test_the_table_of_a_run(kind, tmp_path):
  settings = tiny.config(tmp_path)
  if kind != "name":
    path = tmp_path / f"text{'.py' if kind == 'python' else '.txt'}"
    path.write_text("x = (1 + 2)\ny = [x]\n" * 20, encoding="utf-8")
    settings["task"] = {"name": "text_lm", "path": str(path)}
    settings["task"] |= {"steps": 8, "batch_size": 2}
  task = tiny.task(settings)
  params = task.init(jax.random.key(0))
  run = trained.Trained(task, params, 5, [], lambda: params)
  rows = '{"step": 4, "val/nll": 9.0}\n{"step": 5, "val/nll": 1.5}\n'
  (tmp_path / "metrics.jsonl").write_text(rows, encoding="utf-8")
  key = jax.random.key(0)
  for prefix in ("", "a" if kind == "name" else "x"):
    samples = task.generate(params, key, [prefix] * 3, limit=30)
    table, record = written.measure(run, tmp_path, samples, prefix)
    assert table[0][1:] == ["3 samples", "3 held out"]
    assert ("not running" in table[0][0]) == (kind == "python")
    assert len({len(row) for row in table}) == 1
    assert set(record) == {"nll", *(row[0] for row in table[2:])}
    assert record["nll"]["held out"] == 1.5
    total = -sum(sample["logprob"] for sample in samples)
    count = sum(len(sample["text"]) for sample in samples)
    if kind == "name":
      count += sum(sample["end"] == "stop" for sample in samples)
    elif prefix:
      count -= 3
    assert record["nll"]["samples"] == pytest.approx(total / count)
  if kind == "python":
    # Of one repeated text training has all that is held out.
    held = record["longest run that training has"]["held out"]
    assert held["largest"] == max(len(s["text"]) for s in samples)
    assert record["tokenises"]["held out"]["share"] == 1
  if kind == "name":
    assert record["not in training"]["held out"]["share"] == 1
