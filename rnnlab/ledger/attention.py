"""Attention, the pairs of the teaching task, and what masks are there for."""

import jax
import jax.numpy as jnp
import numpy as np

from rnnlab import attention, cells, scan
from rnnlab.data import pairs
from rnnlab.data.vocabulary import Vocabulary
from rnnlab.ledger import NLP, Row, difference, normal, parameters
from rnnlab.metrics import Mean, cross_entropy
from rnnlab.models import seq2seq

KEYS_BSD = np.array([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]])


def rows():
  yield from _two_questions()
  yield from _axes()
  yield from _pairs()
  yield from _masks()


def _attend(q_BUD, keys_BSD=KEYS_BSD, mask_BS=None):
  score = attention.make("dot")
  own = attention.source(score, {}, jnp.asarray(keys_BSD), mask_BS=mask_BS)
  return attention.attend(score, {}, jnp.asarray(q_BUD), own)


def _two_questions():
  found = _attend([[[2.0, 0.0], [0.0, 2.0]]])
  low, high = 0.06337894, 0.46831053
  weights = (high, low, high), (low, high, high)
  contexts = (0.93662106, 0.53168947), (0.53168947, 0.93662106)
  scores = (2.0, 0.0, 2.0), (0.0, 2.0, 2.0)
  for u, q in enumerate(("(2, 0)", "(0, 2)")):
    said = f"keys (1, 0), (0, 1), (1, 1), q = {q}: "
    yield Row(said + "scores", NLP, scores[u], found.scores_BUS[0, u])
    own = found.weights_BUS[0, u]
    yield Row(said + "weights", NLP, weights[u], own, 5e-9)
    own = found.context_BUD[0, u]
    yield Row(said + "context", NLP, contexts[u], own, 5e-9)


def _axes():
  B, S, U, D = 2, 4, 3, 5
  keys_BSD, q_BUD = normal(B, S, D), normal(B, U, D, seed=1)
  found = _attend(q_BUD, keys_BSD)
  shapes = " ".join("x".join(map(str, x.shape)) for x in found)
  said = "scores, weights, context, B U S D = 2 3 4 5"
  yield Row(said, NLP, "2x3x4 2x3x4 2x3x5", shapes)
  sums = found.weights_BUS.sum(-1)
  said = "weights sum to 1 over the source: difference"
  yield Row(said, NLP, 0.0, difference(sums, np.ones((B, U))))
  # The other layout: source before target, and the softmax over axis 1.
  dot_BSU = np.einsum("bsd,bud->bsu", keys_BSD, q_BUD)
  other = jax.nn.softmax(jnp.asarray(dot_BSU), axis=1)
  said = "in the layout B x S x U they stand transposed: difference"
  own = difference(jnp.swapaxes(other, 1, 2), found.weights_BUS)
  yield Row(said, NLP, 0.0, own)
  head = {"score": "dot", "query": "current", "project": True}
  sizes = {"vocab_size": 28, "embed": 32, "hidden": 32}
  model = seq2seq.make(**sizes, cell={"name": "gru"}, attention=head)
  shapes = jax.eval_shape(model.init, jax.random.key(0))
  count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
  said = "parameters of that encoder-decoder, E = H = 32, V = 28"
  yield Row(said, NLP, 16316, count, 0)


def _pairs():
  vocab = Vocabulary.of(["abcdefghijklmnopqrstuvwxyz"])
  name, noise = (
    vocab.encode(text, text)[None] for text in ("sophia", "urxzwq")
  )
  source = vocab.decode(pairs.interleave(name, noise)[0])
  yield Row("sophia with u r x z w q", NLP, "suorpxhziwaq", source)
  listed = pairs.Pairs(["sophia"], ["sophia"[::-1]], True)
  batcher = pairs.Batcher(listed, vocab, lambda i: "sophia", 0, 1)
  batch = batcher.batch(np.array([0]), 1, 0)
  target = vocab.decode(batch["targets_BU"][0, :-1])
  yield Row("its target", NLP, "aihpos", target)
  length = int(batch["source_real_BS"].sum())
  yield Row("the source is twice as long", NLP, 12, length, 0)


def _masks():
  two = np.array([[True, True, False]])
  found = _attend([[[2.0, 0.0]]], mask_BS=two)
  said = "the third key is padding: the weights"
  # 1 / (1 + e^-2)
  wanted = 0.88079708, 0.11920292, 0.0
  yield Row(said, NLP, wanted, found.weights_BUS[0, 0], 5e-9)

  def loss(logits_BTV):
    nll_BT = cross_entropy(logits_BTV, jnp.array([[1, 0]]))
    return Mean.of(nll_BT, jnp.array([[True, False]])).total

  grad = jax.grad(loss)(jnp.asarray(normal(1, 2, 3)))
  said = "the gradient of a padded target's logits"
  yield Row(said, NLP, 0.0, difference(grad[0, 1], np.zeros(3)), 0)
  H, D = 3, 2
  cell = cells.make("gru", hidden=H)
  params = parameters(lambda key: cell.init(key, D))
  x_BTD = np.concatenate([normal(1, 3, D), np.zeros((1, 2, D))], axis=1)
  real_BT = np.arange(5)[None] < 3

  @jax.jit
  def last(x_BTD, mask_BT):
    return scan.unroll(cell, params, x_BTD, mask_BT=mask_BT)[0]

  short = scan.unroll(cell, params, x_BTD[:, :3])[0]
  moved = difference(last(x_BTD, np.ones_like(real_BT)), short)
  said = "a zero embedding for padding: does the state still move?"
  yield Row(said, NLP, "yes", "yes" if moved > 1e-3 else "no")
  said = "with a mask: difference to the unpadded state"
  yield Row(said, NLP, 0.0, difference(last(x_BTD, real_BT), short))
