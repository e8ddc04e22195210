"""The truncated gradient, for every K, against one that is cut by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import all_cells, assert_close, draw, exhaustive_but

from rnnlab import cells, layers, scan
from rnnlab.analysis import truncation

B, T, D, H = 3, 6, 2, 3

pytestmark = pytest.mark.usefixtures("x64")


def recurrence(cell, params, **flags):
  rng = np.random.default_rng(0)
  x_BTD, w_BTH = rng.normal(size=(B, T, D)), rng.normal(size=(B, T, H))
  return layers.Recurrence(
    "cell",
    cell,
    params,
    jnp.asarray(x_BTD),
    loss=lambda h_BTH: jnp.sum(jnp.sin(h_BTH + w_BTH), -1),
    **flags,
  )


def by_hand(read):
  """K -> the gradient of every loss through its last K steps, added up.

  Each loss has a row of its own, with the T steps up to it; those before the
  last K are masked, and what the first of these starts from is a constant.
  """
  entries_TBH = jax.tree.map(
    lambda e_THB: jnp.moveaxis(e_THB, -1, 1), read.trace().entries
  )
  t_NT, b_N = np.arange(T).repeat(B)[:, None], np.tile(np.arange(B), T)
  step_NT = t_NT - np.arange(T)[::-1]
  at_NT, real_NT = np.maximum(step_NT, 0), step_NT >= 0
  if read.mask_BT is not None:
    real_NT = real_NT & read.mask_BT[b_N[:, None], at_NT]
  reset_NT = None
  if read.reset_BT is not None:
    reset_NT = read.reset_BT[b_N[:, None], at_NT]
  counted_N = real_NT[:, -1]

  @jax.jit
  @jax.grad
  def gradient(params, K):
    first_N = jnp.maximum(t_NT[:, 0] + 1 - K, 0)
    carry = jax.tree.map(lambda e_TBH: e_TBH[first_N, b_N], entries_TBH)
    _, h_NTH = scan.unroll(
      read.cell,
      params,
      read.x[b_N[:, None], at_NT],
      carry,
      mask_BT=real_NT & (step_NT >= first_N[:, None]),
      reset_BT=reset_NT,
      bptt="autodiff",
    )
    h_BTH = jnp.swapaxes(h_NTH[:, -1].reshape(T, B, H), 0, 1)
    return jnp.sum(jnp.where(counted_N.reshape(T, B).T, read.loss(h_BTH), 0))

  return lambda K: gradient(read.params, K)


def vector(tree):
  return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


FLAGS = {
  "mask_BT": np.arange(T) % np.array([[9], [4], [3]]) != 2,
  "reset_BT": np.arange(T) == np.array([[0], [3], [4]]),
}


@pytest.mark.parametrize(
  "settings, flags",
  exhaustive_but(
    ["rnn-tanh", "flags"],
    [pytest.param(*c.values, {}, id=c.id) for c in all_cells()]
    + [pytest.param({"name": "lstm"}, FLAGS, id="flags")],
  ),
)
def test_the_cut_gradient_for_every_length(settings, flags):
  cell = cells.make(hidden=H, **settings)
  read = recurrence(cell, draw(cell, D), **flags)
  found = jax.jit(lambda p: truncation.measure(read._replace(params=p)))(
    read.params
  )
  cut = by_hand(read)
  full_N = vector(cut(T))
  assert_close(vector(found.full), full_N)
  for K in range(1, T + 1):
    cut_N = vector(cut(K))
    norms = np.linalg.norm(cut_N), np.linalg.norm(full_N)
    cosine = cut_N @ full_N / np.prod(norms)
    assert float(found.cosine_K[K - 1]) == pytest.approx(cosine, abs=1e-12)
    ratio = norms[0] / norms[1]
    assert float(found.norm_K[K - 1]) == pytest.approx(ratio, abs=1e-12)
    error = np.linalg.norm(cut_N - full_N) / norms[1]
    assert float(found.bias_K[K - 1]) == pytest.approx(error, abs=1e-12)
  assert found.bias_K[-1] < 1e-15 and found.bias_K[0] > 0.01
  assert found.cosine_K[-1] == pytest.approx(1)


def test_what_has_no_loss_or_reads_a_memory_is_refused():
  cell = cells.make("rnn", hidden=H)
  read = recurrence(cell, draw(cell, D))
  with pytest.raises(ValueError, match="cell has no loss"):
    truncation.measure(read._replace(loss=None))
  with pytest.raises(ValueError, match="cell reads a memory"):
    truncation.measure(read._replace(memory=1.0))
