"""Greedy and beam search, against tables that are searched by hand."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rnnlab.models import decoding

# A model of three letters that remembers all it has read.
STOP, PAD, V, LIMIT = 3, 4, 5, 4
ALLOWED_V = np.arange(V) != PAD
HOW = {"limit": LIMIT, "stop": STOP, "pad": PAD, "allowed_V": ALLOWED_V}
SAMPLES = 12
ALL = 108  # more places than there are beginnings of any length


def read(node, token):
  """The number of the history `node` once it has read `token`."""
  return node * V + token + 1


# Node 0 has read nothing, the start symbol (the pad) comes first.
ROOT = read(0, PAD)
NODES = 1 + functools.reduce(read, [PAD] * (LIMIT + 1), 0)
TABLE_BNV = np.random.default_rng(0).normal(size=(SAMPLES, NODES, V)) * 1.5


def tables(table_BNV=TABLE_BNV):
  """(step, carry, start_B): row b walks through table b."""
  table_BNV = jnp.asarray(np.array(table_BNV), jnp.float32)
  batch = table_BNV.shape[0]

  def step(carry, token_B):
    node_B = read(carry["node_B"], token_B)
    logits_BV = table_BNV[carry["row_B"], node_B]
    return {"row_B": carry["row_B"], "node_B": node_B}, logits_BV, ()

  carry = {"row_B": jnp.arange(batch), "node_B": jnp.zeros(batch, jnp.int32)}
  return step, carry, jnp.full(batch, PAD)


def log_probs(row, tokens):
  """The log-probability of each token of one answer, in float64."""
  node, found = ROOT, []
  for token in tokens:
    logits_V = TABLE_BNV[row, node, :PAD]
    found.append(logits_V[token] - np.log(np.exp(logits_V).sum()))
    node = read(node, token)
  return found


def every_answer(row, alpha):
  """All answers of one row, best first: (ended, score, log-prob, tokens)."""
  answers = []
  for n in range(LIMIT + 1):
    for letters in itertools.product(range(STOP), repeat=n):
      ended = n < LIMIT
      tokens = [*letters, STOP] if ended else letters
      logprob = sum(log_probs(row, tokens))
      score = logprob / len(tokens) ** alpha
      answers.append((ended, score, logprob, list(tokens)))
  return sorted(answers, key=lambda answer: answer[:2], reverse=True)


def plain_beam(row, width, alpha, n_best):
  """Beam search as a list of lists, run to the limit, never stopping early."""
  live, found = [[]], []
  for _ in range(LIMIT):
    grown = [[*tokens, token] for tokens in live for token in range(PAD)]
    grown.sort(key=lambda tokens: -sum(log_probs(row, tokens)))
    found += [tokens for tokens in grown[:width] if tokens[-1] == STOP]
    live = [tokens for tokens in grown[:width] if tokens[-1] != STOP]

  def score(tokens):
    return sum(log_probs(row, tokens)) / len(tokens) ** alpha

  ranked = sorted(found, key=score, reverse=True)
  ranked += sorted(live, key=score, reverse=True)
  return ranked[:n_best]


def padded(tokens):
  return [*tokens] + [PAD] * (LIMIT - len(tokens))


def counted(step):
  """The step, and the list of the times it is run (not traced)."""
  runs = []

  def counting(carry, token_B):
    jax.debug.callback(lambda: runs.append(1))
    return step(carry, token_B)

  return counting, runs


def jitted(search, model, **how):
  """The search as a compiled function of (carry, start_B)."""
  return jax.jit(lambda carry, start_B: search(model[0], carry, start_B, **how))


def beam(model, **how):
  return jitted(decoding.beam, model, **how)(*model[1:])


def greedy(model, **how):
  return jitted(decoding.greedy, model, **how)(*model[1:])


def assert_same(one, other, row=slice(None)):
  """Equal trees, but for rounding; of the first, the given rows."""
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    np.testing.assert_allclose(a[row], b, rtol=1e-6)


# --- greedy ---


def scripted(script_BU):
  """(step, carry, start_B): row b says script_BU[b]; aux is what it reads."""
  script_BU = jnp.asarray(script_BU)
  batch = script_BU.shape[0]

  def step(carry, token_B):
    script_BU, t_B = carry
    says_B1 = jnp.take_along_axis(script_BU, t_B[:, None], axis=1)
    aux = {"token_B": token_B, "twice_B2": jnp.tile(token_B[:, None], (1, 2))}
    return (script_BU, t_B + 1), 2.0 * jax.nn.one_hot(says_B1[:, 0], V), aux

  carry = script_BU, jnp.zeros(batch, jnp.int32)
  return step, carry, jnp.full(batch, PAD)


SCRIPT_BU = [
  [STOP, 0, 1, 2, 0, 1],
  [0, 1, 2, STOP, 1, 1],
  [2, 2, 1, 1, 0, 0],
]


def test_a_row_ends_at_its_stop():
  out = greedy(scripted(SCRIPT_BU), **HOW | {"limit": 6})
  p = PAD
  np.testing.assert_array_equal(
    out.tokens_BU,
    [[STOP, p, p, p, p, p], [0, 1, 2, STOP, p, p], [2, 2, 1, 1, 0, 0]],
  )
  np.testing.assert_array_equal(out.length_B, [0, 3, 6])
  np.testing.assert_array_equal(out.ended_B, [True, True, False])
  one = 2 - math.log(math.exp(2) + 3)
  np.testing.assert_allclose(out.logprob_B, [one, 4 * one, 6 * one], rtol=1e-6)
  reads_BU = [[p, 0, 0, 0, 0, 0], [p, 0, 1, 2, 0, 0], [p, 2, 2, 1, 1, 0]]
  np.testing.assert_array_equal(out.aux["token_B"], reads_BU)
  assert out.aux["twice_B2"].shape == (3, 6, 2)
  np.testing.assert_array_equal(out.aux["twice_B2"][..., 1], reads_BU)
  assert out.nll_BU is None


def test_greedy_in_company_is_greedy_alone():
  model = scripted(SCRIPT_BU)
  search = jitted(decoding.greedy, model, **HOW | {"limit": 6})
  out = search(*model[1:])
  for row in range(3):
    mine = slice(row, row + 1)
    _, carry, start_B = scripted(SCRIPT_BU[mine])
    assert_same(out, search(carry, start_B), mine)


def test_greedy_ends_early_when_all_have_stopped():
  for rows, want in ((1, 1), (2, 4), (3, 6)):
    step, carry, start_B = scripted(SCRIPT_BU[:rows])
    step, runs = counted(step)
    out = greedy((step, carry, start_B), **HOW | {"limit": 6})
    jax.block_until_ready(out)
    jax.effects_barrier()
    assert len(runs) == want


def test_ties_go_to_the_lowest_id_that_is_allowed():
  def step(carry, token_B):
    # No two of these differ, and 2e-9 is lost once a softmax is taken.
    logits_BV = jnp.array(
      [[9, -0.0, 0.0, 0.0, 0.0], [9, -1, 0, 2e-9, 0], [0, *[-jnp.inf] * 4]]
    )
    return carry, jnp.repeat(logits_BV, token_B.shape[0] // 3, axis=0), ()

  how = {"limit": 1, "stop": 4, "pad": 0, "allowed_V": np.arange(V) > 0}
  out = greedy((step, (), jnp.zeros(3, int)), **how)
  np.testing.assert_array_equal(out.tokens_BU, [[1], [3], [1]])
  np.testing.assert_allclose(
    out.logprob_B, [-math.log(4), -math.log(3 + math.exp(-1)), np.nan]
  )
  for width in (1, 2):
    beams = beam((step, (), jnp.zeros(3, int)), width=width, **how)
    np.testing.assert_array_equal(beams.tokens_BNU[:, 0], [[1], [3], [1]])


def test_free_running_nll():
  step, carry, start_B = tables()
  plain = greedy((step, carry, start_B), **HOW)
  # Rows that have all stopped early, so that the loop could end.
  rows = np.flatnonzero(plain.length_B < LIMIT - 1)
  assert len(rows) > 1
  carry, start_B, plain = jax.tree.map(
    lambda x: x[rows], (carry, start_B, plain)
  )
  targets_BU = np.random.default_rng(1).integers(V, size=(len(rows), LIMIT))
  out = greedy((step, carry, start_B), targets_BU=targets_BU, **HOW)
  assert_same(out._replace(nll_BU=None), plain)
  for i, row in enumerate(rows):
    node = ROOT
    for u in range(LIMIT):
      logits_V = TABLE_BNV[row, node]
      want = np.log(np.exp(logits_V).sum()) - logits_V[targets_BU[i, u]]
      np.testing.assert_allclose(out.nll_BU[i, u], want, atol=1e-5)
      node = read(node, int(np.argmax(logits_V[:PAD])))


def test_nan_stays_in_its_row():
  step, carry, start_B = tables([*TABLE_BNV, np.full((NODES, V), np.nan)])
  clean = jax.tree.map(lambda leaf: leaf[:-1], (carry, start_B))
  broken = {**clean[0], "row_B": clean[0]["row_B"].at[2].set(SAMPLES)}, clean[1]
  others = np.arange(SAMPLES) != 2

  search = jitted(decoding.greedy, (step,), **HOW)
  out = search(*broken)
  assert np.isnan(out.logprob_B[2]) and np.all(out.tokens_BU[2, 0] != PAD)
  want = jax.tree.map(lambda x: x[others], search(*clean))
  assert_same(out, want, others)

  # One place more than ids that are allowed.
  search = jitted(decoding.beam, (step,), width=V, n_best=V, **HOW)
  out = search(*broken)
  assert np.isnan(out.score_BN[2, 0])
  real_N = np.sum(out.tokens_BNU[2] != PAD, axis=1)
  np.testing.assert_array_equal(real_N, out.length_BN[2] + out.ended_BN[2])
  want = jax.tree.map(lambda x: x[others], search(*clean))
  assert_same(out, want, others)


# --- beam ---

A, B, E, P = range(4)


def by_hand():
  """A model of the letters a and b, and E, the stop."""
  probs_NV = {
    "": [0.6, 0.1, 0.3, 0],
    "a": [0.5, 0.4, 0.1, 0],
    "aa": [0.05, 0.05, 0.9, 0],
    "ab": [0.05, 0.05, 0.9, 0],
    "b": [0.2, 0.2, 0.6, 0],
    "other": [0.1, 0.1, 0.8, 0],
  }
  said = [*probs_NV]
  moves_NV = [
    [
      said.index(s + c) if s + c in said else said.index("other")
      for c in "abEp"
    ]
    for s in said
  ]
  logits_NV = jnp.log(jnp.array([*probs_NV.values()]) + 1e-30)

  def step(node_B, token_B):
    moved_B = jnp.asarray(moves_NV)[node_B, token_B]
    node_B = jnp.where(token_B == P, 0, moved_B)  # the pad is the start
    return node_B, logits_NV[node_B], ()

  how = {"limit": 4, "stop": E, "pad": P, "allowed_V": np.arange(4) != P}
  return (step, jnp.zeros(1, int), jnp.array([P])), how


@pytest.mark.parametrize(
  ("alpha", "tokens", "scores"),
  [
    (0, [[E, P, P, P], [A, A, E, P]], [-1.2040, -1.3093]),
    (1, [[A, A, E, P], [A, B, E, P]], [-0.4364, -0.5108]),
  ],
)
def test_a_beam_by_hand(alpha, tokens, scores):
  model, how = by_hand()
  out = beam(model, width=2, n_best=2, alpha=alpha, **how)
  np.testing.assert_array_equal(out.tokens_BNU[0], tokens)
  np.testing.assert_allclose(out.score_BN[0], scores, atol=5e-5)
  np.testing.assert_array_equal(
    out.length_BN[0], np.argmax(np.array(tokens) == E, axis=1)
  )
  np.testing.assert_allclose(
    out.logprob_BN[0], out.score_BN[0] * (out.length_BN[0] + 1) ** alpha
  )
  assert np.all(out.ended_BN)


def test_a_beam_by_hand_of_width_one_is_greedy():
  model, how = by_hand()
  for alpha in (0, 1):
    out = beam(model, width=1, alpha=alpha, **how)
    np.testing.assert_array_equal(out.tokens_BNU[0, 0], [A, A, E, P])
  best = greedy(model, **how)
  np.testing.assert_array_equal(best.tokens_BU[0], [A, A, E, P])


@pytest.mark.parametrize("alpha", [0, 3])
def test_width_one_is_greedy(alpha):
  best = greedy(tables(), **HOW)
  assert 0 < np.sum(best.ended_B) < SAMPLES
  out = beam(tables(), width=1, alpha=alpha, **HOW)
  np.testing.assert_array_equal(out.tokens_BNU[:, 0], best.tokens_BU)
  np.testing.assert_array_equal(out.length_BN[:, 0], best.length_B)
  np.testing.assert_array_equal(out.ended_BN[:, 0], best.ended_B)
  np.testing.assert_allclose(out.logprob_BN[:, 0], best.logprob_B, rtol=1e-6)


@pytest.mark.parametrize("alpha", [0, 0.7, 1])
def test_a_full_beam_is_an_exhaustive_search(alpha):
  out = beam(tables(), width=ALL, n_best=50, alpha=alpha, **HOW)
  for row in range(SAMPLES):
    answers = every_answer(row, alpha)[:50]
    # 40 answers end; the ten places left are for the best that do not.
    np.testing.assert_array_equal(out.ended_BN[row], np.arange(50) < 40)
    np.testing.assert_array_equal(
      out.tokens_BNU[row], [padded(answer[3]) for answer in answers]
    )
    for field, want in ((out.score_BN, 1), (out.logprob_BN, 2)):
      want_N = [answer[want] for answer in answers]
      np.testing.assert_allclose(field[row], want_N, rtol=1e-5)
    np.testing.assert_array_equal(
      out.length_BN[row], [len(answer[3]) - answer[0] for answer in answers]
    )


@pytest.mark.parametrize("alpha", [0, 0.7, 3])
@pytest.mark.parametrize(("width", "n_best"), [(2, 1), (3, 3), (ALL, 1)])
def test_a_beam_alone_or_in_company_loses_nothing(alpha, width, n_best):
  step, carry, start_B = tables()
  how = {"width": width, "n_best": n_best, "alpha": alpha, **HOW}
  search = jitted(decoding.beam, (step,), **how)
  out = search(carry, start_B)
  for row in range(SAMPLES):
    want = [padded(x) for x in plain_beam(row, width, alpha, n_best)]
    np.testing.assert_array_equal(out.tokens_BNU[row, : len(want)], want)
    # Alone, a row ends as soon as it is decided itself.
    mine = slice(row, row + 1)
    own = jax.tree.map(lambda leaf, mine=mine: leaf[mine], carry)
    assert_same(out, search(own, start_B[mine]), mine)


@pytest.mark.parametrize(
  ("alpha", "width", "want"), [(0, 1, 3), (0, 2, 2), (1, 2, 3), (9, 4, 4)]
)
def test_a_beam_ends_when_every_row_is_decided(alpha, width, want):
  (step, carry, start_B), how = by_hand()
  step, runs = counted(step)
  out = beam((step, carry, start_B), width=width, alpha=alpha, **how)
  jax.block_until_ready(out)
  jax.effects_barrier()
  assert len(runs) == want


def test_ties_go_to_the_answer_found_earlier_then_to_the_lower_id():
  def step(carry, token_B):
    return carry, jnp.zeros((token_B.shape[0], 3)), ()

  how = {"limit": 2, "stop": 2, "pad": 9, "allowed_V": np.ones(3, bool)}
  model = step, (), jnp.zeros(1, int)
  out = beam(model, width=9, n_best=9, alpha=1, **how)
  np.testing.assert_array_equal(
    out.tokens_BNU[0],
    [[2, 9], [0, 2], [1, 2], [0, 0], [0, 1], [1, 0], [1, 1], [9, 9], [9, 9]],
  )
  np.testing.assert_array_equal(out.length_BN[0], [0, 1, 1, 2, 2, 2, 2, 0, 0])
  np.testing.assert_array_equal(out.ended_BN[0], np.arange(9) < 3)
  np.testing.assert_array_equal(np.isneginf(out.score_BN[0]), np.arange(9) > 6)
  np.testing.assert_array_equal(out.logprob_BN[0, 7:], [-np.inf] * 2)


def test_what_a_stopped_place_reads_does_not_matter():
  step, carry, start_B = tables()

  def fragile(carry, token_B):
    carry, logits_BV, aux = step(carry, token_B)
    stopped_B1 = (token_B == STOP)[:, None]
    return carry, jnp.where(stopped_B1, jnp.nan, logits_BV), aux

  how = {"width": 4, "n_best": 4, **HOW}
  want = beam((step, carry, start_B), **how)
  assert_same(beam((fragile, carry, start_B), **how), want)
  best = greedy((fragile, carry, start_B), **HOW)
  assert_same(best, greedy((step, carry, start_B), **HOW))


# --- both ---


@pytest.mark.parametrize(
  "search",
  [decoding.greedy, functools.partial(decoding.beam, width=3, alpha=0.7)],
)
def test_one_compilation_a_shape(search):
  step, carry, start_B = tables()
  traces = []

  @jax.jit
  def run(carry, start_B):
    traces.append(1)
    return search(step, carry, start_B, **HOW)

  out = run(carry, start_B)
  assert_same(out, search(step, carry, start_B, **HOW))
  other = jax.tree.map(lambda leaf: leaf[::-1], carry)
  assert_same(run(other, start_B), jax.tree.map(lambda x: x[::-1], out))
  assert len(traces) == 1


def test_float64_is_kept(x64):
  step, carry, start_B = tables()

  def wide(carry, token_B):
    carry, logits_BV, aux = step(carry, token_B)
    return carry, logits_BV.astype(jnp.float64), aux

  targets_BU = np.zeros((SAMPLES, LIMIT), int)
  out = greedy((wide, carry, start_B), targets_BU=targets_BU, **HOW)
  assert out.logprob_B.dtype == out.nll_BU.dtype == jnp.float64
  assert out.tokens_BU.dtype == out.length_B.dtype == jnp.int32
  out = beam((wide, carry, start_B), width=2, **HOW)
  assert out.score_BN.dtype == out.logprob_BN.dtype == jnp.float64
  assert out.tokens_BNU.dtype == out.length_BN.dtype == jnp.int32


@pytest.mark.parametrize(
  ("changed", "message"),
  [
    ({"limit": 0}, "limit.*0"),
    ({"width": 0}, "width.*0"),
    ({"n_best": 0}, "n_best.*0"),
    ({"n_best": 3}, "width 2.*3"),
    ({"alpha": -0.1}, "alpha.*-0.1"),
    ({"alpha": math.nan}, "alpha.*nan"),
    ({"allowed_V": np.ones(V + 1, bool)}, "allowed_V"),
  ],
)
def test_a_beam_refuses(changed, message):
  with pytest.raises(ValueError, match=message):
    beam(tables(), **{"width": 2, **HOW, **changed})


@pytest.mark.parametrize(
  ("changed", "message"),
  [
    ({"limit": 0}, "limit.*0"),
    ({"allowed_V": np.ones(V + 1, bool)}, "allowed_V"),
    ({"targets_BU": np.zeros((SAMPLES, LIMIT + 1), int)}, "limit is 4.*5"),
    ({"targets_BU": np.zeros((SAMPLES - 1, LIMIT), int)}, "targets_BU"),
  ],
)
def test_greedy_refuses(changed, message):
  with pytest.raises(ValueError, match=message):
    greedy(tables(), **{**HOW, **changed})


def test_a_carry_of_columns_is_refused():
  step, _, start_B = tables()
  for search in (decoding.greedy, functools.partial(decoding.beam, width=2)):
    with pytest.raises(ValueError, match=r"batch comes first.*\(7, 12\)"):
      search(step, jnp.zeros((7, SAMPLES)), start_B, **HOW)
