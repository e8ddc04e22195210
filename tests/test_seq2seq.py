"""The encoder-decoder: its equations, and how each wiring differs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import all_cells, assert_close
from wirings import (
  ATTENTIVE,
  BAHDANAU,
  DEEP,
  FIXED,
  LECTURE,
  LUONG,
  MAIN,
  WIRINGS,
  H,
  V,
  drawn,
  make,
  reference,
  run,
  tokens,
)

from rnnlab import cells, scan
from rnnlab.models.context_cells import visible

SOURCE_BS, TARGET_BU = tokens(2, 5), tokens(2, 3, seed=2)


def size(tree):
  return sum(p.size for p in jax.tree.leaves(tree))


def norm(tree):
  return sum(float(jnp.abs(p).sum()) for p in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", WIRINGS)
def test_the_equations(name, x64):
  """Every wiring with tanh cells, against loops over single vectors."""
  model = make(**WIRINGS[name], cell={"name": "rnn"})
  params = drawn(model)
  _, _, logits_BUV, attended = run(model, params, SOURCE_BS, TARGET_BU)
  for b in range(2):
    logits_UV, weights_US = reference(
      params, SOURCE_BS[b], TARGET_BU[b], WIRINGS[name]
    )
    np.testing.assert_allclose(logits_BUV[b], logits_UV, atol=1e-12)
    if attended is not None:
      np.testing.assert_allclose(
        attended.weights_BUS[b], weights_US, atol=1e-12
      )
  assert (attended is None) == (name in FIXED)


def cases():
  """Wirings with whatever a model may be made of."""
  for name in WIRINGS:
    yield pytest.param(WIRINGS[name], id=name)
  for name in MAIN:
    yield pytest.param(MAIN[name] | DEEP, id=f"{name}-deep")
  for name in ("fixed-all", "bahdanau", "luong"):
    for cell in all_cells():
      yield pytest.param(
        MAIN[name] | {"cell": cell.values[0]}, id=f"{name}-{cell.id}"
      )
  yield pytest.param(LECTURE | {"direction": "backward"}, id="lecture-backward")
  yield pytest.param(
    {"attention": {"score": "dot"}, "decoder_hidden": 2 * H}
    | {"direction": "both"},
    id="dot-widths-that-fit",
  )


@pytest.mark.parametrize("settings", list(cases()))
def test_all_at_once_is_one_step_at_a_time(settings, x64):
  model = make(**settings)

  @jax.jit
  def both(params):
    encoded = model.encode(params, SOURCE_BS)
    all_at_once = model.decode(params, encoded, encoded.carry, TARGET_BU)
    carry, steps = encoded.carry, []
    for u in range(TARGET_BU.shape[1]):
      now_BU = TARGET_BU[:, u : u + 1]
      carry, *out = model.decode(params, encoded, carry, now_BU)
      steps.append(out)
    joined = jax.tree.map(lambda *o: jnp.concatenate(o, axis=1), *steps)
    return all_at_once, (carry, *joined)

  all_at_once, steps = both(drawn(model))
  assert_close(steps, all_at_once)
  assert all_at_once[1].shape == (2, 3, V)
  if all_at_once[2] is not None:
    assert all_at_once[2].weights_BUS.shape == (2, 3, 5)


def test_the_lecture_by_its_parameters():
  model = make(**LECTURE, vocab_size=28, embed=32, hidden=32)
  params = jax.eval_shape(model.init, jax.random.key(0))
  assert size(params) == 16316
  assert size(params["query"]) == 32 * 32 + 32
  assert params["score"] == {}
  assert params["out"]["w_VH"].shape == (28, 64)
  assert not {"w_GC", "w_GF", "mix", "bridge"} & set(params)


def test_the_lecture_starts_the_decoder_from_the_last_encoder_state():
  model = make(**LECTURE)
  encoded = jax.jit(model.encode)(drawn(model), SOURCE_BS)
  (start_BH,) = encoded.carry
  np.testing.assert_array_equal(start_BH, encoded.source.values_BSD[:, -1])
  np.testing.assert_array_equal(start_BH, encoded.context_BC)


# Which parts of what was encoded can move the decoder's states and its logits.
@pytest.mark.parametrize(
  "name, states, logits",
  [
    ("fixed-init", {"carry"}, {"carry"}),
    ("fixed-update", {"context"}, {"context"}),
    ("fixed-output", set(), {"context"}),
    ("fixed-all", {"carry", "context"}, {"carry", "context"}),
    ("lecture", {"carry"}, {"carry", "source"}),
    ("previous-to-output", {"carry"}, {"carry", "source"}),
    ("bahdanau", {"carry", "source"}, {"carry", "source"}),
    ("update-alone", {"source"}, {"source"}),
    ("luong", {"carry", "source"}, {"carry", "source"}),
    ("feed-alone", {"source"}, {"source"}),
  ],
)
def test_where_the_context_enters(name, states, logits):
  """And through it, the gradient comes back to the encoder."""
  model = make(**WIRINGS[name])
  params = drawn(model)

  def outcome(encoded):
    carry, logits_BUV, _ = model.decode(
      params, encoded, encoded.carry, TARGET_BU
    )
    h = jnp.sin(visible(carry)).sum()
    return {"h": h, "logits": jnp.sin(logits_BUV).sum()}

  @jax.jit
  def grads(encoder):
    encoded, pull = jax.vjp(
      lambda own: model.encode(params | {"encoder": own}, SOURCE_BS), encoder
    )
    parts = jax.jacrev(outcome)(encoded)
    return visible(encoded.carry), parts, pull(parts["logits"])[0]

  start_BH, parts, dencoder = grads(params["encoder"])
  for of, reached in (("h", states), ("logits", logits)):
    own = {
      # A start of zeros is not of the source.
      "carry": start_BH * visible(parts[of].carry),
      "context": parts[of].context_BC,
      "source": parts[of].source,
    }
    assert {part for part, d in own.items() if norm(d) > 0} == reached
  for own in dencoder[0].values():
    assert all(norm(d) > 1e-3 for d in own.values())


def test_the_decoder_starts_from_zeros_unless_the_context_does():
  model = make(**FIXED["fixed-output"], cell={"name": "lstm"}, layers=2)
  encoded = jax.jit(model.encode)(drawn(model), SOURCE_BS)
  assert_close(
    encoded.carry, jax.tree.map(jnp.zeros_like, encoded.carry), atol=0
  )


# A token's embedding moves the weights of its own position only where the
# state that has read it asks.
@pytest.mark.parametrize("name", ATTENTIVE)
def test_which_state_asks(name):
  model = make(**ATTENTIVE[name])
  params = drawn(model)
  source_BS, target_BU = np.array([[0, 1, 2, 3]]), np.array([[4, 5, 6]])

  def weights(embed_VD):
    encoded = model.encode(params, source_BS)
    _, _, attended = model.decode(
      params | {"embed_VD": embed_VD}, encoded, encoded.carry, target_BU
    )
    return attended.weights_BUS[0]

  jac_USVD = jax.jit(jax.jacrev(weights))(params["embed_VD"])
  moved_UU = np.abs(jac_USVD).max((1, 3))[:, 4:7]
  current = ATTENTIVE[name]["attention"].get("query") != "previous"
  reads = np.tri(3, k=0 if current else -1, dtype=bool)
  assert (moved_UU[reads] > 1e-5).all()
  assert (moved_UU[~reads] == 0).all()


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_equal_widths_need_no_bridge(direction):
  """Each layer's final carry is the carry of the same layer, part by part."""
  wide = 2 * H if direction == "both" else H
  model = make(
    cell={"name": "lstm"}, layers=2, direction=direction, decoder_hidden=wide
  )
  params = drawn(model)
  assert "bridge" not in params
  encoded = jax.jit(model.encode)(params, SOURCE_BS)
  cell, x_BSD = cells.make("lstm", hidden=H), params["embed_VD"][SOURCE_BS]
  names = [n for n in ("forward", "backward") if n in params["encoder"][0]]
  assert direction in (*names, "both") and len(names) == wide // H
  for layer in range(2):
    own = params["encoder"][layer]
    runs = [
      scan.unroll(cell, own[n], x_BSD, reverse=n == "backward") for n in names
    ]
    ends, outs = zip(*runs, strict=True)
    x_BSD = jnp.concatenate(outs, axis=-1)
    h_BC, c_BC = (jnp.concatenate(e, -1) for e in zip(*ends, strict=True))
    assert abs(h_BC - c_BC).max() > 0.05
    assert_close(encoded.carry[layer], (h_BC, c_BC), atol=1e-6)
  assert_close(encoded.context_BC, h_BC, atol=1e-6)


