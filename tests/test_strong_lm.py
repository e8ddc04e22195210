"""What a stronger language model is made of: joins of layers, and dropouts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import all_cells, assert_close, draw, exhaustive_but, rows

from rnnlab import cells, layers, nn, scan
from rnnlab.models import drops, lm

B, T, D, H, V = 3, 5, 2, 4, 6
X_BTD = np.random.default_rng(0).normal(size=(B, T, D))
FLAGS = {
  "mask_BT": np.array([[1, 1, 1, 0, 0], [0, 1, 0, 1, 1], [0] * 5], bool),
  "reset_BT": np.array([[0, 1, 0, 1, 0], [1, 0, 0, 1, 0], [1] * 5], bool),
}
BOTH = layers.Join(norm=True, residual=True)


def make(cell=None, **settings):
  sizes = {"vocab_size": V, "embed": D, "hidden": H, "layers": 3}
  return lm.make(**sizes | settings, cell=cell or {"name": "rnn"})


def tokens(*shape):
  return np.random.default_rng(1).integers(0, V, shape, np.int32)


@pytest.mark.parametrize(
  "settings",
  exhaustive_but(["lstm"], all_cells())
  + [{"name": "lstm", "dtype": "bfloat16"}],
)
def test_joined_layers_are_one_cell_too(settings):
  stack = [cells.make(hidden=H, **settings) for _ in range(3)]
  cell = layers.as_cell(stack, BOTH)
  params = draw(cell, D)
  carry = rows(cell, params, B)
  one = jax.jit(lambda p: scan.unroll(cell, p, X_BTD, carry, **FLAGS))(params)
  each = jax.jit(
    lambda p: layers.unroll(stack, p, X_BTD, carry, join=BOTH, **FLAGS)
  )(params)
  assert_close(one, each, atol=0.05 if "dtype" in settings else 1e-5)


def test_what_a_joined_stack_computes(x64):
  stack = [cells.make("rnn", hidden=H) for _ in range(3)]
  params = draw(layers.as_cell(stack), D)

  def norm(h_BTH):
    centred = h_BTH - h_BTH.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)

  for join in (layers.PLAIN, layers.Join(norm=True), BOTH):
    want, x_BTD = None, X_BTD
    for layer, cell in enumerate(stack):
      out = np.asarray(scan.unroll(cell, params[layer], x_BTD)[1])
      out = norm(out) if join.norm else out
      want = out + x_BTD if join.residual and layer else out
      x_BTD = want
    found = layers.unroll(stack, params, X_BTD, join=join)[1]
    assert_close(np.asarray(found), want)


def test_joins_have_no_parameters_and_generation_has_them_too():
  plain, model = make(), make(norm=True, residual=True)
  params = plain.init(jax.random.key(0))
  assert_close(model.init(jax.random.key(0)), params, atol=0)
  prompts_BT = tokens(2, 4)
  cursor, _ = model.read(params, prompts_BT, np.array([4, 4]))
  how = {"limit": 3, "stop": -1, "pad": 0, "temperature": 0.0}
  texts = model.generate(params, jax.random.key(0), cursor, **how)
  whole_BT = np.concatenate([prompts_BT, texts.tokens_BU], 1)
  logits_BTV = model.apply(params, whole_BT[:, :-1])[1]
  drawn_BU = logits_BTV[:, 3:].argmax(-1)
  np.testing.assert_array_equal(drawn_BU, texts.tokens_BU)
  assert (
    np.abs(logits_BTV - plain.apply(params, whole_BT[:, :-1])[1]).max() > 0.1
  )


# Dropout


def keeping(hidden, name="keeping"):
  """A cell that keeps its state: what its products read is shown beside it."""
  return cells.Cell(
    init=lambda key, d_in: {"u_GH": jnp.eye(hidden)},
    carry=lambda params, batch: jnp.ones((hidden, batch)),
    project=lambda params, x_DN: 0 * x_DN,
    drive=(
      lambda params, carry, u_HB, a, memory: params["u_GH"] @ carry + u_HB,
    ),
    update=lambda carry, a, memory: (carry, a[0]),
  )


@pytest.fixture
def apply(monkeypatch):
  """(key, **rates) -> what a layer of 64 kept ones shows, 8 rows, 20 steps."""
  monkeypatch.setattr(cells, "make", keeping)
  n = 64

  def apply(key, **rates):
    sizes = {"vocab_size": n, "embed": n, "hidden": n, "layers": 1}
    model = make({"name": "keeping"}, **sizes | rates)
    params = model.init(jax.random.key(0))
    params["out"] = {"w_VH": jnp.eye(n), "b_V": jnp.zeros(n)}
    tokens_BT = np.random.default_rng(0).integers(0, n, (8, 20))
    key = None if key is None else jax.random.key(key)
    carry, shown_BTV = model.apply(params, tokens_BT, key=key)
    assert (np.asarray(carry[0]) == 1).all()  # the state itself is whole
    return np.asarray(shown_BTV)

  return apply


def differ(a, b):
  """Half of the elements, as two draws at the rate 1/2 have it."""
  return 0.35 < (a != b).mean() < 0.65


@pytest.mark.parametrize(
  "rates, over_time, over_rows",
  [
    ({"state_dropout": 0.5}, False, True),
    ({"dropout": 0.5}, True, True),
    ({"dropout": 0.5, "locked": True}, False, True),
    ({"out_dropout": 0.5}, True, True),
    ({"weight_dropout": 0.5}, False, False),
  ],
)
def test_what_a_mask_is_shared_by(apply, rates, over_time, over_rows):
  one_BTH, other_BTH = apply(1, **rates), apply(2, **rates)
  # What is kept is scaled by 1 / (1 - 1/2).
  assert set(np.unique(one_BTH)) == {0, 2}
  assert abs(one_BTH.mean() - 1) < (0.1 if over_rows else 0.4)
  pairs = [(one_BTH[:, :1], one_BTH[:, 1:], over_time)]
  pairs += [(one_BTH[:1], one_BTH[1:], over_rows), (one_BTH, other_BTH, True)]
  for a, b, varies in pairs:
    assert differ(a, b) if varies else (a == b).all()
  np.testing.assert_array_equal(apply(1, **rates), one_BTH)
  assert (apply(None, **rates) == 1).all()  # an evaluation drops nothing


def test_dropped_symbols_are_dropped_wherever_they_stand():
  rates = {"embed_dropout": 0.5}
  one_VD, other_VD, whole_VD = (
    np.asarray(drops.Drops(key, rates, False).symbols(jnp.ones((40, 3))))
    for key in (jax.random.key(0), jax.random.key(1), None)
  )
  for table_VD in (one_VD, other_VD):
    assert (table_VD == table_VD[:, :1]).all()
    assert set(np.unique(table_VD)) == {0, 2}
    assert 8 < (table_VD[:, 0] > 0).sum() < 32
  assert differ(one_VD, other_VD) and (whole_VD == 1).all()
  # The model reads it: a rate next to 1 leaves nothing but the initial state.
  model = make(embed_dropout=1 - 1e-6, layers=1)
  params = model.init(jax.random.key(0))
  logits_BTV = model.apply(params, tokens(2, 3), key=jax.random.key(0))[1]
  assert (logits_BTV == logits_BTV[:1]).all()


def test_kinds_of_dropout_do_not_share_their_draws(apply):
  found = [
    apply(1, dropout=0.5, locked=True)[:, 0],
    apply(1, state_dropout=0.5)[:, 0],
  ]
  assert differ(*found)
  rates = {"state_dropout": 0.5, "weight_dropout": 0.5}
  drop = drops.Drops(jax.random.key(0), rates, False)
  assert differ(*map(np.asarray, drop.states(2, 20, 20)))
  ones = {"u_GH": jnp.ones((20, 20))}
  weights = [drop.weights(layer, ones)["u_GH"] for layer in range(2)]
  assert differ(*map(np.asarray, weights))


@pytest.mark.parametrize("settings", exhaustive_but(["lstm"], all_cells()))
def test_a_dropped_state_has_the_gradient_of_plain_autodiff(settings, x64):
  plain = cells.make(hidden=H, **settings)
  cell = cells.dropping(plain)
  params = draw(cell, D)
  memory = nn.kept(jax.random.key(0), (H, B), 0.5)

  @functools.partial(jax.jit, static_argnames=("cell", "bptt"))
  def grads(params, memory, cell=cell, bptt="fused"):
    def loss(params):
      options = FLAGS | {"memory": memory, "bptt": bptt}
      return jnp.sum(jnp.sin(scan.unroll(cell, params, X_BTD, **options)[1]))

    return jax.value_and_grad(loss)(params)

  dropped = grads(params, memory)
  assert_close(dropped, grads(params, memory, bptt="autodiff"))
  assert_close(grads(params, jnp.ones((H, B))), grads(params, None, cell=plain))
  assert abs(dropped[0] - grads(params, None)[0]) > 1e-3


@pytest.mark.parametrize(
  "name",
  [f"{n}_dropout" for n in ("out", "embed", "state", "weight")],
)
def test_a_rate_that_is_none_is_refused(name):
  for rate in (1.0, -0.1, float("nan")):
    with pytest.raises(ValueError, match=rf"model.{name} must be in \[0, 1\)"):
      make(**{name: rate})
