"""Sums, counts, and the numbers derived from them."""

import math
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rnnlab import metrics
from rnnlab.metrics import Mean


def test_a_mean_is_over_tokens_not_over_batches():
  long = Mean.of(jnp.full((4,), math.log(2)))
  short = Mean.of(jnp.full((1,), 5 * math.log(2)))
  nll = metrics.to_host(long + short).value()
  assert nll == pytest.approx(1.247665, abs=1e-6)
  assert metrics.bits(nll) == pytest.approx(1.8, abs=1e-6)
  assert metrics.perplexity(nll) == pytest.approx(3.482202, abs=1e-5)


@pytest.mark.parametrize("poison", [1e30, jnp.inf, jnp.nan])
def test_a_masked_position_reaches_neither_value_nor_gradient(poison):
  mask_BT = jnp.array([[True, False], [True, True]])

  x_BT = jnp.array([[1.0, poison], [2.0, 3.0]])
  mean = Mean.of(x_BT, mask_BT)
  assert (mean.total, mean.count, mean.value()) == (6, 3, 2)
  grad_BT = jax.grad(lambda x_BT: Mean.of(x_BT, mask_BT).total)(x_BT)
  np.testing.assert_array_equal(grad_BT, mask_BT)


def test_a_mask_is_bool_and_has_the_shape():
  x_BT = jnp.ones((2, 3))
  with pytest.raises(ValueError, match=r"bool of shape \(2, 3\).*\(2,\)"):
    Mean.of(x_BT, jnp.ones((2,), bool))
  with pytest.raises(ValueError, match="float32"):
    Mean.of(x_BT, jnp.ones((2, 3)))


def test_no_supervised_position_gives_zero_and_no_gradient():
  logits_TV = jnp.array([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
  targets_T = jnp.array([0, 2])

  def loss(logits_TV, mask_T):
    nll_T = metrics.cross_entropy(logits_TV, targets_T)
    mean = Mean.of(nll_T, mask_T)
    return mean.total, mean

  grad = jax.grad(loss, has_aux=True)
  empty_TV, mean = grad(logits_TV, jnp.zeros(2, bool))
  assert (mean.total, mean.count) == (0, 0)
  np.testing.assert_array_equal(empty_TV, 0)
  with pytest.raises(ValueError, match="valid/nll.*count is 0"):
    mean.value("valid/nll")

  first_TV, mean = grad(logits_TV, jnp.array([True, False]))
  assert mean.count == 1
  assert mean.value() == pytest.approx(2.407606, abs=1e-6)
  np.testing.assert_array_equal(first_TV[1], 0)


def test_cross_entropy_is_the_written_equation():
  logits_BTV = jax.random.normal(jax.random.key(0), (2, 3, 5)) * 4
  targets_BT = jnp.array([[0, 1, 2], [3, 4, 0]])
  x = np.asarray(logits_BTV, np.float64)
  log_p = x - np.log(np.exp(x).sum(-1, keepdims=True))
  want = -np.take_along_axis(log_p, np.asarray(targets_BT)[..., None], -1)
  nll_BT = metrics.cross_entropy(logits_BTV, targets_BT)
  np.testing.assert_allclose(nll_BT, want[..., 0], atol=1e-6)
  low_BT = metrics.cross_entropy(logits_BTV.astype(jnp.bfloat16), targets_BT)
  assert low_BT.dtype == jnp.float32
  with pytest.raises(ValueError, match=r"\(2, 3, 5\).*\(2, 3\).*\(2,\)"):
    metrics.cross_entropy(logits_BTV, targets_BT[:, 0])


def test_an_excluded_symbol_gives_no_nan():
  logits_V = jnp.array([0.0, -jnp.inf, 0.0])
  nll, grad_V = jax.value_and_grad(metrics.cross_entropy)(
    logits_V, jnp.int32(0)
  )
  assert nll == pytest.approx(math.log(2), abs=1e-6)
  np.testing.assert_allclose(grad_V, [-0.5, 0, 0.5], atol=1e-6)


@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_bfloat16_losses_are_added_in_float32(batch):
  losses = jnp.ones(1000, jnp.bfloat16)
  parts = [losses[i : i + batch] for i in range(0, 1000, batch)]
  total = Mean(0.0, 0)
  for part in parts:
    mean = Mean.of(part)
    assert mean.total.dtype == jnp.float32
    total = total + metrics.to_host(mean)
  assert (total.total, total.count) == (1000, 1000)
  assert total.value() == 1
  assert Mean.of(jnp.ones(2000, jnp.bfloat16)).total == 2000


def test_counts_are_integers_past_2_to_the_24():
  mask = jnp.ones(1, bool)
  big = Mean(jnp.float32(0), jnp.int32(2**24)) + Mean.of(jnp.ones(1), mask)
  assert big.count.dtype == jnp.int32
  assert metrics.to_host(big).count == 2**24 + 1
  host = Mean(2.0**24, 2**40) + metrics.to_host(Mean.of(jnp.ones(1)))
  assert (host.total, host.count) == (2**24 + 1, 2**40 + 1)


def test_the_updates_of_one_call_are_added_on_the_host():
  means_K = jax.jit(jax.vmap(Mean.of))(jnp.array([[2.0**24], [1.0], [1.0]]))
  host = metrics.to_host({"nll": means_K, "acc": Mean.of(jnp.ones(2))})
  assert host == {"nll": Mean(2.0**24 + 2, 3), "acc": Mean(2.0, 2)}
  assert type(host["nll"].total) is float
  assert type(host["nll"].count) is int
  both = jax.tree.map(operator.add, host, host)
  assert both["acc"] == Mean(4.0, 4)


def test_a_perplexity_that_overflows_is_inf():
  assert metrics.perplexity(1e4) == math.inf
  assert math.isnan(metrics.perplexity(math.nan))


def test_the_notebook_average_is_the_wrong_one():
  means = [math.log(2), 5 * math.log(2)]
  wrong = metrics.notebook_average(means, n_examples=5, batch_size=4)
  assert metrics.perplexity(wrong) == pytest.approx(64)
  # Full batches of equal length are the one case where it is right.
  assert metrics.notebook_average([1.0, 3.0], 8, 4) == 2
  with pytest.raises(ValueError, match="3 examples, batches of 4"):
    metrics.notebook_average([1.0], 3, 4)