def test_an_lstm_bridge_maps_h_and_c_apart():
  settings = {"cell": {"name": "lstm"}, "direction": "both", "layers": 2}
  same = make(**settings, decoder_hidden=2 * H)
  model = make(**settings, decoder_hidden=3)
  params = drawn(model)
  read = {name: params[name] for name in ("embed_VD", "encoder")}
  ends = jax.jit(same.encode)(drawn(same) | read, SOURCE_BS).carry
  carry = jax.jit(model.encode)(params, SOURCE_BS).carry
  expected = tuple(
    tuple(
      end @ own["w_VH"].T + own["b_V"][None]
      for end, own in zip(ends[layer], params["bridge"][layer], strict=True)
    )
    for layer in range(2)
  )
  assert [part.shape for part in jax.tree.leaves(carry)] == [(2, 3)] * 4
  assert_close(carry, expected, atol=1e-6)


def test_dropout_needs_a_key_and_spares_the_state():
  model, sure = (make(**LECTURE, layers=2, dropout=p) for p in (0.5, 0.0))
  params = drawn(model)
  assert_close(
    run(model, params, SOURCE_BS, TARGET_BU),
    run(sure, params, SOURCE_BS, TARGET_BU),
    atol=0,
  )
  encode, decode = jax.jit(model.encode), jax.jit(model.decode)
  a, b, again = (
    encode(params, SOURCE_BS, key=jax.random.key(k)).source.values_BSD
    for k in (0, 1, 0)
  )
  np.testing.assert_array_equal(a, again)
  assert ((a == 0) != (b == 0)).any()
  assert 0.2 < (a == 0).mean() < 0.8
  encoded = encode(params, SOURCE_BS)
  one, other = (
    decode(params, encoded, encoded.carry, TARGET_BU, key=key)
    for key in jax.random.split(jax.random.key(2))
  )
  assert abs(one[1] - other[1]).max() > 1e-3
  assert_close(one[0], other[0], atol=0)  # never on the state


