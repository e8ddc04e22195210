"""The tagger: one wiring or another, padding, and what comes bit by bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import all_cells, assert_close, exhaustive_but

from rnnlab import cells, scan, wiring
from rnnlab.models import tagger

V, LABELS, B, T = 6, 3, 3, 7
WIRINGS = {
  "causal": {},
  "lookahead": {"lookahead": 2},
  "backward": {"direction": "backward"},
  "concat": {"direction": "both"},
  "alternating": {"direction": "alternating"},
}
TOKENS_BT = np.random.default_rng(0).integers(V, size=(B, T), dtype=np.int32)


def make(cell=None, **settings):
  sizes = {"vocab_size": V, "labels": LABELS, "embed": 3, "hidden": 4}
  sizes |= {"layers": 2, "cell": cell or {"name": "rnn"}}
  return tagger.make(**sizes | settings)


@functools.cache
def drawn(model):
  """Parameters with no zeros left, so that nothing is hidden by one."""
  leaves, tree = jax.tree.flatten(jax.eval_shape(model.init, jax.random.key(0)))
  rng = np.random.default_rng(0)
  return tree.unflatten(
    jnp.asarray(0.7 * rng.normal(size=p.shape), p.dtype) for p in leaves
  )


@pytest.mark.parametrize("settings", WIRINGS.values(), ids=WIRINGS)
def test_a_row_with_padding_or_gaps_is_that_row_alone(settings, x64):
  """Whatever stands where nothing is, NaN included."""
  model = make(**settings)
  params, apply = drawn(model), jax.jit(model.apply)
  steps = np.array([[0, 1, 2], [2, 4, 5], [0, 3, 6]])
  mask_BT = np.zeros((B + 1, T), bool)  # and a row of nothing
  np.put_along_axis(mask_BT[:B], steps, True, axis=1)
  alone = apply(params, np.take_along_axis(TOKENS_BT, steps, axis=1))
  x_BTV = np.eye(V)[TOKENS_BT[[0, 1, 2, 0]]]
  filled_BTV = np.where(mask_BT[..., None], x_BTV, np.nan)
  padded = apply(params, filled_BTV, mask_BT=mask_BT)
  assert_close(padded[np.arange(B)[:, None], steps], alone)
  tokens_BT = np.where(mask_BT, TOKENS_BT[[0, 1, 2, 0]], V - 1)
  found = apply(params, tokens_BT, mask_BT=mask_BT)
  assert_close(found[np.arange(B)[:, None], steps], alone)


def test_a_window_holds_the_steps_that_follow(x64):
  x_BTD = np.arange(1.0, 6)[None, :, None]
  expected = [[1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 0], [5, 0, 0]]
  assert_close(wiring.window(x_BTD, 2)[0], np.array(expected, float))
  assert wiring.window(x_BTD, 0) is x_BTD
  # With a gap in it: the window closes over it.
  mask_BT = np.array([[True, False, True, True, False]])
  found = wiring.window(
    jnp.where(mask_BT[..., None], x_BTD, np.nan), 2, mask_BT
  )
  assert_close(
    found[0, [0, 2, 3]], np.array([[1.0, 3, 4], [3, 4, 0], [4, 0, 0]])
  )


def test_each_wiring_is_its_layers_by_hand(x64):
  """And on the same weights a backward layer on top is another function."""
  cell = cells.make("rnn", hidden=3)
  keys = jax.random.split(jax.random.key(0), 4)
  x_BTD = np.random.default_rng(1).normal(size=(B, T, 3))

  def run(params, x, back=False):
    return scan.unroll(cell, params, x, reverse=back)[1]

  first, second = (cell.init(k, 3) for k in keys[:2])
  stacked = ({"forward": first}, {"backward": second})
  _, found = wiring.unroll([cell] * 2, stacked, x_BTD)
  assert_close(found, run(second, run(first, x_BTD), back=True))
  joined = ({"forward": first, "backward": second},)
  _, both = wiring.unroll([cell], joined, x_BTD)
  sides = run(first, x_BTD), run(second, x_BTD, back=True)
  assert_close(both, jnp.concatenate(sides, axis=-1))
  assert np.abs(both[..., 3:] - found).max() > 0.1
  made = wiring.init([cell] * 3, keys[2], 5, "alternating")
  assert [list(own) for own in made] == [["forward"], ["backward"], ["forward"]]
  assert made[0]["forward"]["w_GD"].shape == (3, 5)


@functools.cache
def fed(model):
  return jax.jit(model.feed, static_argnames="last")


def chunks(model, params, tokens_BT, mask_BT, sizes):
  """The answers of every row of texts that come in chunks of these sizes."""
  feed = fed(model)
  stream, begin = model.start(params, len(tokens_BT)), 0
  answers = [[] for _ in tokens_BT]
  for i, size in enumerate(sizes):
    part = slice(begin, begin + size)
    stream, logits_BUV, mask_BU = feed(
      params,
      stream,
      tokens_BT[:, part],
      None if mask_BT is None else mask_BT[:, part],
      last=i + 1 == len(sizes),
    )
    begin += size
    for row, own in enumerate(answers):
      own.extend(np.asarray(logits_BUV[row])[np.asarray(mask_BU[row])])
      # Answers stand at the front, and none comes before it can.
      assert not np.diff(np.asarray(mask_BU[row], int)).clip(0).any()
  return answers, stream


@pytest.mark.parametrize(
  "k, sizes", [(0, [3, 3, 1]), (2, [1] * 7), (9, [7, 0])]
)
def test_a_stream_answers_late_what_the_whole_answers(k, sizes, x64):
  model = make(lookahead=k)
  params = drawn(model)
  answers, _ = chunks(model, params, TOKENS_BT, None, sizes)
  assert_close(np.array(answers), jax.jit(model.apply)(params, TOKENS_BT))


@pytest.mark.parametrize("settings", exhaustive_but(["lstm"], all_cells()))
def test_rows_of_a_stream_grow_at_their_own_pace(settings, x64):
  model = make(settings, lookahead=2)
  params = drawn(model)
  steps = np.array([[0, 2, 3, 5], [3, 4, 5, 6], [0, 1, 2, 3]])
  mask_BT = np.zeros((B, T), bool)
  np.put_along_axis(mask_BT, steps, True, axis=1)
  answers, _ = chunks(model, params, TOKENS_BT, mask_BT, [2, 2, 2, 1])
  alone_BT = np.take_along_axis(TOKENS_BT, steps, axis=1)
  assert_close(np.array(answers), jax.jit(model.apply)(params, alone_BT))


def test_a_stream_answers_k_steps_late_and_holds_no_more(x64):
  model = make(lookahead=2)
  params = drawn(model)
  stream = model.start(params, B)
  sizes = jax.tree.map(jnp.shape, stream)
  given = 0
  for t in range(T):
    part_BT = TOKENS_BT[:, t : t + 1]
    stream, _, mask_BU = fed(model)(params, stream, part_BT)
    given += int(mask_BU[0].sum())
    assert given == max(t + 1 - 2, 0)
    assert jax.tree.map(jnp.shape, stream) == sizes
  assert stream.tokens_BK.shape == (B, 2)
  assert [c.shape for c in jax.tree.leaves(stream.carry)] == [(B, 4)] * 2


@pytest.mark.parametrize("direction", ["both", "alternating", "backward"])
def test_what_reads_to_the_end_cannot_stream(direction):
  model = make(direction=direction)
  params = drawn(model)
  with pytest.raises(
    ValueError, match=f"{direction!r} reads a sequence to its"
  ):
    model.start(params, B)


def test_dropout_is_for_training_alone():
  model = make(dropout=0.5, lookahead=1)
  params = drawn(model)
  plain = make(lookahead=1).apply(params, TOKENS_BT)
  assert_close(model.apply(params, TOKENS_BT), plain)
  keys = jax.random.split(jax.random.key(0))
  found = [model.apply(params, TOKENS_BT, key=key) for key in keys]
  assert np.abs(found[0] - found[1]).max() > 0.01
  assert_close(model.apply(params, TOKENS_BT, key=keys[0]), found[0])


@pytest.mark.parametrize(
  "words, settings",
  [
    ("model.hidden must be at least 1, not 0", {"hidden": 0}),
    ("model.chunk must be at least 1, not 0", {"chunk": 0}),
    ("model.lookahead must be at least 0, not -1", {"lookahead": -1}),
    ("model.dropout must be in", {"dropout": 1.0}),
    ("model.direction is one of.*not 'sideways'", {"direction": "sideways"}),
    ("'alternating' needs model.layers of at least 2, not 1",
     {"direction": "alternating", "layers": 1}),
    ("model.lookahead=2 is for", {"direction": "both", "lookahead": 2}),
  ],
)  # fmt: skip
def test_a_wrong_setting_is_refused_by_name(words, settings):
  with pytest.raises(ValueError, match=words):
    make(**settings)
