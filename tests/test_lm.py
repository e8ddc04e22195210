"""The language model: what it reads, what it may see, and how it writes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import all_cells, assert_close

from rnnlab import cells, metrics, sampling, scan
from rnnlab.models import lm

V, STOP, PAD = 9, 7, 8
TANH = {"name": "rnn"}


def make(cell=TANH, **settings):
  sizes = {"vocab_size": V, "never": (PAD,), "embed": 4, "hidden": 5}
  return lm.make(**sizes | settings, cell=cell)


def drawn(model, seed=0):
  """Parameters with no zeros left, so that nothing is hidden by one."""
  leaves, tree = jax.tree.flatten(model.init(jax.random.key(seed)))
  rng = np.random.default_rng(seed)
  return tree.unflatten(p + 0.3 * rng.normal(size=p.shape) for p in leaves)


def tokens(*shape, seed=1):
  return np.random.default_rng(seed).integers(0, STOP, shape, np.int32)


def size(tree):
  return sum(p.size for p in jax.tree.leaves(tree))


# Reading


def test_logits_are_distributions_without_the_pad():
  model = make(layers=2)
  carry, logits_BTV = model.apply(drawn(model), tokens(3, 6))
  assert logits_BTV.shape == (3, 6, V)
  assert [h_BH.shape for h_BH in carry] == [(3, 5), (3, 5)]
  probs_BTV = jax.nn.softmax(logits_BTV)
  np.testing.assert_allclose(probs_BTV.sum(-1), 1, atol=1e-6)
  assert (np.asarray(probs_BTV[..., PAD]) == 0).all()
  assert (np.asarray(probs_BTV[..., :PAD]) > 0).all()


def test_parameter_counts_and_a_tied_table():
  wide = functools.partial(make, vocab_size=28, embed=96, hidden=96)
  whole = wide().init(jax.random.key(0))
  assert size(whole) == 23932
  assert size(whole) - size(whole["embed_VD"]) == 21244
  model = wide(tied=True)
  params = model.init(jax.random.key(0))
  assert size(params) == 21244 and set(params["out"]) == {"b_V"}
  # One table on both sides: doubling it doubles the logits of a given state.
  carry, logits = model.apply(params, tokens(1, 4))
  h_1TH = np.linalg.lstsq(params["embed_VD"], logits[0, -1])[0]
  np.testing.assert_allclose(h_1TH, carry[0][0], atol=1e-4)


@pytest.mark.parametrize(
  "field, settings",
  [
    ("tied.*model.embed == model.hidden, not 4 and 5", {"tied": True}),
    ("model.embed must be at least 1, not 0", {"embed": 0}),
    ("model.hidden must be at least 1, not -3", {"hidden": -3}),
    ("model.layers must be at least 1, not 0", {"layers": 0}),
    (r"model.dropout must be in \[0, 1\), not 1", {"dropout": 1.0}),
    ("dropout.*not -0.1", {"dropout": -0.1}),
    ("dropout.*not nan", {"dropout": float("nan")}),
    ("no cell named 'elman'", {"cell": {"name": "elman"}}),
    ("model.cell.kep is no setting", {"cell": {"name": "gru", "kep": {}}}),
  ],
)
def test_a_wrong_setting_is_refused_by_name(field, settings):
  with pytest.raises(ValueError, match=field):
    make(**settings)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("rows", [6, 40])  # a projected table, and a gather
@pytest.mark.parametrize("cell", all_cells())
def test_no_logit_depends_on_a_later_token(cell, rows, layers):
  model = make(cell, vocab_size=rows, never=(), layers=layers)
  params = drawn(model)
  tokens_T = np.arange(6)[::-1]  # each token once: its row is its position
  mix_V = np.random.default_rng(0).normal(size=rows)

  def mixed_T(embed_VD):
    p = params | {"embed_VD": embed_VD}
    return model.apply(p, tokens_T[None])[1][0] @ mix_V

  d_TTD = jax.jacrev(mixed_T)(params["embed_VD"])[:, tokens_T]
  reaches_TT = np.asarray(jnp.any(d_TTD != 0, axis=-1))
  np.testing.assert_array_equal(reaches_TT, np.tri(6, dtype=bool))


@pytest.mark.parametrize("cell", all_cells())
def test_one_parameter_set_gathers_the_gradients_of_all_its_uses(cell, x64):
  model = make(cell, layers=1)
  params = drawn(model)
  built = cells.make(hidden=5, **cell)
  tokens_BT = tokens(2, 5)

  def untied(params_T):
    carry, nll = built.carry(params["cells"][0], 2), 0.0
    for t in range(4):
      p = jax.tree.map(lambda leaf, t=t: leaf[t], params_T)
      (own,) = p["cells"]
      u_GB = built.project(own, p["embed_VD"][tokens_BT[:, t]].T)
      carry, h_HB = scan.step(built, own, carry, u_GB)
      logits_BV = h_HB.T @ p["out"]["w_VH"].T + p["out"]["b_V"][None]
      logits_BV = logits_BV.at[:, PAD].set(-jnp.inf)
      nll += metrics.cross_entropy(logits_BV, tokens_BT[:, t + 1]).sum()
    return nll

  def shared(params):
    logits_BTV = model.apply(params, tokens_BT[:, :-1])[1]
    return metrics.cross_entropy(logits_BTV, tokens_BT[:, 1:]).sum()

  copies = jax.tree.map(lambda p: jnp.stack([p] * 4), params)
  nll, grads_T = jax.value_and_grad(untied)(copies)
  sums = jax.tree.map(lambda g: g.sum(0), grads_T)
  assert_close(jax.value_and_grad(shared)(params), (nll, sums))


@pytest.mark.parametrize("cell", all_cells())
def test_padding_changes_nothing(cell):
  model = make(cell, layers=2)
  params = drawn(model)
  lengths_B = np.array([5, 3, 0, 1])
  tokens_BT = tokens(4, 6)

  def nll(params, tokens_BT):
    mask_BT = np.arange(tokens_BT.shape[1] - 1) < lengths_B[:, None]
    carry, logits_BTV = model.apply(params, tokens_BT[:, :-1], mask_BT=mask_BT)
    losses_BT = metrics.cross_entropy(logits_BTV, tokens_BT[:, 1:])
    return metrics.Mean.of(losses_BT, mask_BT).total, carry

  grad = jax.value_and_grad(nll, has_aux=True)
  want = grad(params, tokens_BT)
  # Position 0 is read and position t is the target of t - 1.
  padding_BT = np.arange(6) > lengths_B[:, None]
  for content in (PAD, 0, STOP):
    other_BT = np.where(padding_BT, np.int32(content), tokens_BT)
    assert_close(grad(params, other_BT), want, atol=0)
  longer_BT = np.pad(tokens_BT, ((0, 0), (0, 7)), constant_values=PAD)
  assert_close(grad(params, longer_BT), want, atol=1e-5)
  for b, length in enumerate(lengths_B):
    own, _ = model.apply(params, tokens_BT[b : b + 1, :length])
    company = jax.tree.map(lambda c, b=b: c[b : b + 1], want[0][1])
    assert_close(own, company, atol=1e-6)


def copying(hidden):
  """A cell whose output is its input, and whose carry is their sum."""
  return cells.Cell(
    init=lambda key, d_in: {},
    carry=lambda params, batch: jnp.zeros((hidden, batch)),
    project=lambda params, x_DN: x_DN,
    drive=(lambda params, carry, u_GB, a, memory: u_GB,),
    update=lambda carry, a, memory: (carry + a[0], a[0]),
  )


def test_dropout_is_on_every_layers_output_and_only_with_a_key(monkeypatch):
  monkeypatch.setattr(cells, "make", lambda hidden, name: copying(hidden))
  n = 64
  sizes = {"vocab_size": n, "never": (), "embed": n, "hidden": n}
  model = make({"name": "copying"}, layers=2, dropout=0.5, **sizes)
  params = model.init(jax.random.key(0))
  params["embed_VD"] = jnp.ones((n, n))
  params["out"] = {"w_VH": jnp.eye(n), "b_V": jnp.zeros(n)}
  apply = functools.partial(model.apply, params, tokens(8, 10))
  assert (np.asarray(apply()[1]) == 1).all()
  (first, second), kept_BTV = apply(key=jax.random.key(1))
  kept_BTV = np.asarray(kept_BTV)
  # Two layers keep a quarter, each scaling what it keeps by 2.
  assert set(np.unique(kept_BTV)) == {0, 4}
  assert abs((kept_BTV > 0).mean() - 0.25) < 0.02
  assert (np.asarray(first) == 10).all() and len(np.unique(second)) > 2
  # Independent over rows, time steps and keys; the same for the same key.
  assert 0.3 < (kept_BTV[0] != kept_BTV[1]).mean() < 0.45
  assert 0.3 < (kept_BTV[:, 0] != kept_BTV[:, 1]).mean() < 0.45
  again, other = (apply(key=jax.random.key(k))[1] for k in (1, 2))
  np.testing.assert_array_equal(again, kept_BTV)
  assert 0.3 < (np.asarray(other) != kept_BTV).mean() < 0.45


def test_reading_and_writing_use_no_dropout():
  texts = []
  for rate in (0.0, 0.9):
    model = make(dropout=rate)
    texts.append(write(model, drawn(model), tokens(3, 4), limit=6))
  assert_close(texts[0], texts[1], atol=0)


# Writing


def write(model, params, tokens_BT, length_B=None, seed=0, **how):
  if length_B is None:
    length_B = np.full(len(tokens_BT), tokens_BT.shape[1])
  cursor, read_B = model.read(params, tokens_BT, length_B)
  how = {"stop": STOP, "pad": PAD} | how
  return read_B, model.generate(params, jax.random.key(seed), cursor, **how)


@pytest.mark.parametrize("cell", all_cells())
def test_writing_is_recomputing_all_of_the_text_for_each_token(cell):
  model = make(cell, layers=2)
  params, how = drawn(model), {"temperature": 0.8, "top_p": 0.9}
  prompts_BT, length_B = tokens(4, 6), np.array([1, 3, 6, 2])
  read_B, texts = write(model, params, prompts_BT, length_B, limit=8, **how)
  uniform = functools.partial(sampling.uniforms, jax.random.key(0))
  for b, length in enumerate(length_B):
    text, at = list(prompts_BT[b, :length]), length - 1
    for t in range(8):
      logits_1V = model.apply(params, np.array([text]))[1][:, -1]
      probs_1V = sampling.probabilities(logits_1V, **how)
      text.append(int(sampling.pick(probs_1V, uniform(np.array([b]), t))[0]))
      if text[-1] == STOP:
        break
    new = text[length:]
    assert texts.tokens_BU[b].tolist() == new + [PAD] * (8 - len(new))
    assert texts.length_B[b] == len(new) - (STOP in new)
    assert texts.cursor.end_B[b] == (STOP in new)
    # What is reported is the model's own log-probability, prompt included.
    forced_BT = np.array([text])
    logits_BTV = model.apply(params, forced_BT[:, :-1])[1]
    nll_BT = metrics.cross_entropy(logits_BTV, forced_BT[:, 1:])
    np.testing.assert_allclose(
      [read_B[b], texts.logprob_B[b]],
      [-nll_BT[0, :at].sum(), -nll_BT[0, at:].sum()],
      atol=1e-5,
    )


def counter(calls, memory=16):
  """A cell of one unit: h adds up what it reads. It remembers its inputs, and
  `calls` gets an entry whenever a step of it is computed."""

  def update(carry, a, _):
    h_1B, seen_UB, n_B = carry
    jax.debug.callback(lambda: calls.append(1))
    at_UB = jnp.arange(memory)[:, None] == n_B[None]
    seen_UB = jnp.where(at_UB, a[0], seen_UB)
    return (h_1B + a[0], seen_UB, n_B + 1), h_1B + a[0]

  return cells.Cell(
    init=lambda key, d_in: {},
    carry=lambda params, batch: (
      jnp.zeros((1, batch)),
      jnp.full((memory, batch), -1.0),
      jnp.zeros(batch, jnp.int32),
    ),
    project=lambda params, x_DN: x_DN,
    drive=(lambda params, carry, u_GB, a, memory: u_GB,),
    update=update,
  )


def counting(monkeypatch, values_V, w_V, b_V):
  """(model, params, calls): reading v adds values_V[v], logits w h + b."""
  calls = []
  monkeypatch.setattr(cells, "make", lambda hidden, name: counter(calls))
  model = make({"name": "counter"}, embed=1, hidden=1)
  column = lambda x: jnp.asarray(x, jnp.float32)[:, None]
  out = {"w_VH": column(w_V), "b_V": jnp.asarray(b_V, jnp.float32)}
  return model, {"embed_VD": column(values_V), "cells": ({},), "out": out}, calls


def test_a_prompt_is_read_once_and_then_one_token_a_step(monkeypatch):
  ids_V = np.arange(V)
  model, params, calls = counting(monkeypatch, ids_V, ids_V * 0, ids_V % 7)
  prompt_BT = np.array([[STOP, 1, 2, 3, 3, 5]])
  _, texts = write(model, params, prompt_BT, limit=3, top_k=3)
  drawn_U = texts.tokens_BU[0].tolist()
  assert STOP not in drawn_U
  ((_, seen_UB, n_B),) = texts.cursor.carry
  read = [STOP, 1, 2, 3, 3, 5, *drawn_U[:2]]
  assert seen_UB[:, 0].tolist() == read + [-1] * 8 and n_B[0] == 8
  assert texts.cursor.token_B[0] == drawn_U[2]
  jax.effects_barrier()
  assert len(calls) == 8


def test_rows_stop_alone_and_the_loop_ends_with_the_last(monkeypatch):
  # Token 0 takes 1 from the state, and the stop wins once the state is 0.
  values_V = np.array([-1, 0, 3, 99, 0, 0, 0, 0, 0])
  w_V, b_V = np.zeros(V), np.full(V, -1e3)
  w_V[0], b_V[0], b_V[STOP] = 1, -0.5, 0
  model, params, calls = counting(monkeypatch, values_V, w_V, b_V)
  first_B1 = np.array([[1], [2], [3]])

  def text(first_B1, limit=6):
    calls.clear()
    how = {"limit": limit, "temperature": 0.0}
    texts = write(model, params, first_B1, **how)[1]
    jax.effects_barrier()
    return texts

  texts = text(first_B1)
  assert texts.tokens_BU.tolist() == [
    [STOP] + [PAD] * 5,
    [0, 0, 0, STOP, PAD, PAD],
    [0] * 6,
  ]
  assert texts.length_B.tolist() == [0, 3, 6]
  ends = [lm.STOPPED, lm.STOPPED, lm.RUNNING]
  assert texts.cursor.end_B.tolist() == ends
  assert len(calls) == 6
  for b in range(3):
    alone = text(first_B1[b : b + 1])._replace(cursor=None)
    company = jax.tree.map(lambda a, b=b: a[b : b + 1], texts._replace(cursor=None))
    assert_close(alone, company, atol=0)
  text(first_B1[:2], limit=1000)
  assert len(calls) == 4


def uniform_writer():
  """Every one of 50 symbols is as likely as any other; it never stops."""
  model = make(vocab_size=52, never=(50, 51))
  params = model.init(jax.random.key(0))
  params["out"] = jax.tree.map(jnp.zeros_like, params["out"])
  return lambda first_B1, **how: write(
    model, params, first_B1, stop=50, pad=51, **how
  )[1]


def test_rows_draw_independently_and_steps_too():
  go = uniform_writer()
  first_B1 = np.zeros((4, 1), np.int32)
  texts_BU = np.asarray(go(first_B1, limit=200).tokens_BU)
  assert len({tuple(row) for row in texts_BU}) == 4
  repeats_B = (texts_BU[:, 1:] == texts_BU[:, :-1]).sum(1)
  assert (repeats_B <= 10).all() and repeats_B.sum() > 0
  counts_V = np.bincount(texts_BU.ravel(), minlength=50)
  assert len(counts_V) == 50
  chi2 = ((counts_V - 16) ** 2 / 16).sum()
  assert chi2 < 94.4  # its 1 - 1e-4 quantile at 49 degrees of freedom
  again, other = (go(first_B1, limit=200, seed=s).tokens_BU for s in (0, 1))
  np.testing.assert_array_equal(again, texts_BU)
  assert (np.asarray(other) != texts_BU).mean() > 0.9
  alone = go(first_B1[:1], limit=200).tokens_BU
  np.testing.assert_array_equal(alone, texts_BU[:1])


@pytest.mark.parametrize("cell", [{"name": "gru"}, {"name": "lstm"}])
def test_going_on_from_the_cursor_is_not_having_stopped(cell):
  model = make(cell, layers=2)
  params, key = drawn(model, seed=3), jax.random.key(5)
  cursor, _ = model.read(params, tokens(8, 3), np.array([1, 2, 3, 3] * 2))
  go = functools.partial(
    model.generate, params, key, stop=STOP, pad=PAD, temperature=0.9
  )
  whole, first = go(cursor, limit=20), go(cursor, limit=10)
  second = go(first.cursor, limit=10)
  assert len(set(first.cursor.end_B.tolist())) == 2  # some rows go on
  both = lm.Generated(
    np.concatenate([first.tokens_BU, second.tokens_BU], 1),
    first.length_B + second.length_B,
    first.logprob_B + second.logprob_B,
    whole.cursor._replace(carry=second.cursor.carry),
  )
  assert_close(both, whole, atol=1e-5)
  assert second.cursor.end_B.tolist() == whole.cursor.end_B.tolist()


def test_the_likeliest_token_whatever_the_key():
  model = make(layers=2)
  params, first_BT = drawn(model), tokens(4, 2)
  greedy = [
    write(model, params, first_BT, limit=6, seed=seed, **how)[1].tokens_BU
    for seed in (0, 1)
    for how in ({"top_k": 1}, {"temperature": 0.0})
  ]
  for other in greedy[1:]:
    np.testing.assert_array_equal(other, greedy[0])


def test_a_row_without_a_distribution_fails_and_gets_no_token():
  model = make(TANH)
  params = drawn(model)
  # The second row reads a broken embedding after the first draw.
  params["embed_VD"] = params["embed_VD"].at[3].set(jnp.nan)
  first_B1 = np.array([[1], [3]])
  texts = write(model, params, first_B1, limit=5, top_k=3)[1]
  assert texts.cursor.end_B[1] == lm.FAILED
  assert texts.tokens_BU[1].tolist() == [PAD] * 5
  assert texts.length_B[1] == 0 and texts.logprob_B[1] == 0
  assert texts.tokens_BU[0, 0] != PAD
  alone = write(model, params, first_B1[:1], limit=5, top_k=3)[1]
  assert_close(alone.tokens_BU, texts.tokens_BU[:1], atol=0)


def test_the_memory_of_writing_is_flat_in_the_length():
  model, B = make({"name": "lstm"}, hidden=64, layers=2), 4
  params = model.init(jax.random.key(0))
  cursor, _ = model.read(params, tokens(B, 3), np.full(B, 3))

  def temporary(limit):
    go = functools.partial(model.generate, limit=limit, stop=STOP, pad=PAD)
    compiled = jax.jit(go).lower(params, jax.random.key(0), cursor).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  transcript = 4 * B * (4096 - 64)  # B x limit int32
  assert temporary(4096) - temporary(64) <= 1.1 * transcript
