"""The interpolated n-gram: what counting alone predicts, as a line to beat.

  p_k(c | h) = (n(h c) + t(h) p_(k-1)(c | h')) / (n(h) + t(h))

h: the k - 1 symbols before, h' without the first of them; n counts in training,
t(h) is how many different symbols followed h. p_0 is uniform. Source: Witten
and Bell, 1991.
"""

import numpy as np


def nll(train, held_out, vocab_size: int, order: int) -> tuple[float, int]:
  """The summed nll (nats) of texts, and how many symbols that are.

  train, held_out: lists of arrays of ids, each a text of its own; contexts at
  its start are shorter. A symbol that is not in training has its share of the
  uniform p_0. Raises ValueError where contexts cannot be told apart in 64 bits.
  """
  base = vocab_size + 1  # one more for what stands before a text
  if order < 1 or base**order >= 2**63:
    raise ValueError(
      f"an n-gram needs 1 <= n and {base}^n below 2^63, n is {order}"
    )
  p_N = np.full(sum(map(len, held_out)), 1 / vocab_size)
  for k in range(1, order + 1):
    (h_M, hc_M), (h_N, hc_N) = (
      _keys(texts, k, base) for texts in (train, held_out)
    )
    pairs, counts = np.unique(hc_M, return_counts=True)
    contexts, totals = np.unique(h_M, return_counts=True)
    types = np.unique(pairs // base, return_counts=True)[1]
    n_hc_N = _find(pairs, counts, hc_N)
    n_h_N, t_h_N = (_find(contexts, x, h_N) for x in (totals, types))
    seen_N = n_h_N > 0
    p_N = np.where(
      seen_N, (n_hc_N + t_h_N * p_N) / np.maximum(n_h_N + t_h_N, 1), p_N
    )
  return float(-np.log(p_N).sum()), len(p_N)


def _keys(texts, k, base):
  """Of every symbol: its k - 1 predecessors as a number, and with itself."""
  h, hc = [], []
  for ids in texts:
    ids = np.asarray(ids, np.int64)
    padded = np.concatenate([np.full(k - 1, base - 1), ids])
    key = np.zeros(len(ids), np.int64)
    for j in range(k - 1):
      key = key * base + padded[j : j + len(ids)]
    h.append(key)
    hc.append(key * base + ids)
  return np.concatenate(h), np.concatenate(hc)


def _find(keys, values, wanted):
  """values[i] where keys[i] is wanted, 0 where it is not there; keys sorted."""
  at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
  return np.where(keys[at] == wanted, values[at], 0)
