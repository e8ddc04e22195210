"""What `unroll` promises of masks, resets, directions and carries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import all_cells, assert_close, compiled, draw, rows

from rnnlab import cells, scan
from rnnlab.metrics import Mean

H, D, B, T = 3, 2, 5, 5
# Padding right, left and in gaps, each with three real steps; none; all.
MASK_BT = np.array(
  [
    [1, 1, 1, 0, 0],
    [0, 0, 1, 1, 1],
    [1, 0, 1, 0, 1],
    [1, 1, 1, 1, 1],
    [0, 0, 0, 0, 0],
  ],
  bool,
)
RESET_BT = np.array(
  [
    [0, 1, 0, 1, 0],
    [1, 0, 0, 1, 0],
    [0, 1, 0, 0, 1],
    [1, 0, 1, 1, 0],
    [1, 1, 1, 1, 1],
  ],
  bool,
)
X_BTD = np.random.default_rng(0).normal(size=(B, T, D))


def setup(settings):
  """A cell with a learned initial carry, parameters, and a given carry."""
  cell = cells.make(hidden=H, initial="learned", **settings)
  params = draw(cell, D)
  return cell, params, rows(cell, params, B)


def with_ifs(cell, params, x_BTD, carry):
  """What the flags mean, one row and one step after the other."""
  finals, outs = [], []
  for b in range(B):
    c = jax.tree.map(lambda a, b=b: a[b][:, None], carry)
    for t in range(T):
      if not MASK_BT[b, t]:
        outs.append(jnp.zeros((H, 1)))
        continue
      if RESET_BT[b, t]:
        c = cell.carry(params, 1)
      u_GB = cell.project(params, x_BTD[b, t][:, None])
      c, out = scan.step(cell, params, c, u_GB)
      outs.append(out)
    finals.append(jax.tree.map(lambda a: a[:, 0], c))
  final = jax.tree.map(lambda *a: jnp.stack(a), *finals)
  return final, jnp.stack(outs).reshape(B, T, H)


@pytest.mark.parametrize("settings", all_cells())
def test_flags_mean_what_a_loop_with_ifs_does(settings, x64):
  cell, params, carry = setup(settings)

  def loss(params, x_BTD, carry):
    final, h_BTH = with_ifs(cell, params, x_BTD, carry)
    leaves = jax.tree.leaves((final, h_BTH))
    return sum(jnp.sum(jnp.sin(leaf + 0.5)) for leaf in leaves), (final, h_BTH)

  grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
  (dparams, dx, dcarry), (final, h_BTH) = grads(params, X_BTD, carry)
  assert np.abs(dparams["h0_H"]).max() > 0.01
  expected = dict(final=final, out=h_BTH, dparams=dparams, dx=dx, dcarry=dcarry)
  flags = {"mask_BT": MASK_BT, "reset_BT": RESET_BT}
  for options in ({}, {"bptt": "autodiff"}, {"chunk": 2}, {"unroll": 2}):
    actual = compiled(cell, **flags, **options)(params, X_BTD, carry)
    assert_close(actual, expected)


@pytest.mark.parametrize("settings", all_cells())
@pytest.mark.parametrize("reverse", [False, True])
def test_padding_of_any_content_changes_nothing(settings, reverse, x64):
  cell, params, carry = setup(settings)
  run = compiled(cell, mask_BT=MASK_BT, reverse=reverse)

  def padded(pad):
    x_BTD = np.where(MASK_BT[..., None], X_BTD, pad)
    return run(params, x_BTD, carry)

  first = padded(0.0)
  for pad in (99.0, 1e6, np.nan):
    assert_close(padded(pad), first, atol=0)
  assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(first))
  assert not np.any(first["out"][~MASK_BT]) and not np.any(
    first["dx"][~MASK_BT]
  )
  # A row of length 0 returns the initial carry, bit by bit.
  last = jax.tree.map(lambda c: c[4], (first["final"], carry))
  assert_close(*last, atol=0)


@pytest.mark.parametrize("settings", all_cells())
@pytest.mark.parametrize("reverse", [False, True])
def test_a_padded_row_is_the_row_without_padding(settings, reverse, x64):
  cell, params, carry = setup(settings)
  options = {"reverse": reverse}
  padded = compiled(cell, mask_BT=MASK_BT, **options)(params, X_BTD, carry)
  real = MASK_BT[:3]
  short_BTD = X_BTD[:3][real].reshape(3, 3, D)
  short = compiled(cell, **options)(
    params, short_BTD, jax.tree.map(lambda c: c[:3], carry)
  )
  for key in ("out", "dx"):
    assert_close(padded[key][:3][real].reshape(3, 3, -1), short[key])
  for key in ("final", "dcarry"):
    assert_close(jax.tree.map(lambda c: c[:3], padded[key]), short[key])


@pytest.mark.parametrize("settings", all_cells())
def test_a_row_alone_is_the_row_in_company(settings, x64):
  cell, params, carry = setup(settings)
  flags = {"mask_BT": MASK_BT, "reset_BT": RESET_BT}
  together = scan.unroll(cell, params, X_BTD, carry, **flags)
  for b in (2, 3):
    one = lambda a, b=b: a[b : b + 1]  # noqa: E731
    alone = scan.unroll(
      cell, params, one(X_BTD), jax.tree.map(one, carry),
      mask_BT=one(MASK_BT), reset_BT=one(RESET_BT),
    )  # fmt: skip
    assert_close(alone, jax.tree.map(one, together))


@pytest.mark.parametrize("settings", all_cells())
def test_reverse_is_aligned_with_the_inputs(settings, x64):
  cell, params, carry = setup(settings)
  final, h_BTH = scan.unroll(cell, params, X_BTD, carry, reverse=True)
  expected, flipped = scan.unroll(cell, params, X_BTD[:, ::-1], carry)
  assert_close((final, h_BTH), (expected, flipped[:, ::-1]))


@pytest.mark.parametrize("settings", all_cells())
def test_a_reset_starts_a_new_sequence(settings, x64):
  cell, params, carry = setup(settings)
  reset_BT = np.zeros((B, T), bool)
  reset_BT[:, 2] = True
  one = compiled(cell, reset_BT=reset_BT)(params, X_BTD, carry)
  first = compiled(cell)(params, X_BTD[:, :2], carry)
  second = compiled(cell)(params, X_BTD[:, 2:])
  assert_close(one["final"], second["final"])
  for key in ("out", "dx"):
    both = np.concatenate([first[key], second[key]], 1)
    # The loss of the first part alone reads its final carry as well.
    assert_close(one[key][:, 2 * (key == "dx") :], both[:, 2 * (key == "dx") :])
  final, _ = scan.unroll(cell, params, X_BTD, carry)
  assert np.abs(jax.tree.leaves(final)[0] - second["out"][:, -1]).max() > 1e-3


@pytest.mark.parametrize("settings", all_cells())
def test_truncation_in_three_words(settings, x64):
  cell, params, carry = setup(settings)
  head, tail = X_BTD[:, :3], X_BTD[:, 3:]

  def run(carry, passed):
    middle, first = scan.unroll(cell, params, head, carry)
    last, second = scan.unroll(cell, params, tail, passed(middle))
    return jnp.sum(second), (last, jnp.concatenate([first, second], 1))

  grad = jax.grad(run, has_aux=True)
  whole = scan.unroll(cell, params, X_BTD, carry)
  dcarry, values = grad(carry, lambda c: c)
  assert_close(values, whole)
  assert all(np.all(np.abs(d) > 0) for d in jax.tree.leaves(dcarry)[:1])
  cut, same = grad(carry, jax.lax.stop_gradient)
  assert_close(same, values, atol=0)
  assert_close(cut, jax.tree.map(jnp.zeros_like, carry), atol=0)
  none, other = grad(carry, lambda c: None)
  assert_close(none, jax.tree.map(jnp.zeros_like, carry), atol=0)
  assert np.abs(other[1] - values[1])[:, 3:].min() > 0


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


@pytest.mark.parametrize("settings", all_cells())
def test_appended_padding_changes_no_masked_loss(settings, x64):
  cell, params, carry = setup(settings)

  def loss(params, x_BTD, mask_BT):
    _, h_BTH = scan.unroll(cell, params, x_BTD, carry, mask_BT=mask_BT)
    return Mean.of(jnp.sum(h_BTH**2, -1), mask_BT).value()

  grad = jax.jit(jax.value_and_grad(loss))
  longer = np.concatenate([X_BTD, np.full((B, 7, D), np.nan)], 1)
  mask_BT = np.pad(MASK_BT, ((0, 0), (0, 7)))
  assert_close(grad(params, longer, mask_BT), grad(params, X_BTD, MASK_BT))


@pytest.mark.parametrize("settings", all_cells())
@pytest.mark.parametrize("V", [4, 40])
def test_a_lookup_is_embedding_then_projection(settings, V, x64):
  cell, params, carry = setup(settings)
  rng = np.random.default_rng(2)
  table_VD, tokens_BT = rng.normal(size=(V, D)), rng.integers(V, size=(B, T))
  flags = {"mask_BT": MASK_BT, "reset_BT": RESET_BT}

  def run(params, table_VD, carry, look, **options):
    x = look(table_VD)
    final, h_BTH = scan.unroll(cell, params, x, carry, **flags, **options)
    total = sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(final))
    return total + jnp.sum(jnp.cos(h_BTH)), (final, h_BTH)

  def results(look, **options):
    loss = lambda *a: run(*a, look, **options)  # noqa: E731
    grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    return grad(params, table_VD, carry)

  expected = results(lambda table: table[tokens_BT])
  nowhere = np.where(MASK_BT, tokens_BT, V + 3)
  for options in ({}, {"bptt": "autodiff"}, {"chunk": 2}):
    for tokens in (tokens_BT, nowhere):
      look = lambda table, t=tokens: scan.Lookup(table, t)  # noqa: E731
      assert_close(results(look, **options), expected)
