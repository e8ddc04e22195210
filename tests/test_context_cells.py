"""Cells that read a context: gradients of the fused loop, equation by equation.

Their values are held to loops over single vectors in test_seq2seq.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import all_cells, assert_close

from rnnlab import attention, cells, layers, nn, scan
from rnnlab.models import context_cells

B, T, S, D, H, C, A = 3, 4, 5, 2, 3, 4, 3
# Gaps, a row that never steps; and sources with a gap and with nothing at all.
MASK_BT = np.array([[1, 1, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]], bool)
SOURCE_BS = np.array([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 0, 0]], bool)
RESET_BT = np.array([[0, 1, 0, 1], [1, 0, 1, 0], [0, 0, 1, 0]], bool)

scoring = attention.additive(A)


def query(params, h):
  return nn.product(h, params["query"]["w_VH"].T)


def normal(*shape, seed=0):
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def stack(name):
  return layers.as_cell([cells.make(name, hidden=H) for _ in range(2)])


def wrapped(kind, inner, top):
  """The context cell and its parameters, around a cell of H units."""
  key = jax.random.key(0)
  own = jax.eval_shape(lambda: inner.init(key, D))
  u = jax.eval_shape(inner.project, own, jnp.zeros((D, 1)))
  packed = sum(len(leaf) for leaf in jax.tree.leaves(u))
  shape = jax.ShapeDtypeStruct
  shapes = {
    "cell": own,
    "score": jax.eval_shape(lambda: scoring.init(key, C, C)),
    "query": {"w_VH": shape((C, H), float)},
  }
  if kind == "attentive":
    cell = context_cells.attentive(inner, top, scoring, query)
    shapes["w_GC"] = shape((packed, C), float)
  else:
    cell = context_cells.feeding(inner, scoring, query)
    shapes["w_GF"] = shape((packed, H), float)
    shapes["mix"] = {
      "w_VH": shape((H, H + C), float),
      "b_V": shape((H,), float),
    }
  rng = np.random.default_rng(0)
  return cell, jax.tree.map(
    lambda p: jnp.asarray(0.5 * rng.normal(size=p.shape)), shapes
  )


def gradients(cell, memory_of, params, carry, options):
  """Values and gradients for both ways back, in one compilation."""

  def loss(params, x_BTD, carry, memory, bptt):
    final, out = scan.unroll(
      cell,
      params,
      x_BTD,
      carry,
      memory=memory_of(params, memory),
      bptt=bptt,
      **options,
    )
    read = jax.tree.leaves((final, out))
    return sum(jnp.sum(jnp.sin(o + 0.5)) for o in read), (final, out)

  def both(*args):
    grad = jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)
    return grad(*args, "fused"), grad(*args, "autodiff")

  memory = normal(B, S, C, seed=2)
  return jax.jit(both)(params, normal(B, T, D, seed=1), carry, memory)


def attend_to(params, k_BSD):
  return attention.source(
    scoring, params["score"], k_BSD, mask_BS=jnp.asarray(SOURCE_BS)
  )


def rows(cell, params):
  columns = jax.eval_shape(lambda: cell.carry(params, B))
  return jax.tree.map(
    lambda c: normal(B, *c.shape[:-1], seed=c.shape[0]), columns
  )


INNERS = [
  pytest.param(
    cells.make(**p.values[0], hidden=H), context_cells.visible, id=p.id
  )
  for p in all_cells()
] + [
  pytest.param(
    stack("lstm"), lambda carry: context_cells.visible(carry[-1]), id="stack"
  )
]


# The two are made alike: for feeding, cells of one stage, of two, of a pair
# as the carry, and of layers.
CASES = [
  pytest.param(
    kind,
    *p.values,
    id=f"{kind}-{p.id}",
    marks=()
    if (kind, p.id) in (("attentive", "stack"), ("feeding", "gru-before"))
    else pytest.mark.exhaustive,
  )
  for kind in ("attentive", "feeding")
  for p in INNERS
  if kind == "attentive" or p.id in ("rnn-tanh", "gru-before", "lstm", "stack")
]


@pytest.mark.slow
@pytest.mark.parametrize("kind, inner, top", CASES)
def test_the_fused_loop_is_autodiff(kind, inner, top, x64):
  cell, params = wrapped(kind, inner, top)
  fused, auto = gradients(
    cell, attend_to, params, rows(cell, params), {"mask_BT": MASK_BT}
  )
  assert_close(fused, auto)
  (dparams, dx_BTD, _, dmemory_BSC), _ = auto
  # Everything takes part, and nothing that is masked does.
  assert all(np.isfinite(d).all() for d in jax.tree.leaves(auto))
  assert all((d != 0).any() for d in jax.tree.leaves(dparams))
  assert (np.asarray(dx_BTD)[~MASK_BT] == 0).all()
  steps_B, reads_BS = MASK_BT.any(1), np.abs(dmemory_BSC).max(2) > 0
  np.testing.assert_array_equal(reads_BS, SOURCE_BS & steps_B[:, None])


@pytest.mark.parametrize("kind", ["attentive", "feeding"])
def test_resets_and_chunks_change_no_gradient(kind, x64):
  inner = cells.make("gru", hidden=H, initial="learned")
  cell, params = wrapped(kind, inner, context_cells.visible)
  options = {"mask_BT": MASK_BT, "reset_BT": RESET_BT, "chunk": 3}
  fused, auto = gradients(cell, attend_to, params, rows(cell, params), options)
  assert_close(fused, auto)
  assert (fused[0][0]["cell"]["h0_H"] != 0).all()


def test_a_constant_context_is_a_bias_of_its_own(x64):
  """Memory W c, as columns: the same as adding W c to every input product."""
  inner = stack("lstm")
  params = {"cell": wrapped("attentive", inner, None)[1]["cell"]}
  params["w_GC"] = normal(4 * H, C)

  def memory_of(params, k_BSC):
    return nn.product(params["w_GC"], k_BSC[:, 0].T)

  cell = context_cells.constant(inner)
  cell = cell._replace(
    carry=lambda params, batch: inner.carry(params["cell"], batch),
    project=lambda params, x_DN: inner.project(params["cell"], x_DN),
    weights=lambda params, apart: inner.weights(params["cell"], apart),
  )
  fused, auto = gradients(
    cell, memory_of, params, rows(cell, params), {"mask_BT": MASK_BT}
  )
  assert_close(fused, auto)
  assert all((d != 0).any() for d in jax.tree.leaves(auto[0][0]))


@pytest.mark.parametrize("kind", ["attentive", "feeding"])
def test_what_stands_at_masked_places_reaches_nothing(kind):
  """NaN among inputs and sources: the same values and gradients as with 0."""
  cell, params = wrapped(
    kind, cells.make("gru", hidden=H), context_cells.visible
  )

  @jax.jit
  @jax.value_and_grad
  def loss(params, x_BTD, k_BSD):
    final, out = scan.unroll(
      cell, params, x_BTD, memory=attend_to(params, k_BSD), mask_BT=MASK_BT
    )
    return sum(jnp.sum(jnp.sin(o + 0.5)) for o in jax.tree.leaves((final, out)))

  def at(content):
    x_BTD = jnp.where(MASK_BT[..., None], normal(B, T, D), content)
    k_BSD = jnp.where(SOURCE_BS[..., None], normal(B, S, C), content)
    return loss(params, x_BTD, k_BSD)

  expected = at(0.0)
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(expected))
  for content in (1e6, np.nan):
    assert_close(at(content), expected, atol=0)