@pytest.mark.parametrize(
  "settings, message",
  [
    (LECTURE | {"context": {"output": False}}, "attention.*goes nowhere"),
    ({"context": {"init": False, "output": False}}, "would not see the source"),
    (LECTURE | {"context": {"update": True}}, "query='previous'"),
    ({"context": {"feed": True}}, "context.feed needs attention"),
    (BAHDANAU | {"context": {"feed": True}}, "context.feed needs attention"),
    (LUONG | {"context": {"feed": True, "output": False}}, "context.output"),
    (LUONG | {"context": {"feed": True, "update": True}}, "not both"),
    ({"attention": {"project": True}}, "settings without a score"),
    ({"attention": {"query": "previous"}}, "settings without a score"),
    ({"attention": {"query": "next"}}, "attention.query is.*'next'"),
    ({"attention": {"score": "cosine"}}, "attention.score is.*'cosine'"),
    ({"attention": {"scores": "dot"}}, "model.attention.scores"),
    ({"context": {"outputs": True}}, "model.context.outputs"),
    ({"direction": "sideways"}, "model.direction is.*'sideways'"),
    ({"layers": 0}, "model.layers must be at least 1, not 0"),
    ({"decoder_hidden": 0}, "model.decoder_hidden must be at least 1, not 0"),
    ({"dropout": 1.0}, r"model.dropout must be in \[0, 1\), not 1.0"),
  ],
)
def test_what_means_nothing_is_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    make(**settings)


def test_a_dot_product_of_two_widths_is_refused():
  model = make(attention={"score": "dot"}, decoder_hidden=3)
  with pytest.raises(ValueError, match="one width, not 3 and 4"):
    jax.eval_shape(model.init, jax.random.key(0))
