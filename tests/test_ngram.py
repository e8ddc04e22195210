"""The n-gram against its own definition, symbol by symbol."""

import math

import numpy as np
import pytest

from rnnlab.analysis import ngram


def by_hand(train, held_out, V, order):
  followers = {}
  for text in train:
    for i, c in enumerate(text):
      for k in range(order):
        h = tuple(([None] * order + text[:i])[order + i - k :])
        followers.setdefault(h, []).append(c)

  def p(h, c):
    shorter = 1 / V if not h else None
    if h:
      shorter = p(h[1:], c)
    after = followers.get(h, [])
    if not after:
      return shorter
    types = len(set(after))
    return (after.count(c) + types * shorter) / (len(after) + types)

  total = 0.0
  for text in held_out:
    for i, c in enumerate(text):
      h = tuple(([None] * order + text[:i])[i + 1 :])
      total -= math.log(p(h, c))
  return total, p


@pytest.mark.parametrize("order", [1, 2, 4])
def test_every_symbol_by_its_definition(order):
  rng = np.random.default_rng(0)

  def draw(*lengths):
    return [rng.integers(4, size=n).tolist() for n in lengths]

  train, held_out, V = draw(30, 1, 12), [*draw(9, 2), [4, 0, 4]], 5
  total, p = by_hand(train, held_out, V, order)
  found, count = ngram.nll(train, held_out, V, order)
  assert count == 14 and found == pytest.approx(total, rel=1e-12)
  for h in ((), (0,), (1, 2)):
    assert sum(p(h, c) for c in range(V)) == pytest.approx(1)


def test_contexts_that_have_no_number_are_refused():
  with pytest.raises(ValueError, match="1001.n below 2.63, n is 7"):
    ngram.nll([[0]], [[0]], 1000, 7)
  with pytest.raises(ValueError, match="n is 0"):
    ngram.nll([[0]], [[0]], 10, 0)
