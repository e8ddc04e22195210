"""Attention: its numbers, its axes, and what a masked position may do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from wirings import score as reference
from wirings import softmax

from rnnlab import attention

# Three source positions, and two queries at their worked values.
KEYS = [[1, 0], [0, 1], [1, 1]]
WORKED = {
  (2, 0): ([0.46831053, 0.06337894, 0.46831053], [0.93662106, 0.53168947]),
  (0, 2): ([0.06337894, 0.46831053, 0.46831053], [0.53168947, 0.93662106]),
}
SCORES = {
  "dot": {},
  "scaled_dot": {},
  "bilinear": {},
  "additive": {"width": 5},
}
all_scores = pytest.mark.parametrize("name", SCORES)


def normal(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def drawn(name, d_query=4, d_key=4):
  """A score and parameters of it with nothing left at zero."""
  score = attention.make(name, **SCORES[name])
  leaves, tree = jax.tree.flatten(score.init(jax.random.key(0), d_query, d_key))
  rng = np.random.default_rng(1)
  return score, tree.unflatten(
    p + jnp.asarray(0.3 * rng.normal(size=p.shape), p.dtype) for p in leaves
  )


def attend(score, params, q_BUD, k_BSD, v_BSD=None, mask_BS=None):
  source = attention.source(score, params, k_BSD, v_BSD, mask_BS)
  return attention.attend(score, params, q_BUD, source)


@pytest.mark.parametrize("query", WORKED)
def test_scores_weights_and_context_are_three_things(query):
  k_BSD = jnp.array([KEYS], jnp.float32)
  q_BUD = jnp.array([[query]], jnp.float32)
  out = attend(attention.dot(), {}, q_BUD, k_BSD)
  weights, context = WORKED[query]
  np.testing.assert_array_equal(
    out.scores_BUS[0, 0], np.dot(KEYS, query).astype(np.float32)
  )
  np.testing.assert_allclose(out.weights_BUS[0, 0], weights, atol=1e-6)
  np.testing.assert_allclose(out.context_BUD[0, 0], context, atol=1e-6)


@pytest.mark.parametrize("width", [3, 4, 8, 16])
def test_padding_of_the_source_is_not_attended(width):
  k_SD = np.full((width, 2), 1e6, np.float32)
  k_SD[:3] = KEYS
  mask_BS = jnp.arange(width)[None] < 2
  q_BUD = jnp.array([[[2.0, 0.0]]])
  out = attend(attention.dot(), {}, q_BUD, k_SD[None], mask_BS=mask_BS)
  weights_S = np.asarray(out.weights_BUS[0, 0])
  np.testing.assert_allclose(weights_S[:2], [0.880797, 0.119203], atol=1e-6)
  assert (weights_S[2:] == 0).all()
  np.testing.assert_allclose(weights_S.sum(), 1, atol=1e-6)
  np.testing.assert_allclose(
    out.context_BUD[0, 0], [0.880797, 0.119203], atol=1e-6
  )


# Square sources too: there a softmax over the wrong axis keeps every shape.
@pytest.mark.parametrize("S, U", [(5, 3), (4, 4)])
def test_the_source_first_layout_is_the_transpose(S, U):
  B, D = 2, 6
  q_BUD, k_BSD = normal(B, U, D), normal(B, S, D, seed=1)
  v_BSD = normal(B, S, 7, seed=2)
  out = attend(attention.dot(), {}, q_BUD, k_BSD, v_BSD)
  scores_BSU = k_BSD @ q_BUD.transpose(0, 2, 1)
  weights_BSU = softmax(scores_BSU, axis=1)
  context_BUD = weights_BSU.transpose(0, 2, 1) @ v_BSD
  assert out.weights_BUS.shape == (B, U, S)
  for actual, expected in [
    (out.scores_BUS, scores_BSU.transpose(0, 2, 1)),
    (out.weights_BUS, weights_BSU.transpose(0, 2, 1)),
    (out.context_BUD, context_BUD),
  ]:
    np.testing.assert_allclose(actual, expected, atol=1e-6)
  np.testing.assert_allclose(out.weights_BUS.sum(2), 1, atol=1e-6)
  wrong_BSU = softmax(scores_BSU, axis=2)
  assert abs(wrong_BSU.transpose(0, 2, 1) - out.weights_BUS).max() > 0.1


@all_scores
def test_scores_are_their_equations(name):
  B, U, S, D = 2, 3, 4, 6
  widths = (D, D) if "dot" in name else (D, 5)
  score, params = drawn(name, *widths)
  q_BUD, k_BSD = normal(B, U, widths[0]), normal(B, S, widths[1], seed=1)
  out = attend(score, params, q_BUD, k_BSD)
  scores_BUS = np.array(
    [
      [[reference(name, params, q, k) for k in k_BSD[b]] for q in q_BUD[b]]
      for b in range(B)
    ]
  )
  np.testing.assert_allclose(out.scores_BUS, scores_BUS, atol=1e-6)
  weights_BUS = softmax(scores_BUS, axis=2)
  np.testing.assert_allclose(out.weights_BUS, weights_BUS, atol=1e-6)
  np.testing.assert_allclose(out.context_BUD, weights_BUS @ k_BSD, atol=1e-6)


def test_keys_and_values_may_differ():
  q_BUD, k_BSD, v_BSD = normal(1, 2, 3), normal(1, 4, 3), normal(1, 4, 5)
  out = attend(attention.dot(), {}, q_BUD, k_BSD, v_BSD)
  assert out.context_BUD.shape == (1, 2, 5)
  np.testing.assert_allclose(
    out.context_BUD, np.asarray(out.weights_BUS) @ v_BSD, atol=1e-6
  )


def total(score, params, q_BUD, k_BSD, v_BSD, mask_BS):
  """A loss that reads weights and context, not the raw scores."""
  out = attend(score, params, q_BUD, k_BSD, v_BSD, mask_BS)
  reads = [jnp.sum(jnp.sin(o + 0.5)) for o in out[1:]]
  return sum(reads), out


@all_scores
def test_masked_positions_reach_no_value_and_no_gradient(name):
  B, U, S, D = 3, 2, 5, 4
  score, params = drawn(name)
  q_BUD, k_BSD, v_BSD = normal(B, U, D), normal(B, S, D), normal(B, S, 3)
  # A gap, a tail, and a row with nothing to attend to.
  mask_BS = np.array([[1, 0, 1, 1, 0], [1, 1, 0, 0, 0], [0] * 5], bool)
  run = jax.jit(
    jax.value_and_grad(
      functools.partial(total, score), argnums=(0, 1, 2, 3), has_aux=True
    )
  )

  def filled(content):
    k = np.where(mask_BS[..., None], k_BSD, content).astype(np.float32)
    v = np.where(mask_BS[..., None], v_BSD, content).astype(np.float32)
    return run(params, q_BUD, k, v, mask_BS)

  (_, expected), grads = filled(0)
  for content in (99, 1e6, np.inf, np.nan):
    (_, out), other = filled(content)
    assert_close(out, expected, atol=0)
    assert_close(other, grads, atol=0)
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
  weights_BUS = np.asarray(expected.weights_BUS)
  masked_BUS = np.broadcast_to(~mask_BS[:, None], weights_BUS.shape)
  assert (weights_BUS[masked_BUS] == 0).all()
  assert (weights_BUS[~masked_BUS] > 0).all()
  np.testing.assert_allclose(weights_BUS[:2].sum(-1), 1, atol=1e-6)
  for g_BSD in grads[2:]:
    assert (np.asarray(g_BSD)[~mask_BS] == 0).all()
    assert (np.asarray(g_BSD)[mask_BS] != 0).any()


@pytest.mark.parametrize("content", [0.0, 1e30, np.nan, np.inf, -np.inf])
def test_masked_scores_reach_no_value_and_no_gradient(content):
  scores_BS = jnp.array([[1.0, content, 2.0], [content] * 3])
  mask_BS = jnp.array([[True, False, True], [False] * 3])

  def loss(scores_BS):
    weights_BS = attention.masked_softmax(scores_BS, mask_BS)
    return jnp.sum(weights_BS * jnp.arange(1.0, 4)[None]), weights_BS

  grad_BS, weights_BS = jax.grad(loss, has_aux=True)(scores_BS)
  small, large = softmax(np.array([1.0, 2.0]), 0)
  np.testing.assert_allclose(
    weights_BS, [[small, 0, large], [0, 0, 0]], atol=1e-6
  )
  slope = 2 * small * large
  np.testing.assert_allclose(
    grad_BS, [[-slope, 0, slope], [0, 0, 0]], atol=1e-6
  )


def test_large_scores_do_not_overflow():
  scores_BS = jnp.array([[1e30, 1e30, -1e30], [-3e38, -3e38, 0.0]])
  mask_BS = jnp.array([[True, True, True], [True, True, False]])
  weights_BS = attention.masked_softmax(scores_BS, mask_BS)
  np.testing.assert_array_equal(weights_BS, [[0.5, 0.5, 0]] * 2)


@all_scores
def test_an_empty_row_changes_nothing_beside_it(name):
  score, params = drawn(name)
  q_BUD, k_BSD, v_BSD = normal(2, 3, 4), normal(2, 3, 4), normal(2, 3, 4)
  mask_BS = np.arange(3)[None] < np.array([3, 0])[:, None]
  run = jax.jit(
    jax.value_and_grad(
      functools.partial(total, score), argnums=(1, 2, 3), has_aux=True
    )
  )
  (_, both), grads = run(params, q_BUD, k_BSD, v_BSD, mask_BS)
  one = [x[:1] for x in (q_BUD, k_BSD, v_BSD, mask_BS)]
  (_, alone), grads_alone = run(params, *one)
  assert_close(jax.tree.map(lambda x: x[:1], both), alone, atol=0)
  assert_close(jax.tree.map(lambda x: x[:1], grads), grads_alone, atol=0)
  assert (np.asarray(both.weights_BUS[1]) == 0).all()
  assert (np.asarray(both.context_BUD[1]) == 0).all()
  assert all((np.asarray(g[1]) == 0).all() for g in grads)


def test_work_grows_as_source_x_target_x_width():
  def flops(S, U, D):
    lowered = jax.jit(functools.partial(attend, attention.dot(), {})).lower(
      normal(2, U, D), normal(2, S, D)
    )
    return lowered.compile().cost_analysis()["flops"]

  base = flops(64, 32, 128)
  # Scores and context: a multiply and an add for each, 2 rows.
  assert base == pytest.approx(2 * 2 * 2 * 64 * 32 * 128, rel=0.05)
  assert flops(128, 32, 128) == pytest.approx(2 * base, rel=0.05)
  assert flops(64, 64, 128) == pytest.approx(2 * base, rel=0.05)
  assert flops(64, 32, 256) == pytest.approx(2 * base, rel=0.05)


@all_scores
def test_what_is_kept_of_the_source_grows_with_the_source_alone(name):
  """Source x width numbers, and the keys' part of the score in them."""
  score, params = drawn(name)
  source = attention.source(score, params, normal(2, 7, 4))
  d_compared = 5 if name == "additive" else 4
  assert source.keys_BSA.shape == (2, 7, d_compared)
  assert source.values_BSD.shape == (2, 7, 4)
  assert attend(score, params, normal(2, 3, 4), normal(2, 7, 4))[1].shape == (
    (2, 3, 7)
  )


