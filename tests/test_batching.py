"""Laws of batches: fixed shapes, whole sequences, a function of (seed, i)."""

import timeit

import numpy as np
import pytest

from rnnlab.data import batching, names
from rnnlab.data.vocabulary import Vocabulary


@pytest.mark.parametrize("seed", ["7", True, 2**32, -1, 2**63, 1.0, None])
def test_seeds_outside_the_range_are_refused_by_name(seed):
  with pytest.raises(ValueError, match=r"data seed is .*2\*\*32"):
    batching.check_seed("data seed", seed)
  batching.epoch_order(4, 1, 0)  # equal to True, and must not answer for it
  with pytest.raises(ValueError, match="data seed is "):
    batching.batch_indices(4, 2, seed, 0)
  with pytest.raises(ValueError, match="task.split_seed is "):
    names.split(["ada"], "shuffle", seed)


@pytest.mark.parametrize("seed", [0, 2**32 - 1, np.int64(7), np.uint32(7)])
def test_seeds_of_the_range_are_plain_ints(seed):
  assert type(batching.check_seed("seed", seed)) is int
  assert batching.check_seed("seed", seed) == seed


def test_five_names_in_a_batch_of_eight_are_one_masked_batch():
  sequences = [[1], [2, 3], [], [4, 4, 4], [0, 1]]
  tokens_NT, mask_NT = batching.padded(sequences, 3, 5, 5, 6)
  assert batching.steps_per_epoch(5, 8) == 1
  indices = batching.batch_indices(5, 8, 0, 0)
  tokens_BT, mask_BT = batching.rows(tokens_NT, mask_NT, indices, 5, 8)
  assert tokens_BT.shape == mask_BT.shape == (8, 3)
  assert tokens_BT.dtype == np.int32 and mask_BT.dtype == bool
  got = [tokens_BT[b][mask_BT[b]].tolist() for b in range(5)]
  assert got == [sequences[i] for i in indices]
  assert (tokens_BT[~mask_BT] == 5).all() and not mask_BT[5:].any()
  direct = batching.padded([sequences[i] for i in indices], 3, 5, 8, 6)
  np.testing.assert_array_equal(tokens_BT, direct[0])
  np.testing.assert_array_equal(mask_BT, direct[1])


def test_too_long_too_many_and_none_are_refused():
  with pytest.raises(ValueError, match=r"sequence 1 .*length 3, .* 2$"):
    batching.padded([[1], [1, 2, 3]], 2, 0, 2, 5)
  with pytest.raises(ValueError, match="2 sequences for 1 rows"):
    batching.padded([[1], [1]], 2, 0, 1, 5)
  table = batching.padded([[1], [1]], 2, 0, 2, 5)
  with pytest.raises(ValueError, match="2 sequences for 1 rows"):
    batching.rows(*table, np.arange(2), 0, 1)
  for n, batch_size in ((0, 8), (5, 0), (5, -1)):
    with pytest.raises(ValueError, match=f"{n} examples.*size {batch_size}"):
      batching.steps_per_epoch(n, batch_size)
  with pytest.raises(ValueError, match="batch -1"):
    batching.batch_indices(5, 2, 0, -1)


def test_no_sequences_give_only_padding():
  tokens_BT, mask_BT = batching.padded([], 3, 4, 2, 5)
  assert (tokens_BT == 4).all() and not mask_BT.any()


@pytest.mark.parametrize("batch_size", [1, 3, 10, 16])
def test_the_order_of_an_epoch_does_not_depend_on_the_batch_size(batch_size):
  steps = batching.steps_per_epoch(10, batch_size)
  for epoch in range(3):
    batches = [
      batching.batch_indices(10, batch_size, 7, epoch * steps + k)
      for k in range(steps)
    ]
    order_N = np.concatenate(batches)
    assert {len(b) for b in batches[:-1]} <= {batch_size}
    assert sorted(order_N) == list(range(10))
    np.testing.assert_array_equal(order_N, batching.epoch_order(10, 7, epoch))


def test_batch_i_is_a_function_of_the_seed_and_i_alone():
  straight = [batching.batch_indices(10, 3, 7, i).tolist() for i in range(12)]
  backward = [
    batching.batch_indices(10, 3, 7, i).tolist() for i in reversed(range(12))
  ]
  assert straight == backward[::-1]
  epochs = {str(straight[e * 4 : e * 4 + 4]) for e in range(3)}
  assert len(epochs) == 3
  assert straight[0:4] != [
    batching.batch_indices(10, 3, 8, i).tolist() for i in range(4)
  ]


def test_the_batches_of_an_epoch_share_one_shuffle():
  order_N = batching.epoch_order(10, 7, 0)
  assert np.shares_memory(order_N, batching.batch_indices(10, 3, 7, 2))
  with pytest.raises(ValueError, match="read-only"):
    order_N[0] = 1


def test_shuffling_moves_no_time_step():
  rng = np.random.default_rng(0)
  sequences = [rng.integers(0, 9, size=size) for size in range(1, 20)]
  table = batching.padded(sequences, 19, 9, 19, 10)
  seen = []
  for i in range(batching.steps_per_epoch(19, 4)):
    indices = batching.batch_indices(19, 4, 7, i)
    tokens_BT, mask_BT = batching.rows(*table, indices, 9, 4)
    seen += [tokens_BT[b][mask_BT[b]].tobytes() for b in range(len(indices))]
  whole = [np.asarray(s, np.int32).tobytes() for s in sequences]
  assert seen != whole and sorted(seen) == sorted(whole)


def test_a_batch_costs_a_few_rows():
  texts = names.read().texts
  vocab = Vocabulary.of(texts)
  sequences = [vocab.encode(text) for text in texts]
  table = batching.padded(sequences, 16, 27, len(texts), vocab.size)

  def batch():
    indices = batching.batch_indices(len(texts), 64, 0, 5)
    return batching.rows(*table, indices, 27, 64)

  batch()
  assert min(timeit.repeat(batch, number=100, repeat=5)) / 100 < 0.3e-3
