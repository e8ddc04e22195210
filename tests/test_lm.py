"""The language model as a reader: what its logits are and may depend on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import all_cells, assert_close

from rnnlab import cells, metrics, stepping
from rnnlab.models import lm

V, STOP, PAD = 9, 7, 8


def make(cell=None, **settings):
  sizes = {"vocab_size": V, "never": (PAD,), "embed": 4, "hidden": 5}
  return lm.make(**sizes | settings, cell=cell or {"name": "rnn"})


def drawn(model):
  """Parameters with no zeros left, so that nothing is hidden by one."""
  leaves, tree = jax.tree.flatten(model.init(jax.random.key(0)))
  rng = np.random.default_rng(0)
  return tree.unflatten(
    p + jnp.asarray(0.3 * rng.normal(size=p.shape), p.dtype) for p in leaves
  )


def tokens(*shape):
  return np.random.default_rng(1).integers(0, STOP, shape, np.int32)


def size(tree):
  return sum(p.size for p in jax.tree.leaves(tree))


def test_logits_are_distributions_without_the_pad():
  model = make(layers=2)
  carry, logits_BTV = jax.jit(model.apply)(drawn(model), tokens(3, 6))
  assert logits_BTV.shape == (3, 6, V)
  assert [h_BH.shape for h_BH in carry] == [(3, 5), (3, 5)]
  probs_BTV = jax.nn.softmax(logits_BTV)
  np.testing.assert_allclose(probs_BTV.sum(-1), 1, atol=1e-6)
  assert (np.asarray(probs_BTV[..., PAD]) == 0).all()
  assert (np.asarray(probs_BTV[..., :PAD]) > 0).all()


def test_parameter_counts():
  params = make(vocab_size=28, embed=96, hidden=96).init(jax.random.key(0))
  assert size(params) == 23932
  assert size(params) - size(params["embed_VD"]) == 21244


def test_a_tied_readout_is_the_embedding():
  model = make(embed=5, tied=True)
  params = drawn(model)
  assert set(params["out"]) == {"b_V"} and params["embed_VD"].shape == (V, 5)
  (h_BH,), logits_BTV = model.apply(params, tokens(3, 4))
  want_BV = h_BH @ params["embed_VD"].T + params["out"]["b_V"][None]
  assert_close(logits_BTV[:, -1, :PAD], want_BV[:, :PAD], atol=1e-6)


@pytest.mark.parametrize(
  "words, settings",
  [
    ("tied.*model.embed == model.hidden, not 4 and 5", {"tied": True}),
    ("model.embed must be at least 1, not 0", {"embed": 0}),
    ("model.hidden must be at least 1, not -3", {"hidden": -3}),
    ("model.layers must be at least 1, not 0", {"layers": 0}),
    ("model.chunk must be at least 1, not 0", {"chunk": 0}),
    (r"model.dropout must be in \[0, 1\), not 1", {"dropout": 1.0}),
    ("model.dropout.*not -0.1", {"dropout": -0.1}),
    ("model.dropout.*not nan", {"dropout": float("nan")}),
    ("no cell named 'elman'", {"cell": {"name": "elman"}}),
    ("model.cell.kep is no", {"cell": {"name": "gru", "kep": {"kind": "x"}}}),
  ],
)
def test_a_wrong_setting_is_refused_by_name(words, settings):
  with pytest.raises(ValueError, match=words):
    make(**settings)


# A table of 6 rows is projected before the scan, one of 40 is looked up.
@pytest.mark.parametrize("layers, rows", [(1, 6), (3, 40)])
@pytest.mark.parametrize("cell", all_cells())
def test_no_logit_depends_on_a_later_token(cell, layers, rows):
  model = make(cell, vocab_size=rows, never=(), layers=layers, hidden=8)
  params = drawn(model)
  tokens_T = np.arange(6)[::-1]  # each token once, so its row is its position
  mix_V = np.random.default_rng(0).normal(size=rows)

  @jax.jit
  @jax.jacrev
  def mixed_T(embed_VD):
    p = params | {"embed_VD": embed_VD}
    return model.apply(p, tokens_T[None])[1][0] @ mix_V

  d_TTD = mixed_T(params["embed_VD"])[:, tokens_T]
  reaches_TT = np.asarray(jnp.any(d_TTD != 0, axis=-1))
  assert not (reaches_TT & ~np.tri(6, dtype=bool)).any()
  # A relu may be shut at some step, nothing else hides the prefix.
  if cell.get("activation") == "relu":
    assert reaches_TT.any(1).all()
  else:
    assert reaches_TT[np.tri(6, dtype=bool)].all()


def test_one_parameter_set_gathers_the_gradients_of_all_its_uses(x64):
  model = make({"name": "lstm"})
  params, tokens_BT = drawn(model), tokens(2, 5)
  cell = cells.make(hidden=5, name="lstm")

  def untied(params_T):
    carry, nll = cell.carry(params["cells"][0], 2), 0.0
    for t in range(4):
      p = jax.tree.map(lambda leaf, t=t: leaf[t], params_T)
      (own,) = p["cells"]
      u_GB = cell.project(own, p["embed_VD"][tokens_BT[:, t]].T)
      carry, h_HB = stepping.step(cell, own, carry, u_GB)
      logits_BV = h_HB.T @ p["out"]["w_VH"].T + p["out"]["b_V"][None]
      logits_BV = logits_BV.at[:, PAD].set(-jnp.inf)
      nll += metrics.cross_entropy(logits_BV, tokens_BT[:, t + 1]).sum()
    return nll

  def shared(params):
    logits_BTV = model.apply(params, tokens_BT[:, :-1])[1]
    return metrics.cross_entropy(logits_BTV, tokens_BT[:, 1:]).sum()

  copies = jax.tree.map(lambda p: jnp.stack([p] * 4), params)
  nll, grads_T = jax.jit(jax.value_and_grad(untied))(copies)
  sums = jax.tree.map(lambda g: g.sum(0), grads_T)
  assert_close(jax.jit(jax.value_and_grad(shared))(params), (nll, sums))


@pytest.mark.parametrize("cell", all_cells())
def test_padding_changes_nothing(cell):
  model = make(cell)
  params, tokens_BT = drawn(model), tokens(4, 6)
  lengths_B = np.array([5, 3, 0, 1])

  @jax.jit
  @functools.partial(jax.value_and_grad, has_aux=True)
  def run(params, tokens_BT, lengths_B):
    mask_BT = jnp.arange(tokens_BT.shape[1] - 1)[None] < lengths_B[:, None]
    carry, logits_BTV = model.apply(params, tokens_BT[:, :-1], mask_BT=mask_BT)
    losses_BT = metrics.cross_entropy(logits_BTV, tokens_BT[:, 1:])
    return metrics.Mean.of(losses_BT, mask_BT).total, carry

  want = run(params, tokens_BT, lengths_B)
  padding_BT = np.arange(6) > lengths_B[:, None]
  for content in (PAD, 0, STOP):
    other_BT = np.where(padding_BT, np.int32(content), tokens_BT)
    assert_close(run(params, other_BT, lengths_B), want, atol=0)
  longer_BT = np.pad(tokens_BT, ((0, 0), (0, 7)), constant_values=PAD)
  assert_close(run(params, longer_BT, lengths_B), want, atol=1e-5)
  rows = [slice(b, b + 1) for b in range(4)]
  alone = [run(params, tokens_BT[b], lengths_B[b]) for b in rows]
  losses, grads = zip(*alone, strict=True)
  total = jax.tree.map(lambda *g: sum(g), *grads)
  assert_close(total, want[1], atol=1e-5)
  carry = jax.tree.map(lambda *c: jnp.concatenate(c), *(c for _, c in losses))
  assert_close(carry, want[0][1], atol=1e-5)


def test_a_chunked_scan_changes_no_gradient(x64):
  plain, chunked = make(), make(chunk=3)
  params = drawn(plain)

  def grads(model):
    def loss(params):
      return jnp.sum(jnp.sin(model.apply(params, tokens(2, 7))[1][..., :PAD]))

    return jax.make_jaxpr(jax.grad(loss))(params), jax.jit(jax.grad(loss))(
      params
    )

  (graph, want), (chunks, found) = grads(plain), grads(chunked)
  assert_close(found, want)
  assert "remat" in str(chunks) and "remat" not in str(graph)


def copying(hidden, name):
  """A cell whose output is its input, and whose carry is their sum."""
  return cells.Cell(
    init=lambda key, d_in: {},
    carry=lambda params, batch: jnp.zeros((hidden, batch)),
    project=lambda params, x_DN: x_DN,
    drive=(lambda params, carry, u_GB, a, memory: u_GB,),
    update=lambda carry, a, memory: (carry + a[0], a[0]),
  )


def test_dropout_is_on_every_layers_output_and_only_with_a_key(monkeypatch):
  monkeypatch.setattr(cells, "make", copying)
  n = 64
  sizes = {"vocab_size": n, "never": (), "embed": n, "hidden": n}
  model = make({"name": "copying"}, layers=2, dropout=0.5, **sizes)
  params = model.init(jax.random.key(0))
  params["embed_VD"] = jnp.ones((n, n))
  params["out"] = {"w_VH": jnp.eye(n), "b_V": jnp.zeros(n)}
  apply = functools.partial(model.apply, params, tokens(8, 10))
  assert (np.asarray(apply()[1]) == 1).all()
  (first_BH, second_BH), kept_BTV = apply(key=jax.random.key(1))
  kept_BTV = np.asarray(kept_BTV)
  # Two layers keep a quarter, each doubles what it keeps; the embedding, which
  # the first layer adds up over 10 steps, is whole.
  assert set(np.unique(kept_BTV)) == {0, 4}
  assert abs((kept_BTV > 0).mean() - 0.25) < 0.02
  assert (np.asarray(first_BH) == 10).all()
  assert len(np.unique(second_BH)) > 2
  # Independent over rows, steps and keys; the same for the same key.
  again_BTV, other_BTV = (apply(key=jax.random.key(k))[1] for k in (1, 2))
  np.testing.assert_array_equal(again_BTV, kept_BTV)
  pairs = [
    (kept_BTV[0], kept_BTV[1]),
    (kept_BTV[:, 0], kept_BTV[:, 1]),
    (kept_BTV, other_BTV),
  ]
  for one, two in pairs:
    assert 0.3 < (np.asarray(one) != np.asarray(two)).mean() < 0.45


def test_evaluation_and_generation_use_no_dropout():
  results = []
  for rate in (0.0, 0.9, 0.9):
    model = make(dropout=rate)
    params = drawn(model)
    cursor, logprob_B = model.read(params, tokens(3, 4), np.full(3, 4))
    texts = model.generate(
      params, jax.random.key(0), cursor, limit=4, stop=STOP, pad=PAD
    )
    results.append((model.apply(params, tokens(3, 4)), logprob_B, texts))
  assert_close(results[1], results[0], atol=0)
  assert_close(results[2], results[0], atol=0)