@pytest.mark.parametrize("name", ["dot", "scaled_dot"])
def test_a_dot_product_refuses_two_widths(name):
  with pytest.raises(ValueError, match="one width, not 3 and 4"):
    attention.make(name).init(jax.random.key(0), 3, 4)


def test_what_does_not_fit_is_refused():
  k_BSD, score = normal(2, 5, 4), attention.dot()
  with pytest.raises(ValueError, match="values_BS.*source position is 6"):
    attention.source(score, {}, k_BSD, normal(2, 6, 4))
  with pytest.raises(ValueError, match="mask_BS.*batch is 3"):
    attention.source(score, {}, k_BSD, mask_BS=np.ones((3, 5), bool))
  with pytest.raises(ValueError, match="score is one of.*'cosine'"):
    attention.make("cosine")
  with pytest.raises(ValueError, match="model.attention.width"):
    attention.make("dot", width=3)
  with pytest.raises(ValueError, match="model.attention.width"):
    attention.make("additive")


def test_a_mask_that_is_not_of_bools_is_refused():
  score = attention.make("dot")
  with pytest.raises(ValueError, match="mask_BS must be of bool, not float32"):
    attention.source(score, {}, jnp.ones((2, 3, 4)), mask_BS=jnp.zeros((2, 3)))
