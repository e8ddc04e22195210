"""What generated texts are like, beside what they are worth in nll.

Every measure is one of a text alone, so held-out texts cut to the same lengths
are measured alike and say what is to be expected. None of them runs anything:
a text that parses resembles a program, and that is all.
"""

import ast
import io
import re
import tokenize
import warnings

import numpy as np

# Strings and comments, whose brackets are no brackets; the quotes of a string
# that never ends take the rest.
_QUIET = re.compile(
  r"(\"{3}|'{3})(?:\\.|.)*?(?:\1|\Z)"
  r"|\"(?:\\.|[^\"\\\n])*\"?|'(?:\\.|[^'\\\n])*'?|#[^\n]*",
  re.DOTALL,
)
_PAIRS = {")": "(", "]": "[", "}": "{"}
# Characters of a run whose second time counts as a repetition.
RUN = 16


def whole_lines(text: str) -> str:
  """A text without its last line, where a limit may have cut it."""
  return text[: text.rfind("\n") + 1]


def balances(text: str) -> bool:
  """Whether brackets outside strings and comments close in order."""
  open_ = []
  for c in _QUIET.sub("", text):
    if c in "([{":
      open_.append(c)
    elif c in _PAIRS and (not open_ or open_.pop() != _PAIRS[c]):
      return False
  return not open_


def tokenises(text: str) -> bool:
  """Whether Python's tokenizer reads it to the end without an error token."""
  try:
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
  except (tokenize.TokenError, SyntaxError):
    return False
  return all(token.type != tokenize.ERRORTOKEN for token in tokens)


def parses(text: str) -> bool:
  """Whether `ast` makes a tree of it."""
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of escapes in strings
    try:
      ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
      return False
  return True


def parsed_lines(text: str) -> float:
  """The share of lines in the longest beginning of it that parses."""
  lines = text.splitlines(keepends=True)
  for n in range(len(lines), 0, -1):
    if parses("".join(lines[:n])):
      return n / len(lines)
  return 0.0 if lines else 1.0


def repetition(text: str, run: int = RUN) -> float:
  """The share of runs of that many characters that stood in it before."""
  count = len(text) - run + 1
  if count < 1:
    return 0.0
  return 1 - len({text[i : i + run] for i in range(count)}) / count


def longest_copied(texts, corpus) -> list:
  """Of every text, the length of its longest run that stands in the corpus.

  corpus: an iterable of strings, read once; a run lies inside one of them. It
  costs a step a character of either: all that the texts hold is one suffix
  automaton, and the corpus is read through it. Source: Blumer et al., 1985.
  """
  next_, link, length = [{}], [-1], [0]

  def extend(last, symbol):
    new = len(next_)
    next_.append({})
    link.append(0)
    length.append(length[last] + 1)
    p = last
    while p >= 0 and symbol not in next_[p]:
      next_[p][symbol] = new
      p = link[p]
    if p < 0:
      return new
    q = next_[p][symbol]
    if length[q] == length[p] + 1:
      link[new] = q
      return new
    clone = len(next_)
    next_.append(dict(next_[q]))
    link.append(link[q])
    length.append(length[p] + 1)
    while p >= 0 and next_[p].get(symbol) == q:
      next_[p][symbol] = clone
      p = link[p]
    link[q] = link[new] = clone
    return new

  last, ends = 0, []  # by text, the states of its prefixes
  for i, text in enumerate(texts):
    states = []
    for c in text:
      last = extend(last, c)
      states.append(last)
    ends.append(states)
    last = extend(last, i)  # a border, which no character is
  found = [0] * len(next_)
  for piece in corpus:
    state, matched = 0, 0
    for c in piece:
      while state and c not in next_[state]:
        state = link[state]
        matched = length[state]
      if c in next_[state]:
        state = next_[state][c]
        matched += 1
        if matched > found[state]:
          found[state] = matched
  # What is found of a state is found of its suffixes, and the other way about.
  order = sorted(range(1, len(next_)), key=length.__getitem__)
  for state in reversed(order):
    up = link[state]
    if found[state]:
      found[up] = length[up]
  for state in order:
    found[state] = found[state] or found[link[state]]
  return [max((found[s] for s in states), default=0) for states in ends]


def like(texts, documents) -> list:
  """Pieces of documents as long as the texts, from starts of lines.

  Evenly spread over all that the documents hold; a document that is too short
  gives what it has.
  """
  whole = [document for document in documents if document]
  if not whole:
    return []
  ends = np.cumsum([len(document) for document in whole])
  places = (np.arange(len(texts)) + 0.5) / len(texts) * ends[-1]
  pieces = []
  for text, place in zip(texts, places.astype(int).tolist(), strict=True):
    i = int(np.searchsorted(ends, place, side="right"))
    document = whole[i]
    at = min(place - ends[i] + len(document), max(len(document) - len(text), 0))
    at = document.rfind("\n", 0, int(at)) + 1
    pieces.append(document[at : at + len(text)])
  return pieces


def of_python(texts) -> dict:
  """By measure, a value a text; its last line, which may be cut, left out."""
  lines = [whole_lines(text) for text in texts]
  return {
    "brackets balance": [balances(text) for text in lines],
    "tokenises": [tokenises(text) for text in lines],
    "parses": [parses(text) for text in lines],
    "lines of the part that parses": [parsed_lines(text) for text in lines],
  } | of_text(texts)


def of_text(texts) -> dict:
  """By measure, a value a text."""
  return {f"runs of {RUN} said before": [repetition(text) for text in texts]}


def of_names(texts, train) -> dict:
  """By measure, a value a name; novelty is that of what training lacks."""
  known, seen, first = set(train), set(), []
  for text in texts:
    first.append(text not in seen)
    seen.add(text)
  return {
    "not in training": [text not in known for text in texts],
    "not said before": first,
    "length": [len(text) for text in texts],
  }
