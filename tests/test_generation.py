"""The language model as a writer: what is read, drawn, kept and reported."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import all_cells, assert_close

from rnnlab import cells, metrics, sampling
from rnnlab.models import lm

V, STOP, PAD = 9, 7, 8


def make(cell, **settings):
  sizes = {"vocab_size": V, "never": (PAD,), "embed": 4, "hidden": 5}
  return lm.make(**sizes | settings, cell=cell)


def drawn(model):
  """Parameters with no zeros left, so that nothing is hidden by one."""
  leaves, tree = jax.tree.flatten(model.init(jax.random.key(0)))
  rng = np.random.default_rng(0)
  return tree.unflatten(
    p + jnp.asarray(0.3 * rng.normal(size=p.shape), p.dtype) for p in leaves
  )


def tokens(*shape):
  return np.random.default_rng(1).integers(0, STOP, shape, np.int32)


def writer(model, stop=STOP, pad=PAD, **how):
  """(params, tokens_BT, length_B, seed) -> logprob_B of them, Generated."""

  @jax.jit
  def write(params, tokens_BT, length_B=None, seed=0):
    if length_B is None:
      length_B = jnp.full(len(tokens_BT), tokens_BT.shape[1])
    cursor, read_B = model.read(params, tokens_BT, length_B)
    key = jax.random.key(seed)
    return read_B, model.generate(
      params, key, cursor, stop=stop, pad=pad, **how
    )

  return write


@pytest.mark.parametrize("cell", all_cells())
def test_a_token_is_drawn_as_if_all_before_it_were_read_again(cell):
  model = make(cell, layers=2)
  params, how = drawn(model), {"temperature": 0.8, "top_p": 0.9}
  prompts_BT, start_B = tokens(4, 6), np.array([1, 3, 6, 2])
  write = writer(model, limit=8, **how)
  read_B, texts = write(params, prompts_BT, start_B)

  @jax.jit
  def again(tokens_BT, length_B, t):
    mask_BT = jnp.arange(tokens_BT.shape[1])[None] < length_B[:, None]
    logits_BTV = model.apply(params, tokens_BT, mask_BT=mask_BT)[1]
    logits_BV = logits_BTV[rows_B, length_B - 1]
    keys_B = sampling.row_keys(jax.random.key(0), rows_B)
    uniform_B = sampling.uniforms(keys_B, t)
    drawn_B = sampling.pick(sampling.probabilities(logits_BV, **how), uniform_B)
    return drawn_B, metrics.cross_entropy(logits_BTV[:, :-1], tokens_BT[:, 1:])

  rows_B, length_B = np.arange(4), start_B.copy()
  text_BT = np.zeros((4, 14), np.int32)
  text_BT[:, :6] = prompts_BT
  going_B = np.full(4, True)
  for t in range(8):
    token_B, _ = again(text_BT, length_B, t)
    text_BT[rows_B[going_B], length_B[going_B]] = token_B[going_B]
    length_B += going_B
    going_B &= np.asarray(token_B) != STOP
  stopped_B = ~going_B
  for b in range(4):
    new = text_BT[b, start_B[b] : length_B[b]].tolist()
    assert texts.tokens_BU[b].tolist() == new + [PAD] * (8 - len(new))
  assert texts.length_B.tolist() == (length_B - start_B - stopped_B).tolist()
  assert texts.cursor.end_B.tolist() == stopped_B.tolist()
  # What is reported is the model's own log-probability, prompt included.
  _, nll_BT = again(text_BT, length_B, 0)
  at_BT = np.arange(1, 14)
  read_BT = at_BT < start_B[:, None]
  text_BT = (at_BT < length_B[:, None]) & ~read_BT
  assert_close(-(nll_BT * read_BT).sum(1), read_B, atol=1e-5)
  assert_close(-(nll_BT * text_BT).sum(1), texts.logprob_B, atol=1e-5)


def counter(calls, memory=16):
  """A cell of one unit that adds up what it reads, and remembers it all.

  `calls` gets an entry whenever a step of it is computed.
  """

  def update(carry, a, _):
    h_1B, seen_UB, n_B = carry
    jax.debug.callback(lambda: calls.append(1))
    at_UB = jnp.arange(memory)[:, None] == n_B[None]
    seen_UB = jnp.where(at_UB, jnp.broadcast_to(a[0], at_UB.shape), seen_UB)
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
  """(model, params, calls): reading v adds values_V[v]; logits are w h + b."""
  calls = []
  monkeypatch.setattr(cells, "make", lambda hidden, name: counter(calls))
  model = make({"name": "counter"}, embed=1, hidden=1)
  values_V, w_V, b_V = (np.float32(x) for x in (values_V, w_V, b_V))
  out = {"w_VH": w_V[:, None], "b_V": b_V}
  params = {"embed_VD": values_V[:, None], "cells": ({},), "out": out}
  return model, params, calls


def test_a_prompt_is_read_once_and_then_one_token_a_step(monkeypatch):
  ids_V = np.arange(V)
  b_V = np.where(ids_V == STOP, -1e3, 0)
  model, params, calls = counting(monkeypatch, ids_V, np.zeros(V), b_V)
  prompt = [STOP, 1, 2, 3, 3, 5]
  _, texts = writer(model, limit=3)(params, np.array([prompt]), None, 9)
  jax.effects_barrier()
  new = texts.tokens_BU[0].tolist()
  assert len({5, *new}) == 4  # so that none can pass for another
  ((_, seen_UB, n_B),) = texts.cursor.carry
  assert seen_UB[:, 0].tolist() == prompt + new[:2] + [-1] * 8
  assert n_B[0] == len(calls) == 8
  # The last token is not read yet: whoever goes on reads it first.
  assert texts.cursor.token_B[0] == new[2] != STOP


def test_rows_stop_alone_and_the_loop_ends_with_the_last(monkeypatch):
  # Token 0 takes 1 from the state, and the stop wins once the state is 0.
  values_V, w_V, b_V = np.zeros(V), np.zeros(V), np.full(V, -1e3)
  values_V[:4], w_V[0], b_V[0], b_V[STOP] = [-1, 0, 3, 99], 1, -0.5, 0
  model, params, calls = counting(monkeypatch, values_V, w_V, b_V)
  write = writer(model, limit=6, temperature=0.0)

  def of(*first):
    calls.clear()
    texts = write(params, np.array(first)[:, None])[1]
    jax.effects_barrier()
    return texts, len(calls)

  texts, steps = of(1, 2, 3)
  assert texts.tokens_BU.tolist() == [
    [STOP] + [PAD] * 5,
    [0, 0, 0, STOP, PAD, PAD],
    [0] * 6,
  ]
  assert texts.length_B.tolist() == [0, 3, 6]
  ends = [lm.STOPPED, lm.STOPPED, lm.RUNNING]
  assert texts.cursor.end_B.tolist() == ends
  assert steps == 6
  for b, (want, length) in enumerate([(1, 0), (4, 3), (6, 6)]):
    alone, steps = of(b + 1)
    assert steps == want and alone.length_B[0] == length
    mine = [
      (t.tokens_BU[i], t.logprob_B[i], t.cursor.end_B[i])
      for t, i in ((alone, 0), (texts, b))
    ]
    assert_close(mine[0], mine[1], atol=0)


def test_rows_and_steps_are_drawn_independently():
  # 50 equally likely symbols, and neither the stop nor the pad among them.
  model = make({"name": "rnn"}, vocab_size=52, never=(50, 51))
  params = model.init(jax.random.key(0))
  params["out"] = jax.tree.map(jnp.zeros_like, params["out"])
  write, first_B1 = writer(model, 50, 51, limit=200), np.zeros((4, 1), np.int32)
  texts_BU = np.asarray(write(params, first_B1)[1].tokens_BU)
  assert len({tuple(row) for row in texts_BU}) == 4
  repeats_B = (texts_BU[:, 1:] == texts_BU[:, :-1]).sum(1)
  assert (repeats_B <= 10).all() and repeats_B.sum() > 0
  counts_V = np.bincount(texts_BU.ravel(), minlength=50)
  assert len(counts_V) == 50
  chi2 = ((counts_V - 16) ** 2 / 16).sum()
  assert chi2 < 94.5  # exceeded with probability 1e-4 at 49 degrees of freedom
  again_BU, other_BU = (
    write(params, first_B1, None, seed)[1].tokens_BU for seed in (0, 1)
  )
  np.testing.assert_array_equal(again_BU, texts_BU)
  assert (np.asarray(other_BU) != texts_BU).mean() > 0.9
  alone_BU = write(params, first_B1[:1])[1].tokens_BU
  np.testing.assert_array_equal(alone_BU, texts_BU[:1])


@pytest.mark.exhaustive
def test_going_on_from_the_cursor_is_not_having_stopped():
  model = make({"name": "lstm"}, layers=2)
  params = drawn(model)
  cursor, _ = model.read(params, tokens(8, 3), np.array([1, 2, 3, 3] * 2))

  @functools.partial(jax.jit, static_argnames="limit")
  def go(cursor, limit):
    key = jax.random.key(5)
    return model.generate(params, key, cursor, limit=limit, stop=STOP, pad=PAD)

  whole, first = go(cursor, 20), go(cursor, 10)
  second = go(first.cursor, 10)
  assert {lm.RUNNING, lm.STOPPED} == set(first.cursor.end_B.tolist())
  both = lm.Generated(
    jnp.concatenate([first.tokens_BU, second.tokens_BU], axis=1),
    first.length_B + second.length_B,
    first.logprob_B + second.logprob_B,
    second.cursor,
  )
  assert_close(both, whole, atol=1e-5)


def test_the_likeliest_token_whatever_the_key():
  model = make({"name": "gru"})
  params, first_BT = drawn(model), tokens(4, 2)
  one, zero = (
    writer(model, limit=6, **how) for how in ({"top_k": 1}, {"temperature": 0})
  )
  want_BU = zero(params, first_BT)[1].tokens_BU
  for write, seed in ((zero, 1), (one, 0), (one, 1)):
    other_BU = write(params, first_BT, None, seed)[1].tokens_BU
    np.testing.assert_array_equal(other_BU, want_BU)


def test_a_row_without_a_distribution_fails_and_gets_no_token():
  model = make({"name": "rnn"})
  params, first_B1 = drawn(model), np.array([[1], [3]])
  params["embed_VD"] = params["embed_VD"].at[3].set(jnp.nan)
  params["out"]["b_V"] = params["out"]["b_V"].at[3].set(-1e3)
  write = writer(model, limit=5, top_k=3)
  texts = write(params, first_B1)[1]
  assert texts.cursor.end_B[1] == lm.FAILED
  assert texts.tokens_BU[1].tolist() == [PAD] * 5
  assert texts.length_B[1] == 0 and texts.logprob_B[1] == 0
  assert texts.tokens_BU[0, 0] != PAD and texts.cursor.end_B[0] != lm.FAILED
  alone = write(params, first_B1[:1])[1]
  np.testing.assert_array_equal(alone.tokens_BU, texts.tokens_BU[:1])


def test_the_memory_of_writing_is_flat_in_the_length():
  model, B = make({"name": "lstm"}, hidden=32), 4
  params = model.init(jax.random.key(0))

  def temporary(limit):
    lowered = writer(model, limit=limit).lower(params, tokens(B, 3))
    return lowered.compile().memory_analysis().temp_size_in_bytes

  transcript = 4 * B * (4096 - 64)  # B x limit int32
  assert temporary(4096) - temporary(64) <= transcript
