"""The backward pass: fused and checkpointed, it changes no number; its cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import all_cells, assert_close, compiled, draw, rows
from jax.extend import core

from rnnlab import cells, nn, scan

H, D, B, T = 3, 2, 4, 5
X_BTD = np.random.default_rng(0).normal(size=(B, T, D))


def subjaxprs(eqn):
  for value in eqn.params.values():
    for part in value if isinstance(value, tuple | list) else [value]:
      if isinstance(part, core.ClosedJaxpr):
        yield part.jaxpr
      elif isinstance(part, core.Jaxpr):
        yield part


def live(jaxpr):
  """The equations that results depend on: what the compiler will keep."""
  needed, kept = {v for v in jaxpr.outvars if isinstance(v, core.Var)}, []
  for eqn in reversed(jaxpr.eqns):
    if needed.intersection(eqn.outvars):
      needed.update(v for v in eqn.invars if isinstance(v, core.Var))
      kept.append(eqn)
  return reversed(kept)


def products(jaxpr):
  """(loop, flops) of every matrix product; None is outside all loops."""
  found, loops = [], 0
  for eqn in live(jaxpr):
    if eqn.primitive.name == "dot_general":
      (contracted, _), _ = eqn.params["dimension_numbers"]
      left, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
      depth = np.prod([left[axis] for axis in contracted])
      found.append((None, int(2 * np.prod(out) * depth)))
    loop = eqn.primitive.name == "scan"
    for sub in subjaxprs(eqn):
      for where, flops in products(sub):
        found.append((loops if loop else where, flops))
    loops += loop
  return found


def loops(function, *args):
  """The products outside all loops, then those inside each loop, as flops."""
  jaxpr = jax.make_jaxpr(function)(*args).jaxpr
  found = products(jaxpr)
  inside = sorted({where for where, _ in found if where is not None})
  return [[f for w, f in found if w == where] for where in [None, *inside]]


def gradient(cell, **options):
  def loss(params, x_BTD):
    return jnp.sum(scan.unroll(cell, params, x_BTD, **options)[1])

  return jax.grad(loss, argnums=(0, 1))


@pytest.mark.parametrize("settings", all_cells())
@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_the_loops_hold_only_the_products_that_need_the_carry(
  settings, backend, monkeypatch
):
  monkeypatch.setenv("RNNLAB_TUNE_FOR", backend)
  H, D, B, T = 7, 2, 3, 11
  cell = cells.make(hidden=H, **settings)
  params, x_BTD = draw(cell, D), np.ones((B, T, D), np.float32)
  G = len(params["b_G"])
  state, twice = 2 * G * H * B, settings.get("reset") == "before"
  stages = [state * 2 // 3, state // 3] if twice else [state]

  forward = loops(lambda p, x: scan.unroll(cell, p, x), params, x_BTD)
  assert forward == [[2 * G * D * B * T], stages]
  outside, ahead, back = loops(gradient(cell), params, x_BTD)
  # The backward loop has the transposed products alone: a weight gradient in
  # it would cost as much again, at every step.
  apart = [2 * H * H * B] * (G // H) if backend == "cpu" else stages
  assert (ahead, sorted(back, reverse=True)) == (stages, apart)
  # Outside: the projection, and dW, dx and dU over all steps at once.
  assert sum(outside) == 3 * 2 * G * D * B * T + T * state
  _, _, plain = loops(gradient(cell, bptt="autodiff"), params, x_BTD)
  assert sum(plain) == 2 * state


def test_a_small_table_is_projected_once_and_a_large_one_never():
  cell = cells.make("rnn", hidden=7)
  params, tokens_BT = draw(cell, 2), np.zeros((3, 11), int)
  for V, columns in ((5, 5), (33, 33), (34, 33)):
    table_VD = np.ones((V, 2), np.float32)
    outside, _ = loops(
      lambda p, t: scan.unroll(cell, p, scan.Lookup(t, tokens_BT)),
      params,
      table_VD,
    )
    assert outside == [2 * 7 * 2 * columns]


def test_checkpoints_over_a_long_time(x64):
  cell = cells.make("gru", hidden=H)
  params = draw(cell, D)
  x_BTD = np.random.default_rng(1).normal(size=(B, 500, D))
  plain = compiled(cell)(params, x_BTD)
  for options in ({}, {"bptt": "autodiff"}):
    chunked = compiled(cell, chunk=16, **options)(params, x_BTD)
    assert_close(chunked, plain, rtol=1e-11)


@pytest.mark.parametrize("chunk", [1, 16])
def test_any_chunk_in_reverse(chunk, x64):
  cell = cells.make("rnn", hidden=H)
  params = draw(cell, D)
  plain = compiled(cell, reverse=True)(params, X_BTD)
  actual = compiled(cell, reverse=True, chunk=chunk)(params, X_BTD)
  assert_close(actual, plain)


def temporary_bytes(T, **options):
  B, H, D = 16, 64, 64
  cell = cells.make("gru", hidden=H)
  params = cell.init(jax.random.key(0), D)

  def loss(params, x_BTD):
    carry, _ = scan.unroll(cell, params, x_BTD, **options)
    return jnp.sum(carry)

  lowered = jax.jit(jax.grad(loss)).lower(params, np.zeros((B, T, D), "f"))
  return lowered.compile().memory_analysis().temp_size_in_bytes


def test_checkpoints_save_memory():
  plain, chunked = temporary_bytes(512), temporary_bytes(512, chunk=16)
  assert plain > 4 * chunked
  # Plain storage grows by B * H floats a step and state, several of them.
  growth = temporary_bytes(1024) - plain
  assert growth / 512 > 3 * 4 * 16 * 64
  more = temporary_bytes(1024, chunk=16) - chunked
  assert more < growth / 4


def gated_by_memory():
  """A custom cell: memory scales the state (drive) and the output (update)."""

  def init(key, d_in):
    return {
      "w_GD": nn.init("xavier", key, H, d_in),
      "u_GH": nn.init("orthogonal", key, H, H),
    }

  def carry(params, batch):
    return {"h": jnp.zeros((H, batch)), "steps": jnp.zeros((1, batch))}

  def drive(params, carry, u_GB, a, memory):
    on_B, k_HB, _ = memory
    read_HB = jnp.where(on_B, k_HB * carry["h"], carry["h"])
    return u_GB[0] + nn.product(params["u_GH"], read_HB)

  def update(carry, a, memory):
    h_HB = jnp.tanh(a[0])
    out = {"h": h_HB * memory[2], "steps": carry["steps"]}
    return {"h": h_HB, "steps": carry["steps"] + 1}, out

  def project(params, x_DN):
    return cells.project(params, x_DN, 1)

  return cells.Cell(init, carry, project, (drive,), update)


@pytest.mark.parametrize("chunk", [None, 2])
def test_memory_is_differentiable(chunk, x64):
  cell, rng = gated_by_memory(), np.random.default_rng(2)
  params = draw(cell, D)
  on_B = np.array([True, False, True, False])
  k_HB, scale_HB = rng.normal(size=(2, H, B))
  mask_BT, reset_BT = rng.random((B, T)) < 0.8, rng.random((B, T)) < 0.2

  def loss(params, k_HB, scale_HB, bptt):
    carry, out = scan.unroll(
      cell, params, X_BTD, memory=(on_B, k_HB, scale_HB),
      mask_BT=mask_BT, reset_BT=reset_BT, chunk=chunk, bptt=bptt,
    )  # fmt: skip
    return jnp.sum(jnp.sin(out["h"])) + jnp.sum(carry["h"])

  grads = jax.grad(loss, argnums=(0, 1, 2))
  plain = grads(params, k_HB, scale_HB, "autodiff")
  assert all(np.abs(g).max() > 0.01 for g in jax.tree.leaves(plain))
  assert_close(grads(params, k_HB, scale_HB, "fused"), plain)
  # Where the flag is off, k is not read.
  assert not np.any(plain[1][:, ~on_B]) and np.any(plain[1][:, on_B])


def test_carry_and_output_may_be_any_tree(x64):
  cell = gated_by_memory()
  memory = (np.ones(B, bool), np.ones((H, B)), np.ones((H, B)))
  mask_BT = np.arange(T) < np.array([5, 3, 1, 0])[:, None]
  carry, out = scan.unroll(
    cell, draw(cell, D), X_BTD, memory=memory, mask_BT=mask_BT
  )
  assert carry["steps"][:, 0].tolist() == [5, 3, 1, 0]
  assert out["h"].shape == (B, T, H) and out["steps"].shape == (B, T, 1)
  assert out["steps"][0, :, 0].tolist() == [0, 1, 2, 3, 4]


def test_forward_mode_works_without_the_fused_rule(x64):
  cell = cells.make("gru", hidden=H)
  params = draw(cell, D)

  def last(carry):
    return scan.unroll(cell, params, X_BTD, carry, bptt="autodiff")[0]

  carry = rows(cell, params, B)
  assert_close(jax.jacfwd(last)(carry), jax.jacrev(last)(carry))
