"""What `unroll` takes: types, numbers as carries, no time at all, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import all_cells, assert_close, draw, rows

from rnnlab import cells, nn, scan

H, D, B, T = 16, 8, 3, 20
X_BTD = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)


def types(tree):
  return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


@pytest.mark.parametrize("settings", all_cells("dtype"))
def test_products_in_bfloat16_carry_in_float32(settings):
  low = cells.make(hidden=H, dtype="bfloat16", **settings)
  full = cells.make(hidden=H, **settings)
  params = draw(full, D, scale=0.1)
  assert types(params) == {"float32"}

  def run(cell, x_BTD):
    return jax.jit(lambda p: scan.unroll(cell, p, x_BTD))(params)

  carry, h_BTH = run(low, X_BTD)
  assert types(carry) == {"float32"} and types(h_BTH) == {"bfloat16"}
  expected = run(full, X_BTD)
  assert types(expected) == {"float32"}
  assert_close((carry, h_BTH.astype(jnp.float32)), expected, 3e-2)
  coarse = run(full, jnp.asarray(X_BTD, jnp.bfloat16))
  assert types(coarse) == {"float32"}
  assert_close(coarse, expected, 3e-2)


def test_sums_of_low_precision_products_are_float32():
  # 1025 is no bfloat16 number: the nearest is 1024.
  ones = jnp.ones((1, 1025))
  total = nn.product(ones, ones.T, "bfloat16")
  assert total.dtype == jnp.float32 and float(total[0, 0]) == 1025


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_a_lookup_is_what_the_table_has(dtype):
  cell = cells.make("gru", hidden=H)
  params = draw(cell, D)
  table_VD = np.random.default_rng(1).normal(size=(5, D)).astype(np.float32)
  tokens_BT = np.random.default_rng(2).integers(5, size=(B, T)).astype(dtype)
  tokens_BT[1, 3:5] = 5, 200  # too large: the last
  if dtype == "int32":
    tokens_BT[0, 3:6] = -1, -5, -6  # from the end; and too small
  lookup = scan.Lookup(jnp.asarray(table_VD), jnp.asarray(tokens_BT))
  found = scan.unroll(cell, params, lookup)[1]
  x_BTD = jnp.asarray(table_VD)[tokens_BT]
  assert_close(found, scan.unroll(cell, params, x_BTD)[1], 1e-6)


@pytest.mark.parametrize("settings", all_cells("dtype"))
def test_gradients_through_bfloat16_products(settings):
  low = cells.make(hidden=H, dtype="bfloat16", **settings)
  full = cells.make(hidden=H, **settings)
  params = draw(full, D, scale=0.1)

  def gradient(cell):
    def loss(params):
      h_BTH = scan.unroll(cell, params, X_BTD)[1]
      return jnp.mean(h_BTH.astype(jnp.float32) ** 2)

    return jax.jit(jax.grad(loss))(params)

  actual = gradient(low)
  assert types(actual) == {"float32"}
  assert_close(actual, gradient(full), 3e-2)


@pytest.mark.parametrize("settings", all_cells())
@pytest.mark.parametrize("number", [2, 0.5, np.int8(1)])
def test_a_number_is_a_carry(settings, number):
  cell = cells.make(hidden=H, **settings)
  params = draw(cell, D)
  own = rows(cell, params, B)
  given = jax.tree.map(lambda _: number, own)
  full = jax.tree.map(lambda c: jnp.full(c.shape, float(number)), own)
  actual = scan.unroll(cell, params, X_BTD, given)
  assert types(actual) == {"float32"}
  assert_close(actual, scan.unroll(cell, params, X_BTD, full), atol=0)


@pytest.mark.parametrize("settings", all_cells())
@pytest.mark.parametrize("options", [{}, {"chunk": 4}])
def test_no_time_returns_the_carry(settings, options):
  cell = cells.make(hidden=H, **settings)
  params = draw(cell, D)
  carry = rows(cell, params, B)
  nothing = scan.Lookup(np.ones((5, D), "f"), np.zeros((B, 0), int))
  for x in (X_BTD[:, :0], nothing):
    final, h_BTH = scan.unroll(cell, params, x, carry, **options)
    assert_close(final, carry, atol=0)
    assert h_BTH.shape == (B, 0, H)


def test_no_time_has_gradients():
  cell = cells.make("gru", hidden=H)
  params = draw(cell, D)

  def loss(params, carry):
    final, h_BTH = scan.unroll(cell, params, X_BTD[:, :0], carry)
    return jnp.sum(final) + jnp.sum(h_BTH)

  carry = rows(cell, params, B)
  dparams, dcarry = jax.grad(loss, argnums=(0, 1))(params, carry)
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(dparams))
  assert_close(dcarry, jnp.ones((B, H)), atol=0)


def test_lengths_become_masks_or_are_refused_by_row():
  mask_BT = scan.mask_of([2, 0, 3], 3)
  assert mask_BT.dtype == bool
  assert mask_BT.tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]
  with pytest.raises(ValueError, match="row 1.*length 4.*3"):
    scan.mask_of([2, 4], 3)
  with pytest.raises(ValueError, match="row 0.*length -1.*3"):
    scan.mask_of(np.array([-1, 2]), 3)


FLAGS_BT = np.ones((B, T), bool)


@pytest.mark.parametrize(
  "options, words",
  [
    ({"bptt": "full"}, "'full'"),
    ({"chunk": 0}, "chunk.*0"),
    ({"reverse": True, "reset_BT": FLAGS_BT}, "reset_BT.*reverse"),
    ({"mask_BT": FLAGS_BT[:, 1:]}, "mask_BT.*19.*20"),
    ({"reset_BT": FLAGS_BT[1:]}, "reset_BT.*2.*3"),
    ({"mask_BT": FLAGS_BT[0]}, "mask_BT.*2 axes"),
    ({"mask_BT": FLAGS_BT.astype(int)}, "mask_BT.*bool.*int"),
    ({"carry": np.zeros((B, H + 1))}, r"\(3, 17\).*\(3, 16\)"),
    ({"carry": np.zeros((B + 1, H))}, r"\(4, 16\).*\(3, 16\)"),
    ({"carry": (0, 0)}, "structure"),
  ],
)
def test_refused_by_name(options, words):
  cell = cells.make("gru", hidden=H)
  params = cell.init(jax.random.key(0), D)
  with pytest.raises(ValueError, match=words):
    scan.unroll(cell, params, X_BTD, **options)


@pytest.mark.parametrize("V", [5, 200])  # projected once, and looked up
def test_nothing_comes_of_a_table_row_that_only_padding_names(V):
  pad = V - 1
  cell = cells.make("gru", hidden=H)
  params = draw(cell, D)
  table_VD = np.random.default_rng(1).normal(size=(V, D)).astype(np.float32)
  tokens_BT = np.random.default_rng(2).integers(0, pad, (B, T))
  mask_BT = np.arange(T)[None] < np.array([[T], [3], [0]])
  tokens_BT = np.where(mask_BT, tokens_BT, pad)

  def loss(params, table_VD):
    x = scan.Lookup(table_VD, tokens_BT)
    return jnp.sum(scan.unroll(cell, params, x, mask_BT=mask_BT)[1])

  def results(row):
    table = table_VD.copy()
    table[pad] = row
    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, table)

  expected = results(0.0)
  assert_close(results(np.nan), expected, 0)
  assert_close(results(1e6), expected, 0)
