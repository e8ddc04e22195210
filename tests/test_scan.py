"""What `unroll` promises of masks, resets, directions and carries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import all_cells, assert_close, compiled, draw, rows

from rnnlab import cells, scan, stepping
from rnnlab.metrics import Mean

H, D, B, T = 3, 2, 5, 4
# Padding right, left and in a gap; no padding; nothing else.
MASK_BT = np.array(
  [[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool
)
RESET_BT = np.array(
  [[0, 1, 0, 1], [1, 0, 0, 1], [0, 1, 1, 0], [1, 0, 1, 0], [1, 1, 1, 1]], bool
)
X_BTD = np.random.default_rng(0).normal(size=(B, T, D))


def setup(settings):
  """A cell with a learned initial carry, parameters, and a given carry."""
  cell = cells.make(hidden=H, initial="learned", **settings)
  params = draw(cell, D)
  return cell, params, rows(cell, params, B)


def with_ifs(cell, params, x_BTD, carry, reset_BT, reverse):
  """What the flags mean, one row and one step after the other."""
  finals, outs = [], []
  for b in range(B):
    c = jax.tree.map(lambda a, b=b: a[b][:, None], carry)
    row = [jnp.zeros((H, 1))] * T
    for t in reversed(range(T)) if reverse else range(T):
      if not MASK_BT[b, t]:
        continue
      if reset_BT is not None and reset_BT[b, t]:
        c = cell.carry(params, 1)
      u_GB = cell.project(params, x_BTD[b, t][:, None])
      c, row[t] = stepping.step(cell, params, c, u_GB)
    outs += row
    finals.append(jax.tree.map(lambda a: a[:, 0], c))
  final = jax.tree.map(lambda *a: jnp.stack(a), *finals)
  return final, jnp.stack(outs).reshape(B, T, H)


@pytest.mark.parametrize("settings", all_cells())
@pytest.mark.parametrize("reverse", [False, True])
def test_flags_mean_what_a_loop_with_ifs_does(settings, reverse, x64):
  # So a row is the same alone, in company and without its padding, a reset
  # starts a new sequence, and outputs are aligned in either direction.
  cell, params, carry = setup(settings)
  reset_BT = None if reverse else RESET_BT

  def loss(params, x_BTD, carry):
    both = with_ifs(cell, params, x_BTD, carry, reset_BT, reverse)
    leaves = jax.tree.leaves(both)
    return sum(jnp.sum(jnp.sin(leaf + 0.5)) for leaf in leaves), both

  grads = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)
  (dparams, dx, dcarry), (final, h_BTH) = grads(
    params, jnp.asarray(X_BTD), carry
  )
  assert reverse or np.abs(dparams["h0_H"]).max() > 0.01
  expected = {
    "final": final, "out": h_BTH,
    "dparams": dparams, "dx": dx, "dcarry": dcarry,
  }  # fmt: skip
  flags = {"mask_BT": MASK_BT, "reset_BT": reset_BT, "reverse": reverse}
  for options in ({}, {"bptt": "autodiff"} if reverse else {"chunk": 3}):
    actual = compiled(cell, **flags, **options)(params, X_BTD, carry)
    assert_close(actual, expected)


@pytest.mark.parametrize("settings", all_cells())
@pytest.mark.parametrize("reverse", [False, True])
def test_padding_of_any_content_changes_nothing(settings, reverse, x64):
  cell, params, carry = setup(settings)
  run = compiled(cell, mask_BT=MASK_BT, reverse=reverse)

  def padded(pad):
    return run(params, np.where(MASK_BT[..., None], X_BTD, pad), carry)

  first = padded(0.0)
  assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(first))
  for pad in (99.0, 1e6, np.nan):
    assert_close(padded(pad), first, atol=0)
  for key in ("out", "dx"):
    assert not np.any(first[key][~MASK_BT])
  # A row of length 0 returns the initial carry, bit by bit.
  last = jax.tree.map(lambda c: c[4], (first["final"], carry))
  assert_close(*last, atol=0)


@pytest.mark.parametrize("settings", all_cells())
def test_a_cut_carry_has_the_value_and_no_graph(settings, x64):
  cell, params, carry = setup(settings)

  def run(carry, passed):
    middle, first = scan.unroll(cell, params, X_BTD[:, :2], carry)
    last, second = scan.unroll(cell, params, X_BTD[:, 2:], passed(middle))
    return jnp.sum(second), (last, jnp.concatenate([first, second], 1))

  cut = jax.jit(jax.grad(lambda c: run(c, jax.lax.stop_gradient), has_aux=True))
  dcarry, values = cut(carry)
  assert_close(dcarry, jax.tree.map(jnp.zeros_like, carry), atol=0)
  _, whole = jax.jit(lambda c: run(c, lambda c: c))(carry)
  assert_close(values, whole, atol=0)
  _, (_, fresh) = jax.jit(lambda c: run(c, lambda c: None))(carry)
  assert np.abs(fresh - values[1])[:, 2:].max() > 1e-3


def test_truncation_numbers(x64):
  # h = a h + x with x = 1: relu is the identity on it. The loss is h_4.
  cell = cells.make("rnn", hidden=1, activation="relu")
  one = jnp.ones((1, 2, 1))

  def loss(a, passed):
    params = {"w_GD": jnp.ones((1, 1)), "u_GH": a.reshape(1, 1)}
    middle, _ = scan.unroll(cell, params, one, 0)
    return scan.unroll(cell, params, one, passed(middle))[0][0, 0]

  for passed, h, dh in (
    (lambda c: c, 1.875, 2.75),
    (jax.lax.stop_gradient, 1.875, 2.5),
    (lambda c: None, 1.5, 1.0),
  ):
    actual = jax.value_and_grad(lambda a, p=passed: loss(a, p))(jnp.array(0.5))
    assert_close(actual, (h, dh))


@pytest.mark.parametrize("settings", all_cells())
def test_chunks_of_a_carried_state_are_one_pass(settings, x64):
  cell, params, carry = setup(settings)
  x_BTD = np.random.default_rng(1).normal(size=(B, 100, D))
  whole = scan.unroll(cell, params, x_BTD, carry)
  step, outs = jax.jit(lambda x, c: scan.unroll(cell, params, x, c)), []
  for x in np.split(x_BTD, 5, 1):
    carry, h_BTH = step(x, carry)
    outs.append(h_BTH)
  assert_close((carry, np.concatenate(outs, 1)), whole)


def scalar_rnn(b):
  """h = tanh(0.5 h + x + b), and two rows: three real steps, and one."""
  params = {"w_GD": jnp.ones((1, 1)), "u_GH": jnp.full((1, 1), 0.5)}
  return cells.make("rnn", hidden=1), params | {"b_G": jnp.array([b])}


LENGTHS_MASK_BT = np.array([[1, 1, 1], [1, 0, 0]], bool)


@pytest.mark.parametrize("pad", [0.0, 99.0, 1e6, np.nan])
def test_padding_numbers(pad):
  cell, params = scalar_rnn(0.0)
  x_BTD = jnp.array([[1.0, -0.5, 0.25], [2.0, pad, pad]])[..., None]
  h_BH, h_BTH = scan.unroll(cell, params, x_BTD, mask_BT=LENGTHS_MASK_BT)
  np.testing.assert_allclose(h_BH[:, 0], [0.188401, 0.964028], atol=1e-6)
  assert not np.any(h_BTH[1, 1:])
  wrong, _ = scan.unroll(cell, params, jnp.nan_to_num(x_BTD, nan=0.0))
  assert pad == 1e6 or abs(wrong[1, 0] - 0.964028) > 1e-3


def test_reverse_numbers():
  cell, params = scalar_rnn(0.3)
  x_BTD = jnp.array([[1.0, -0.5, 0.25], [2.0, 0.0, 0.0]])[..., None]
  h_BH, h_BTH = scan.unroll(
    cell, params, x_BTD, mask_BT=LENGTHS_MASK_BT, reverse=True
  )
  np.testing.assert_allclose(h_BH[:, 0], [0.868049, 0.980096], atol=1e-6)
  np.testing.assert_allclose(h_BTH[0, 2, 0], 0.500520, atol=1e-6)
  np.testing.assert_allclose(h_BTH[:, 0], h_BH, atol=0)
  whole, _ = scan.unroll(cell, params, x_BTD, reverse=True)
  np.testing.assert_allclose(whole[1, 0], 0.986856, atol=1e-6)


def test_zero_input_still_moves_the_state():
  # So an embedding of zeros for the pad is no mask.
  cell, params = scalar_rnn(0.3)
  h_BH, _ = scan.unroll(cell, params, jnp.zeros((1, 1, 1)), 0)
  assert float(h_BH[0, 0]) == pytest.approx(np.tanh(0.3), abs=1e-6)


def test_appended_padding_changes_no_masked_loss(x64):
  cell, params, carry = setup({"name": "gru"})

  def loss(params, x_BTD, mask_BT):
    _, h_BTH = scan.unroll(cell, params, x_BTD, carry, mask_BT=mask_BT)
    mean = Mean.of(jnp.sum(h_BTH**2, -1), mask_BT)
    return mean.total, mean

  grad = jax.jit(jax.grad(loss, has_aux=True))
  longer = np.concatenate([X_BTD, np.full((B, 7, D), np.nan)], 1)
  mask_BT = np.pad(MASK_BT, ((0, 0), (0, 7)))
  assert_close(grad(params, longer, mask_BT), grad(params, X_BTD, MASK_BT))


def check_lookup(settings, V, *variants):
  cell, params, carry = setup(settings)
  rng = np.random.default_rng(2)
  table_VD, tokens_BT = rng.normal(size=(V, D)), rng.integers(V, size=(B, T))

  def results(look, **options):
    def loss(params, table_VD, carry):
      flags = {"mask_BT": MASK_BT, "reset_BT": RESET_BT, **options}
      both = scan.unroll(cell, params, look(table_VD), carry, **flags)
      leaves = jax.tree.leaves(both)
      return sum(jnp.sum(jnp.sin(leaf + 0.5)) for leaf in leaves), both

    grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    return grad(params, table_VD, carry)

  expected = results(lambda table: table[tokens_BT])
  # An id at a masked position is never looked up, so it may be any.
  nowhere_BT = np.where(MASK_BT, tokens_BT, V + 3)
  for options in variants:
    looked = results(lambda table: scan.Lookup(table, nowhere_BT), **options)
    assert_close(looked, expected)


@pytest.mark.parametrize("settings", all_cells())
def test_a_lookup_is_embedding_then_projection(settings, x64):
  check_lookup(settings, 4, {})


@pytest.mark.parametrize("V", [4, 40])
def test_a_lookup_works_with_every_option(V, x64):
  variants = {"chunk": 3}, {"bptt": "autodiff"}
  check_lookup({"name": "gru"}, V, *variants)
