"""Jacobians along a path: against paper, autodiff, and dense products."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import all_cells, assert_close, exhaustive_but, rows
from test_retention import drawn

from rnnlab import cells, layers, scan, stepping
from rnnlab.analysis import jacobians, path, products, sensitivity

H, D, B, T = 3, 2, 3, 6
X_BTD = np.random.default_rng(0).normal(size=(B, T, D))
MASK_BT = np.array(
  [[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 1, 0, 1, 1, 0]], bool
)
RESET_BT = np.array(
  [[0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0], [1, 0, 1, 1, 0, 0]], bool
)
# The last real steps of a row, from its last reset on.
REACHING = [[2, 3, 4, 5], [0, 1, 2], [3, 4]]


CELLS = exhaustive_but(["gru-before"], all_cells())


def recurrence(settings, **fields):
  cell = cells.make(hidden=H, initial="learned", **settings)
  params = drawn(lambda key: cell.init(key, D))
  read = layers.Recurrence("one", cell, params, jnp.asarray(X_BTD), **fields)
  return read._replace(carry=rows(cell, params, B))


def linear(u_HH, T, dtype=float):
  """h_t = U h_{t-1} for a U and states that are positive: relu does nothing."""
  u_HH = jnp.asarray(u_HH, dtype)
  cell = cells.make("rnn", hidden=len(u_HH), activation="relu", bias=False)
  params = {"w_GD": jnp.zeros((len(u_HH), 1), dtype), "u_GH": u_HH}
  carry = jnp.ones((1, len(u_HH)), dtype)
  return layers.Recurrence(
    "one", cell, params, jnp.zeros((1, T, 1), dtype), carry
  )


def jit(function):
  """function(path) of a recurrence, compiled."""

  def run(r):
    arrays = r.params, r.x, r.carry

    @jax.jit
    def compiled(params, x, carry):
      own = r._replace(params=params, x=x, carry=carry)
      return function(path.follow(own))

    return compiled(*arrays)

  return run


def dense(r):
  """J_TBNN of all steps as they stand, by autodiff example by example."""

  @jax.jit
  def run(params):
    trace = r._replace(params=params).trace()

    def jacobian(carry, u):
      flat, back = jax.flatten_util.ravel_pytree(carry)

      def step(flat):
        columns = jax.tree.map(lambda c: c[:, None], back(flat))
        u_B = jax.tree.map(lambda v: v[:, None], u)
        new, _ = stepping.step(r.cell, params, columns, u_B)
        return jax.flatten_util.ravel_pytree(new)[0]

      return jax.jacrev(step)(flat)

    by_row = jax.vmap(jacobian, in_axes=(-1, -1))
    return jax.vmap(by_row)(trace.entries, trace.inputs)

  return np.asarray(run(r.params))


def on_paper(settings, params, carry, u_G):
  """The closed form as one matrix; of a gated update with its terms."""
  if settings["name"] == "lstm":
    blocks = jacobians.lstm(params, *carry, u_G)
    rows_ = [[blocks["hh"], blocks["hc"]], [blocks["ch"], blocks["cc"]]]
    return jnp.block(rows_), {}
  if settings["name"] == "rnn":
    return jacobians.rnn(params, carry, u_G), {}
  extra = {"reset": settings["reset"]} if "reset" in settings else {}
  parts = getattr(jacobians, settings["name"])(params, carry, u_G, **extra)
  return sum(parts.values()), parts


@pytest.mark.parametrize(
  "settings", exhaustive_but(["gru-before", "lstm"], all_cells())
)
def test_jacobians_by_paper_by_autodiff_and_term_by_term(settings, x64):
  r = recurrence(settings)

  def found(path_):
    at = path_.at(3)
    return path.jacobian(path_, at), sensitivity.terms(path_, at), at

  whole_BNN, terms, at = jit(found)(r)
  assert_close(sum(terms.values()), whole_BNN)
  assert_close(whole_BNN, dense(r)[3])
  if settings.get("activation") == "relu":
    return
  for b in range(B):
    state_N = at.state_NB[:, b]
    pair = settings["name"] == "lstm"
    carry = (state_N[:H], state_N[H:]) if pair else state_N
    u_G = jnp.concatenate([u_HB[:, b] for u_HB in jax.tree.leaves(at.inputs)])
    paper, parts = on_paper(settings, r.params, carry, u_G)
    assert_close(whole_BNN[b], paper)
    if parts:
      assert_close({name: terms[name][b] for name in parts}, parts)
  if settings["name"] == "rnn":
    assert_close(terms["candidate"], whole_BNN)
  if settings["name"] == "lstm":
    # The direct edge: diag(f) from c to c.
    assert_close(terms["direct"][:, H:, H:], whole_BNN[:, H:, H:])


@pytest.mark.parametrize("settings", CELLS)
def test_products_with_masks_and_resets_are_the_dense_ones(settings, x64):
  r = recurrence(settings, mask_BT=MASK_BT, reset_BT=RESET_BT)
  distance_D = jnp.arange(1, T + 1)

  def found(path_):
    values = jax.lax.map(
      lambda d: products.log_singular_values(path_, distance=d), distance_D
    )
    return path_.length_B, values, products.step_norms(path_)

  length_B, log_DBN, norm_TB = jit(found)(r)
  j_TBNN = dense(r)
  for b, steps in enumerate(REACHING):
    assert length_B[b] == len(steps)
    product = np.eye(j_TBNN.shape[-1])
    for d, J in enumerate(j_TBNN[steps[::-1], b], start=1):
      product = product @ J
      values = np.linalg.svd(product, compute_uv=False)
      # A relu may have cut some directions off, for good.
      values = np.where(values > 1e-14, values, 0)
      assert_close(np.exp(log_DBN[d - 1, b]), values, atol=1e-10)
      norm = np.linalg.norm(J, 2)
      assert norm_TB[T - d, b] == pytest.approx(norm, abs=1e-10)
      assert log_DBN[d - 1, b, 0] <= np.log(norm_TB[T - d :, b]).sum() + 1e-10
    # What a row does not have is no step.
    assert_close(log_DBN[len(steps) :, b], log_DBN[len(steps) - 1 : -1, b])
    assert_close(norm_TB[: T - len(steps), b], np.ones(T - len(steps)))


@pytest.mark.parametrize("settings", CELLS)
def test_gradients_are_those_of_the_loss_from_every_state(settings, x64):
  r = recurrence(settings, mask_BT=MASK_BT)

  def loss(out_BTH):
    return jnp.sum(jnp.sin(out_BTH + 0.3), axis=-1)

  log_TB = jit(products.log_gradients)(r._replace(loss=loss))
  trace = jax.jit(lambda params: r._replace(params=params).trace())(r.params)

  last_BT = np.zeros_like(MASK_BT)
  last_BT[range(B), [5, 2, 4]] = True

  @jax.jit
  def rest(params, carry, mask_BT):
    def last(carry):
      run = scan.unroll(r.cell, params, r.x, carry, mask_BT=mask_BT)
      return jnp.sum(jnp.where(last_BT, loss(run[1]), 0))

    return jax.grad(last)(carry)

  for start in range(T):
    entry = jax.tree.map(lambda e, t=start: e[t].T, trace.entries)
    mask_BT = MASK_BT & (np.arange(T) >= start)[None]
    grads = jax.tree.leaves(rest(r.params, entry, mask_BT))
    norm_B = np.sqrt(sum(np.sum(np.square(g), 1) for g in grads))
    for b in range(B):
      distance = mask_BT[b].sum()
      if MASK_BT[b, start]:
        assert np.exp(log_TB[distance - 1, b]) == pytest.approx(norm_B[b])
  assert np.isnan(log_TB).sum() == T * B - MASK_BT.sum()


def test_the_loss_gradient_takes_the_transposed_product(x64):
  """By pulls, and by multiplying matrices the other way round."""
  r = recurrence({"name": "gru"})

  def found(path_):
    ct_NB = jnp.ones((H, B))
    back = ct_NB[None]
    for t in reversed(range(T)):
      back = path.pull(path_, path_.at(t), back)
    return back[0]

  pulled_NB, j_TBNN = jit(found)(r), dense(r)
  for b in range(B):
    product = functools.reduce(lambda p, J: J @ p, j_TBNN[:, b])
    assert_close(pulled_NB[:, b], product.T @ np.ones(H))


def test_a_thousand_steps_neither_overflow_nor_vanish():
  """tanh(a h) on the zero path, in float32, where 2^1000 has no number."""
  cell = cells.make("rnn", hidden=1, bias=False)
  params = {"w_GD": jnp.zeros((1, 1)), "u_GH": jnp.ones((1, 1))}
  r = layers.Recurrence("one", cell, params, jnp.zeros((1, 1000, 1)))

  @jax.jit
  def found(u_GH):
    own = path.follow(r._replace(params=params | {"u_GH": u_GH}))
    return products.log_singular_values(own), products.log_gradients(own)

  for factor in (2.0, 0.5):
    log_BN, gradient_TB = found(jnp.full((1, 1), factor))
    log = 1000 * math.log(factor)
    assert log_BN.item() == pytest.approx(log, rel=1e-5)
    assert gradient_TB[-1].item() == pytest.approx(log, rel=1e-5)


def test_a_product_that_grows_and_vanishes_keeps_both(x64):
  n = 1000
  # The eigenvalues are 2 and 1/4: the product is 2^n/2 [[1, 1/3], [3, 1]] and
  # a rest of 4^-n, with the determinant 2^-n. No state becomes 0 on the way.
  r = linear([[1.125, 0.875 / 3], [0.875 * 3, 1.125]], n)
  (log_N,) = jit(products.log_singular_values)(r)
  largest = n * math.log(2) + math.log(5 / 3)
  assert_close(list(log_N), [largest, -n * math.log(2) - largest], atol=1e-9)


@pytest.mark.slow
def test_leading_directions_are_found_without_the_others(x64):
  rng = np.random.default_rng(0)
  cell = cells.make("rnn", hidden=12)
  params = {
    "w_GD": jnp.asarray(rng.normal(size=(12, D))),
    "u_GH": jnp.asarray(1.1 * np.linalg.qr(rng.normal(size=(12, 12)))[0]),
    "b_G": jnp.zeros(12),
  }
  x_BTD = jnp.asarray(rng.normal(size=(2, 40, D)))
  r = layers.Recurrence("one", cell, params, x_BTD)

  def found(path_):
    few = products.log_singular_values(path_, 4)
    return few, products.log_singular_values(path_)

  few_BK, all_BN = jit(found)(r)
  assert_close(few_BK[:, :3], all_BN[:, :3], atol=1e-3)
  assert (few_BK <= all_BN[:, :4] + 1e-12).all()


def test_directions_that_are_cut_off_are_gone(x64):
  r = linear([[0.5, 0.2], [0.1, -2.0]], 4)  # the second unit dies: -1.9
  (log_N,) = jit(products.log_singular_values)(r)
  assert np.isfinite(log_N[0]) and log_N[1] == -np.inf


@pytest.mark.slow
def test_the_radius_misleads_and_the_bound_says_nothing(x64):
  """Radius 1/2: yet the product grows first, and its bound for good."""
  u_HH = np.array([[0.5, 3.0], [0.0, 0.5]])
  r = linear(u_HH, 40)
  distance_D = np.arange(1, 41)
  found = jax.jit(lambda: sensitivity.measure(r, points=1000))()
  assert_close(np.asarray(found["distance_D"]), distance_D)
  gain_D = np.exp(found["log_gain_DBK"][:, 0, 0])
  bound_D = np.exp(found["log_bound_DB"][:, 0])
  assert found["radius_B"].item() == pytest.approx(0.5, rel=0.03)
  assert gain_D[1] > gain_D[0] - 0.2 > 2.5  # not .25
  assert gain_D[-1] < 1e-9 < 1e19 < bound_D[-1]
  assert (gain_D <= bound_D * (1 + 1e-9)).all()
  expected = [
    np.linalg.norm(np.linalg.matrix_power(u_HH, d), 2) for d in distance_D
  ]
  np.testing.assert_allclose(gain_D, expected, rtol=1e-8)


@pytest.mark.slow
def test_a_contraction_stays_under_rho_to_the_distance(x64):
  r = recurrence({"name": "rnn", "activation": "tanh"})
  params = r.params | {"u_GH": 0.9 * jnp.linalg.qr(r.params["u_GH"])[0]}

  def found(path_):
    values = jax.lax.map(
      lambda d: products.log_singular_values(path_, distance=d),
      jnp.arange(1, T + 1),
    )
    return jnp.exp(values[..., 0]), products.step_norms(path_)

  gain_DB, norm_TB = jit(found)(r._replace(params=params))
  bound_DB = np.cumprod(norm_TB[::-1], axis=0)
  rho_D1 = 0.9 ** np.arange(1, T + 1)[:, None]
  assert (gain_DB <= bound_DB + 1e-12).all()
  assert (bound_DB <= rho_D1 + 1e-12).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rnn", "gru", "lstm"])
def test_radius_and_norms_of_wide_states(name, x64):
  """By iteration: the radius, and factors of a bound, never too small."""
  cell = cells.make(name, hidden=40, recurrent="xavier")
  params = drawn(lambda key: cell.init(key, D))
  params["u_GH"] = params["u_GH"] / 5
  x_BTD = np.random.default_rng(1).normal(size=(2, 5, D))
  r = layers.Recurrence("one", cell, params, jnp.asarray(x_BTD))

  def found(path_):
    at = path_.at(4)
    radius_B = sensitivity.spectral_radius(path_, at)
    norms = products.step_norms(path_)[-1]
    return path.jacobian(path_, at), radius_B, norms

  j_BNN, radius_B, norm_B = jit(found)(r)
  expected = np.abs(np.linalg.eigvals(j_BNN)).max(1)
  np.testing.assert_allclose(radius_B, expected, rtol=0.03)
  norms = np.linalg.norm(j_BNN, 2, axis=(1, 2))
  assert (norm_B >= norms * (1 - 1e-12)).all()
  np.testing.assert_allclose(norm_B, norms, rtol=1e-3)


def test_activation_and_derivative_are_told_apart(x64):
  """Saturated units have large weights and small derivatives."""
  r = recurrence({"name": "rnn", "activation": "tanh"}, mask_BT=MASK_BT)
  for scale in (0.1, 30.0):
    params = jax.tree.map(lambda p, s=scale: s * p, r.params)
    here = r._replace(params=params)
    saturated_B, slope_B = jit(sensitivity.activity)(here)
    trace = jax.jit(lambda p: r._replace(params=p).trace())(params)
    for b in range(B):
      h_TH = np.asarray(trace.out[b][MASK_BT[b]])
      assert saturated_B[b] == pytest.approx(np.mean(np.abs(h_TH) > 0.99))
      assert slope_B[b] == pytest.approx(np.mean(1 - h_TH**2))
    if scale > 1:
      assert saturated_B.min() > 0.5 and slope_B.max() < 0.3


@pytest.mark.parametrize("frozen", [True, False])
def test_the_direct_path_is_all_only_while_gates_are_frozen(frozen, x64):
  r = recurrence({"name": "lstm"}, mask_BT=MASK_BT)
  u_GH = 0 * r.params["u_GH"] if frozen else r.params["u_GH"]
  r = r._replace(params=r.params | {"u_GH": u_GH})
  direct_TB, j_TBNN = np.exp(jit(sensitivity.direct_path)(r)), dense(r)
  for b in range(B):
    product, kept_H = np.eye(2 * H), np.ones(H)
    for d, t in enumerate(np.flatnonzero(MASK_BT[b])[::-1], start=1):
      J = j_TBNN[t, b]
      product = product @ J
      kept_H = kept_H * np.diag(J[H:, H:])
      assert direct_TB[d - 1, b] == pytest.approx(kept_H.max())
      full = product[H:, H:]  # dc_T / dc_{T-d}, through h and the gates too
      equal = np.allclose(full, np.diag(kept_H), atol=1e-12)
      assert equal == (frozen or d == 1)


@pytest.mark.slow
def test_measures_of_a_row_do_not_depend_on_its_company():
  r = recurrence({"name": "gru"})

  @jax.jit
  def measure(x, mask_BT):
    return sensitivity.measure(r._replace(x=x, mask_BT=mask_BT))

  one = measure(r.x, MASK_BT)
  other = measure(r.x.at[0].mul(-2).at[2].set(jnp.nan), MASK_BT[[0, 1, 1]])
  for name in ("log_gain_DBK", "log_bound_DB", "log_direct_DB", "norm_B"):
    axis = 1 if "_DB" in name else 0
    rows_ = [
      np.take(np.asarray(found[name]), 1, axis) for found in (one, other)
    ]
    np.testing.assert_allclose(*rows_, atol=1e-4)
  there_D = one["distance_D"] <= MASK_BT[1].sum()
  for name in ("log_gain_DBK", "log_bound_DB", "log_direct_DB"):
    row_D = np.reshape(one[name][:, 1], (len(there_D), -1))[:, 0]
    assert (np.isfinite(row_D) == there_D).all()
  np.testing.assert_allclose(one["share_B3"].sum(1), 1, rtol=1e-5)


def test_states_grow_under_one_initialisation_and_die_under_another():
  """A relu recurrence: the variance 2/H promises nothing over many steps."""
  rng = np.random.default_rng(0)
  draw_HH = rng.normal(size=(64, 64)) * math.sqrt(2 / 64)
  impulse_BH = jnp.asarray(np.abs(rng.normal(size=(1, 64))), np.float32)
  growth = {}
  for scale in (0.7, 1.0, 1.4):
    r = linear(scale * draw_HH, 60, np.float32)
    trace = r._replace(carry=impulse_BH).trace()
    h_TH = np.concatenate([trace.entries[:, :, 0], trace.out[0, -1:]])
    norm_T = np.linalg.norm(h_TH, axis=1)
    growth[scale] = (norm_T[-1] / norm_T[20]) ** (1 / 40)
  # Growth a step, of an impulse: it scales with the weights, for relu.
  assert growth[0.7] < 0.9 and growth[1.4] > 1.1
  assert growth[1.4] / growth[0.7] == pytest.approx(2, rel=1e-3)
  assert abs(math.log(growth[1.0])) * 1000 > 10
