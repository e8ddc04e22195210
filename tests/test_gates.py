"""How weights and gates start: initialisers, and one meaning of `keep`."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import all_cells, assert_close

from rnnlab import cells, gates, interchange, layers, nn, wiring

KEY = jax.random.key(0)
# Where each cell's keep logit stands in b_G, and with which sign.
PLACES = {"ugrnn": (0, -1), "gru": (1, -1), "lstm": (1, +1)}


def made(settings, hidden=8, d_in=5, key=KEY, **more):
  return cells.make(hidden=hidden, **settings, **more).init(key, d_in)


def blocks(params, hidden=8):
  return np.asarray(params["b_G"]).reshape(-1, hidden)


@pytest.mark.parametrize("settings", all_cells())
def test_orthogonal_is_per_gate(settings):
  u_GH = np.asarray(made(settings)["u_GH"])
  parts = np.split(u_GH, len(u_GH) // 8)
  for i, q_HH in enumerate(parts):
    assert np.abs(q_HH.T @ q_HH - np.eye(8)).max() < 1e-5
    for other in parts[:i]:
      assert np.abs(q_HH - other).max() > 0.1


def test_one_draw_of_the_packed_weight_would_not_be():
  u_GH = np.asarray(nn.init("orthogonal", KEY, 32, 8))
  assert np.abs(u_GH.T @ u_GH - np.eye(8)).max() < 1e-5
  for block in np.split(u_GH, 4):
    assert np.linalg.svd(block, compute_uv=False).max() < 0.95


@pytest.mark.parametrize("settings", all_cells())
def test_scale_is_a_factor_on_the_recurrent_draw_alone(settings):
  plain, scaled = made(settings), made(settings, scale=0.9)
  assert_close(scaled.pop("u_GH"), 0.9 * plain.pop("u_GH"), atol=1e-7)
  assert_close(scaled, plain, atol=0)
  u_GH = made(settings, scale=0.01, recurrent="identity")["u_GH"]
  assert_close(u_GH, 0.01 * jnp.tile(jnp.eye(8), (len(u_GH) // 8, 1)), atol=0)


@pytest.mark.parametrize("scale", [-0.1, math.nan, math.inf])
def test_a_scale_that_is_none_is_refused_by_name(scale):
  with pytest.raises(ValueError, match=f"cell.scale must be.*not {scale}"):
    made({"name": "gru"}, scale=scale)


@pytest.mark.parametrize("settings", all_cells())
def test_identity_is_per_gate(settings):
  u_GH = made(settings, recurrent="identity")["u_GH"]
  for block in np.split(u_GH, len(u_GH) // 8):
    assert_close(block, np.eye(8), atol=0)


def test_the_irnn_holds_a_state_as_it_is():
  params = made({"name": "rnn", "activation": "relu"}, recurrent="identity")
  assert_close(params["u_GH"], jnp.eye(8), atol=0)
  assert_close(params["b_G"], jnp.zeros(8), atol=0)


@pytest.mark.parametrize("settings", all_cells())
def test_ranges_count_one_gate_not_the_packed_matrix(settings):
  params = made(settings, hidden=60, d_in=40)
  limit = math.sqrt(6 / (60 + 40))
  for w_HD in np.split(params["w_GD"], len(params["w_GD"]) // 60):
    assert 0.98 * limit < np.abs(w_HD).max() <= limit
  params = made(settings, 60, 40, input="uniform", recurrent="uniform")
  for w in (params["w_GD"], params["u_GH"]):
    assert 0.98 * 60**-0.5 < np.abs(w).max() <= 60**-0.5


def test_lecun_scales_by_the_input_width():
  w_HD = nn.init("lecun", KEY, 400, 100)
  assert float(jnp.std(w_HD)) == pytest.approx(0.1, rel=0.03)


def test_identity_of_another_width_is_refused():
  with pytest.raises(ValueError, match="8 x 5"):
    made({"name": "rnn"}, input="identity")


@pytest.mark.parametrize("settings", all_cells("keep"))
def test_the_default_keep_logit_is_one_in_every_layer_once(settings):
  stack = [cells.make(hidden=8, **settings)] * 3
  block, sign = PLACES[settings["name"]]
  for params in layers.init(stack, KEY, 5):
    # At zero input and state the pre-activations are the biases.
    width = params["w_GD"].shape[1]
    u = stack[0].project(params, jnp.zeros((width, 1)))
    u_GB = jnp.concatenate(jax.tree.leaves(u))
    assert_close(u_GB[:, 0], params["b_G"], atol=0)
    expected = np.zeros_like(blocks(params))
    expected[block] = sign
    assert_close(blocks(params), expected, atol=0)
    if "bh_H" in params:
      assert_close(params["bh_H"], jnp.zeros(8), atol=0)


@pytest.mark.parametrize("settings", all_cells("keep"))
@pytest.mark.parametrize(
  "keep",
  [
    {"kind": "constant", "value": -2.0},
    {"kind": "half_life", "steps": 30.0},
    {"kind": "uniform"},
  ],
  ids=lambda keep: keep["kind"],
)
def test_keep_changes_the_named_gate_and_nothing_else(settings, keep):
  plain, changed = made(settings), made(settings, keep=keep)
  block, sign = PLACES[settings["name"]]
  assert np.all(blocks(changed)[block] != blocks(plain)[block])
  rest = [i for i in range(len(blocks(plain))) if i != block]
  assert_close(blocks(changed)[rest], blocks(plain)[rest], atol=0)
  others = plain.keys() - {"b_G"}
  assert_close(
    {key: changed[key] for key in others},
    {key: plain[key] for key in others},
    atol=0,
  )
  drawn = gates.make(**keep).draw
  if keep["kind"] != "uniform":
    expected = sign * np.asarray(drawn(KEY, 8))
    assert_close(blocks(changed)[block], expected, atol=0)


@pytest.mark.parametrize("settings", all_cells("keep"))
def test_keep_reaches_three_layers_of_two_directions_once(settings):
  name, reset = settings["name"], settings.get("reset")
  gates_of = interchange.CELLS[name].GATES
  # In a convention where z keeps, the exported logit of every cell is `keep`.
  convention = interchange.Convention(
    gates_of, "keeps" if "z" in gates_of else None, reset
  )
  block, sign = PLACES[name]

  def six(**more):
    stack = [cells.make(hidden=8, recurrent="identity", **settings, **more)] * 3
    made = wiring.init(stack, KEY, 5, "both")
    return [own for layer in made for own in layer.values()]

  plain = six()
  moved = six(keep={"kind": "constant", "value": -2.5})
  assert len(plain) == 6
  for params, other in zip(plain, moved, strict=True):
    for own, keep in ((params, 1.0), (other, -2.5)):
      expected = np.zeros((len(gates_of), 8))
      expected[block] = keep
      arrays = interchange.to_packed(name, own, convention, reset)
      both = arrays["bias_ih"] + arrays["bias_hh"]
      assert_close(both.reshape(-1, 8), expected, atol=0)
      back = interchange.from_packed(name, arrays, convention, reset)
      assert_close(blocks(back), sign * expected, atol=0)
      assert not np.any(back.get("bh_H", 0))
    # So the one slice is all that a sweep of `keep` moves.
    assert_close(other | {"b_G": params["b_G"]}, params, atol=0)


@pytest.mark.parametrize("settings", all_cells("keep"))
def test_without_biases_keep_is_refused_by_name(settings):
  assert "b_G" not in made(settings, bias=False)
  assert "bh_H" not in made(settings, bias=False)
  keep = {"kind": "constant", "value": 1.0}
  with pytest.raises(ValueError, match="keep.*constant.*bias is False"):
    made(settings, bias=False, keep=keep)


def test_chrono_is_bounded_and_input_opposes_it():
  keep_H = np.asarray(gates.make("chrono", t_max=500).draw(KEY, 20000))
  assert 0 <= keep_H.min() and 6.2 < keep_H.max() <= math.log(499)
  # log U is no U: the median steps are the middle of 1 .. 499.
  assert np.exp(np.median(keep_H)) == pytest.approx(250, rel=0.03)
  keep = {"kind": "chrono", "t_max": 500}
  i, f, q, o = blocks(made({"name": "lstm"}, keep=keep))
  assert_close(i, -f, atol=0)
  assert_close([q, o], [np.zeros(8)] * 2, atol=0)
  assert np.unique(f).size == 8 and np.all(f > 0)
  r, z, c = blocks(made({"name": "gru"}, keep=keep))
  assert np.all(z < 0) and not r.any() and not c.any()


def test_only_chrono_opposes():
  keep = {"kind": "half_life", "steps": 30.0}
  i, f, _, _ = blocks(made({"name": "lstm"}, keep=keep))
  assert not i.any() and f.all()


@pytest.mark.parametrize("steps, f", [(68.968, 0.99), (13.513, 0.95)])
def test_half_life_is_in_steps(steps, f):
  assert math.log(0.5) / math.log(f) == pytest.approx(steps, abs=1e-3)
  keep_H = gates.make("half_life", steps=steps).draw(KEY, 3)
  kept_H = np.asarray(jax.nn.sigmoid(keep_H))
  np.testing.assert_allclose(kept_H, f, atol=3e-6)
  np.testing.assert_allclose(kept_H**steps, 0.5, atol=1e-4)


def test_a_very_long_half_life_is_still_exact(x64):
  keep_H = gates.make("half_life", steps=1e9).draw(KEY, 1)
  lost = float(jax.nn.sigmoid(-keep_H[0]))
  assert lost == pytest.approx(math.log(2) / 1e9, rel=1e-6)


def test_uniform_spreads_the_kept_share():
  keep_H = gates.make("uniform").draw(KEY, 20000)
  assert np.all(np.isfinite(keep_H))
  share = np.quantile(jax.nn.sigmoid(keep_H), [0.1, 0.5, 0.9])
  np.testing.assert_allclose(share, [0.1, 0.5, 0.9], atol=0.02)


@pytest.mark.parametrize(
  "keep, words",
  [
    ({"kind": "bias"}, "kind.*'bias'"),
    ({"kind": "constant"}, "value"),
    ({"kind": "constant", "value": math.nan}, "value.*nan"),
    ({"kind": "half_life", "steps": 0.0}, "steps.*0"),
    ({"kind": "half_life", "steps": math.nan}, "steps.*nan"),
    ({"kind": "chrono", "t_max": 2.0}, "t_max.*2"),
    ({"kind": "uniform", "low": 0.1}, "low.*0.1"),
  ],
)
def test_a_wrong_scheme_is_refused_by_name(keep, words):
  with pytest.raises(ValueError, match=words):
    cells.make("lstm", hidden=3, keep=keep)
