"""The distribution that is sampled from, and the draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rnnlab import sampling

TIED_BV = jnp.array([[1.0, 3.0, 3.0, 3.0, 2.0]])


def uniforms(key, rows_B, t):
  return sampling.uniforms(sampling.row_keys(key, rows_B), t)


def test_settings_out_of_range_are_refused_by_name():
  for temperature in (-1, -1e-9, float("nan"), float("inf")):
    with pytest.raises(ValueError, match=f"temperature.*{temperature}"):
      sampling.check(temperature=temperature)
  for top_k in (-1, 2.5, True):
    with pytest.raises(ValueError, match=f"top_k.*{top_k}"):
      sampling.check(top_k=top_k)
  for top_p in (0, -0.1, 1.1, float("nan")):
    with pytest.raises(ValueError, match=f"top_p.*{top_p}"):
      sampling.check(top_p=top_p)
  with pytest.raises(ValueError, match="top_p"):
    sampling.probabilities(TIED_BV, top_p=0.0)
  sampling.check(temperature=0, top_k=0, top_p=1)


@pytest.mark.parametrize(
  ("temperature", "want"),
  [
    (2, [0.506480, 0.307196, 0.186324]),
    (1, [0.665241, 0.244728, 0.090031]),
    (0.5, [0.866813, 0.117310, 0.015876]),
    (0.1, [0.999955, 0.000045, 0]),
    (1e-30, [1, 0, 0]),
    (1e-45, [1, 0, 0]),
    (0, [1, 0, 0]),
  ],
)
def test_temperature(temperature, want):
  logits_BV = jnp.array([[2.0, 1.0, 0.0]])
  probs_BV = sampling.probabilities(logits_BV, temperature=temperature)
  assert probs_BV.dtype == jnp.float32
  np.testing.assert_allclose(probs_BV[0], want, atol=1e-6)


def test_temperature_zero_is_the_lowest_of_the_best():
  probs_BV = sampling.probabilities(TIED_BV, temperature=0, top_p=0.5)
  np.testing.assert_array_equal(probs_BV, [[0, 1, 0, 0, 0]])
  for u in (0.0, 0.5, 1 - 2**-24):
    assert sampling.pick(probs_BV, jnp.array([u])) == 1


@pytest.mark.parametrize(
  ("top_k", "ids"),
  [
    (1, [1]),
    (2, [1, 2]),
    (3, [1, 2, 3]),
    (4, [1, 2, 3, 4]),
    (5, [0, 1, 2, 3, 4]),
    (50, [0, 1, 2, 3, 4]),
    (0, [0, 1, 2, 3, 4]),
  ],
)
def test_top_k_keeps_exactly_k(top_k, ids):
  probs_V = sampling.probabilities(TIED_BV, top_k=top_k)[0]
  want_V = np.zeros(5)
  want_V[ids] = np.exp(TIED_BV[0])[jnp.array(ids)]
  np.testing.assert_allclose(probs_V, want_V / want_V.sum(), atol=1e-6)
  np.testing.assert_array_equal(np.flatnonzero(probs_V), ids)


@pytest.mark.parametrize(
  ("top_p", "ids"),
  [
    (1e-9, [3]),
    (0.4, [3]),
    (0.41, [1, 3]),
    (0.7, [1, 3]),
    (0.71, [0, 1, 3]),
    (0.9, [0, 1, 3]),
    (0.91, [0, 1, 2, 3]),
    (1, [0, 1, 2, 3]),
  ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p, ids):
  probs_V = np.array([0.2, 0.3, 0.1, 0.4])
  logits_BV = jnp.log(jnp.array([probs_V]))
  kept_V = sampling.probabilities(logits_BV, top_p=top_p)[0]
  want_V = np.where(np.isin(np.arange(4), ids), probs_V, 0)
  np.testing.assert_allclose(kept_V, want_V / want_V.sum(), atol=1e-6)


def test_top_p_takes_the_lower_of_ties_and_acts_on_what_top_k_left():
  uniform_BV = jnp.zeros((1, 4))
  half_BV = sampling.probabilities(uniform_BV, top_p=0.5)
  np.testing.assert_allclose(half_BV, [[0.5, 0.5, 0, 0]])
  logits_BV = jnp.log(jnp.array([[0.4, 0.4, 0.1, 0.1]]))
  both_BV = sampling.probabilities(logits_BV, top_k=2, top_p=0.5)
  np.testing.assert_allclose(both_BV, [[1, 0, 0, 0]])


def test_an_excluded_symbol_has_probability_zero():
  logits_BV = jnp.array([[0.0, -jnp.inf, 0.0]])
  for settings in ({}, {"top_k": 2}, {"top_p": 0.99}, {"temperature": 3}):
    probs_BV = sampling.probabilities(logits_BV, **settings)
    np.testing.assert_allclose(probs_BV, [[0.5, 0, 0.5]], atol=1e-6)


def test_pick_is_the_inverse_cdf():
  u_B = jnp.array([0.0, 0.24, 0.25, 0.74, 0.75, 1 - 2**-24])
  probs_BV = jnp.tile(jnp.array([0.0, 0.25, 0.0, 0.5, 0.25, 0.0]), (6, 1))
  token_B = sampling.pick(probs_BV, u_B)
  assert token_B.dtype == jnp.int32
  np.testing.assert_array_equal(token_B, [1, 1, 3, 3, 4, 4])
  np.testing.assert_array_equal(sampling.pick(4 * probs_BV, u_B), token_B)


def test_pick_never_returns_an_impossible_id():
  # So long that the parallel cumulated sum rises by rounding at some zeros.
  probs_V = jax.random.uniform(jax.random.key(3), (2048,))
  probs_V = jnp.where(probs_V < 0.5, 0, probs_V).at[-1].set(0)
  probs_BV = jnp.tile(probs_V / jnp.sum(probs_V), (2048, 1))
  border_B = jnp.cumsum(probs_BV, axis=-1)[0]
  for u_B in (
    border_B,
    jnp.nextafter(border_B, jnp.zeros(2048)),
    jnp.nextafter(border_B, jnp.ones(2048)),
    jnp.zeros(2048),
    jnp.full(2048, 1 - 2**-24),
    jnp.ones(2048),
  ):
    token_B = sampling.pick(probs_BV, u_B)
    assert jnp.all(probs_BV[0, token_B] > 0)


def sample(key, rows_B, steps):
  """Uniform draws from 50 symbols: token_BT."""
  probs_BV = sampling.probabilities(jnp.zeros((len(rows_B), 50)))

  def step(carry, t):
    return carry, sampling.pick(probs_BV, uniforms(key, rows_B, t))

  return jax.lax.scan(step, (), steps)[1].T


def test_draws_are_independent_over_rows_and_steps():
  rows_B = jnp.arange(4)
  token_BT = np.asarray(sample(jax.random.key(0), rows_B, jnp.arange(200)))
  again_BT = sample(jax.random.key(0), rows_B, jnp.arange(200))
  np.testing.assert_array_equal(token_BT, again_BT)
  assert len({tuple(row) for row in token_BT.tolist()}) == 4
  repeats_B = (token_BT[:, 1:] == token_BT[:, :-1]).sum(axis=1)
  assert np.all(repeats_B <= 10), repeats_B
  assert repeats_B.sum() > 0
  # The 1e-4 quantiles of chi-square with 49 degrees of freedom.
  count_V = np.bincount(token_BT.ravel(), minlength=50)
  assert 18.97 < ((count_V - 16) ** 2 / 16).sum() < 94.60, count_V


def test_a_skewed_distribution_is_drawn_as_it_is():
  logits_BV = jnp.tile(jnp.array([1.0, 0.0, -1.0, 0.5, -2.0]), (2000, 1))
  probs_BV = sampling.probabilities(logits_BV, temperature=0.8, top_k=4)
  u_B = uniforms(jax.random.key(1), jnp.arange(2000), 0)
  count_V = np.bincount(sampling.pick(probs_BV, u_B), minlength=5)
  want_V = 2000 * np.asarray(probs_BV[0, :4])
  assert count_V[4] == 0
  # Three degrees of freedom, at 1e-4.
  assert ((count_V[:4] - want_V) ** 2 / want_V).sum() < 21.11, count_V


def test_a_row_is_the_same_alone_and_continued():
  key = jax.random.key(5)
  token_BT = sample(key, jnp.arange(4), jnp.arange(20))
  alone_BT = sample(key, jnp.array([2]), jnp.arange(20))
  np.testing.assert_array_equal(alone_BT[0], token_BT[2])
  first_BT = sample(key, jnp.arange(4), jnp.arange(10))
  rest_BT = sample(key, jnp.arange(4), jnp.arange(10, 20))
  np.testing.assert_array_equal(jnp.hstack([first_BT, rest_BT]), token_BT)


def test_rows_without_a_distribution_are_marked():
  nan, inf = jnp.nan, jnp.inf
  logits_BV = jnp.array(
    [
      [nan, 0, 1],
      [0, 1, nan],
      [-inf, -inf, -inf],
      [inf, 0, 1],
      [-inf, 0, 1],
      [0, 1, 2],
    ]
  )
  np.testing.assert_array_equal(
    sampling.failed(logits_BV), [True, True, True, True, False, False]
  )
  # They do not disturb the others, and their token is still an id.
  for settings in ({}, {"temperature": 0}, {"top_k": 2, "top_p": 0.9}):
    probs_BV = sampling.probabilities(logits_BV, **settings)
    assert jnp.all(jnp.isfinite(probs_BV[4:]))
    token_B = sampling.pick(probs_BV, jnp.full(6, 0.5))
    assert jnp.all((token_B >= 0) & (token_B < 3))


def test_all_of_it_compiles():
  @jax.jit
  def step(key, t):
    probs_BV = sampling.probabilities(
      TIED_BV, temperature=0.7, top_k=3, top_p=0.9
    )
    u_B = uniforms(key, jnp.arange(1), t)
    return sampling.pick(probs_BV, u_B), sampling.failed(TIED_BV)

  token_B, failed_B = step(jax.random.key(0), 3)
  assert token_B[0] in (1, 2, 3)
  assert not failed_B[0]
