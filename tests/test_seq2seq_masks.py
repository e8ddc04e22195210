"""What an encoder-decoder's predictions may depend on: order, masks, batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close
from wirings import (
  BAHDANAU,
  DEEP,
  FIXED,
  LECTURE,
  LUONG,
  MAIN,
  WIRINGS,
  V,
  drawn,
  make,
  run,
  tokens,
)

from rnnlab import cells, scan, wiring

SOURCES = [[3, 1, 4, 1, 5], [9, 2], [6], []]
LENGTH_B = np.array([len(source) for source in SOURCES])
B, U = len(SOURCES), 3
TARGET_BU = tokens(B, U, seed=2)


def padded(rows, width, fill):
  filled = [list(row) + [fill] * (width - len(row)) for row in rows]
  return np.array(filled, np.int32)


def masks(width, length_B=LENGTH_B):
  mask_BS = scan.mask_of(length_B, width)
  return {"steps_BS": mask_BS, "source_BS": mask_BS}


@pytest.mark.parametrize("settings", [*WIRINGS.values(), LUONG | DEEP])
def test_no_prediction_sees_what_comes_after_it(settings):
  """And each sees the whole source, in whatever direction that was read."""
  model = make(**settings)
  params = drawn(model)
  source_BS, target_BU = np.array([[0, 1, 2, 3]]), np.array([[4, 5, 6]])

  def logits(embed_VD):
    own = params | {"embed_VD": embed_VD}
    return run(model, own, source_BS, target_BU)[2][0]

  jac = jax.jit(jax.jacrev(logits))(params["embed_VD"])
  moved_UV = np.abs(jac).max((1, 3))
  reads_UU = np.tri(U, dtype=bool)
  assert (moved_UV[:, :4] > 1e-6).all()
  assert (moved_UV[:, 4:7][reads_UU] > 1e-6).all()
  assert (moved_UV[:, 4:7][~reads_UU] == 0).all()
  assert (moved_UV[:, 7:] == 0).all()


CASES = {
  **MAIN,
  "lecture-backward": LECTURE | {"direction": "backward"},
  "bahdanau-deep": BAHDANAU | DEEP,
  "fixed-deep": FIXED["fixed-all"] | DEEP,
}


@pytest.mark.parametrize("name", CASES)
def test_padding_is_not_there(name):
  """Rows of many lengths, padded with anything, are each row run alone."""
  model = make(**CASES[name])
  params = drawn(model)
  expected = run(model, params, padded(SOURCES, 7, 0), TARGET_BU, **masks(7))
  # Ids that no vocabulary has, too.
  for fill in (V - 1, 10**6, -5):
    source_BS = padded(SOURCES, 7, fill)
    assert_close(
      run(model, params, source_BS, TARGET_BU, **masks(7)), expected, atol=0
    )
  encoded, carry, logits_BUV, attended = expected
  if attended is not None:
    padding_BS = np.arange(7)[None] >= LENGTH_B[:, None]
    weights_BSU = np.swapaxes(attended.weights_BUS, 1, 2)
    assert (weights_BSU[padding_BS] == 0).all()
    np.testing.assert_allclose(
      weights_BSU.sum(1), np.repeat(LENGTH_B[:, None] > 0, U, 1), atol=1e-6
    )
  alone = run(model, params, np.array(SOURCES[1:2]), TARGET_BU[1:2])
  for one, batch in (
    (alone[0].carry, encoded.carry),
    (alone[0].context_BC, encoded.context_BC),
    (alone[1:3], (carry, logits_BUV)),
  ):
    assert_close(one, jax.tree.map(lambda x: x[1:2], batch), atol=1e-6)


@pytest.mark.parametrize("name", ["lecture", "bahdanau-deep", "luong"])
def test_gaps_are_stepped_over(name):
  model = make(**CASES[name])
  params = drawn(model)
  mask_BS = np.array([[0, 1, 0, 0, 1, 1, 0], [1, 0, 1, 1, 0, 0, 0]], bool)
  apart_BS = np.where(mask_BS, 0, V - 1)
  apart_BS[mask_BS] = [7, 8, 2, 3, 1, 4]
  together_BS = np.array([[7, 8, 2], [3, 1, 4]])
  gaps = {"steps_BS": mask_BS, "source_BS": mask_BS}
  one = run(model, params, apart_BS, TARGET_BU[:2], **gaps)
  other = run(model, params, together_BS, TARGET_BU[:2])
  assert_close(one[0].carry, other[0].carry, atol=1e-6)
  assert_close(one[1:3], other[1:3], atol=1e-6)


def test_the_two_source_masks_are_two_things():
  """Each on its own changes what it is for and leaves the other alone."""
  model = make(**LECTURE)
  params = drawn(model)
  source_BS, on = padded(SOURCES, 5, V - 1), masks(5)
  encode = jax.jit(model.encode)
  neither = encode(params, source_BS)
  steps = encode(params, source_BS, steps_BS=on["steps_BS"])
  source = encode(params, source_BS, source_BS=on["source_BS"])
  both = encode(params, source_BS, **on)
  assert_close(source.carry, neither.carry, atol=0)
  assert_close(both.carry, steps.carry, atol=0)
  moved_B = np.abs(steps.carry[0] - neither.carry[0]).max(1)
  np.testing.assert_array_equal(moved_B > 1e-3, LENGTH_B < 5)
  assert steps.source.mask_BS is None and neither.source.mask_BS is None
  np.testing.assert_array_equal(both.source.mask_BS, on["source_BS"])
  # Where the encoder steps on padding, its states there are still not found.
  found = model.decode(params, source, source.carry, TARGET_BU)[2]
  assert (np.asarray(found.weights_BUS)[1, :, 2:] == 0).all()
  np.testing.assert_allclose(found.weights_BUS[:3].sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize(
  "name", ["lecture", "luong", "bahdanau-deep", "fixed-all"]
)
def test_padding_reaches_no_gradient(name):
  """Sources and targets of any content under masks; an empty row is finite."""
  model = make(**CASES[name])
  params = drawn(model)
  target_mask_BU = scan.mask_of(np.array([3, 1, 2, 0]), U)

  @jax.jit
  @jax.grad
  def grads(params, source_BS, target_BU):
    out = run(
      model, params, source_BS, target_BU, mask_BU=target_mask_BU, **masks(5)
    )
    real_BU1 = target_mask_BU[..., None]
    return jnp.sum(jnp.where(real_BU1, jnp.sin(out[2] + 0.5), 0))

  def at(fill):
    target_BU = np.where(target_mask_BU, TARGET_BU, fill)
    return grads(params, padded(SOURCES, 5, fill), target_BU)

  expected = at(0)
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(expected))
  # The encoder learns, by no loss of its own.
  assert all((g != 0).any() for g in jax.tree.leaves(expected["encoder"]))
  for fill in (V - 1, 10**6, -5):
    assert_close(at(fill), expected, atol=0)


@pytest.mark.parametrize("name", ["lecture", "bahdanau-deep", "luong"])
def test_rows_of_a_batch_do_not_meet(name):
  model = make(**CASES[name])
  params = drawn(model)
  source_BS, target_BU = tokens(32, 5), tokens(32, U, seed=3)
  length_B = np.arange(32) % 6
  together = run(model, params, source_BS, target_BU, **masks(5, length_B))
  for b in (0, 5, 31):
    own = slice(b, b + 1)
    alone = run(
      model, params, source_BS[own], target_BU[own], **masks(5, length_B[own])
    )
    cut = jax.tree.map(lambda x, own=own: x[own], together)
    assert_close(alone, cut, atol=1e-6)


def test_each_direction_ends_at_its_own_last_real_step():
  """h = tanh(h / 2 + x + 0.3), over 1, -0.5, 0.25 and over 2."""
  cell = cells.make("rnn", hidden=1)
  own = {
    "w_GD": jnp.ones((1, 1)),
    "u_GH": jnp.full((1, 1), 0.5),
    "b_G": jnp.full(1, 0.3),
  }
  params = ({"forward": own, "backward": own},)
  mask_BT = scan.mask_of(np.array([3, 1]), 3)
  for fill in (0.0, 99.0, np.nan):
    x_BTD = jnp.array([[1, -0.5, 0.25], [2, fill, fill]])[..., None]
    (ends,), h_BTD = wiring.unroll([cell], params, x_BTD, mask_BT=mask_BT)
    np.testing.assert_allclose(
      ends["backward"][:, 0], [0.868049, 0.980096], atol=1e-5
    )
    forward, backward = h_BTD[..., 0], h_BTD[..., 1]
    np.testing.assert_allclose(
      backward[0, [0, 2]], [0.868049, 0.500520], atol=1e-5
    )
    np.testing.assert_array_equal(ends["backward"][:, 0], backward[:, 0])
    np.testing.assert_array_equal(
      ends["forward"][:, 0], [forward[0, 2], forward[1, 0]]
    )
    assert (h_BTD[1, 1:] == 0).all()


def test_every_layer_reads_both_directions_of_the_one_below():
  stack = [cells.make("lstm", hidden=2) for _ in range(2)]
  shapes = jax.eval_shape(
    functools.partial(wiring.init, stack, d_in=3, direction="both"),
    jax.random.key(0),
  )
  assert [own["forward"]["w_GD"].shape for own in shapes] == [(8, 3), (8, 4)]
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape)), shapes)
  x_BTD = jnp.asarray(rng.normal(size=(1, 4, 3)), jnp.float32)

  @jax.jit
  @functools.partial(jax.jacrev, argnums=1)
  def both_ways(params, x_BTD):
    return wiring.unroll(stack, params, x_BTD)[1][0]

  moved = np.abs(both_ways(params, x_BTD)[:, :, 0]).max(-1)
  assert (moved > 0).all()
