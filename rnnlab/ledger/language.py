"""The language model: the shift, the factors, and what persists."""

import jax
import jax.numpy as jnp
import numpy as np

from rnnlab import cells, layers, nn, scan, wiring
from rnnlab.data.vocabulary import PAD, START_STOP, Vocabulary
from rnnlab.ledger import NLP, SYSTEMS, Row, difference, normal, parameters
from rnnlab.metrics import cross_entropy
from rnnlab.models import lm
from rnnlab.tasks import name_lm


def rows():
  yield from _shift()
  yield from _factors()
  yield from _sizes()
  yield from _context()


def _example():
  vocab = Vocabulary.of(["abcdefghijklmnopqrstuvwxyz"])
  stop, pad = vocab.id(START_STOP), vocab.id(PAD)
  tokens_BT = np.array([[stop, *vocab.encode("ada", "ada"), stop, pad]])
  batch = name_lm.shift(tokens_BT, tokens_BT != pad, pad)
  return vocab, batch


def _shift():
  vocab, batch = _example()

  def read(name):
    ids = batch[name][batch["mask_BT"]]
    return " ".join(vocab.symbols[i] for i in ids)

  yield Row("ada is read as", NLP, "[S] a d a", read("inputs_BT"))
  yield Row("and predicted as", NLP, "a d a [S]", read("targets_BT"))
  steps = int(batch["mask_BT"].sum())
  yield Row("its factors, the stop included", NLP, 4, steps, 0)


def _factors():
  vocab, batch = _example()
  settings = {"embed": 3, "hidden": 4, "cell": {"name": "rnn"}}
  model = lm.make(vocab_size=vocab.size, never=(vocab.id(PAD),), **settings)
  params = parameters(model.init)
  tokens_BT, targets_BT = batch["inputs_BT"], batch["targets_BT"]

  @jax.jit
  def run(params, carry, tokens_BT):
    return model.apply(params, tokens_BT, carry)

  zero = jax.tree.map(
    lambda c: jnp.zeros(c.shape, c.dtype),
    jax.eval_shape(run, params, None, tokens_BT)[0],
  )
  _, logits_BTV = run(params, zero, tokens_BT)
  probs_BTV = jax.nn.softmax(logits_BTV)
  said = "p(x_{t+1} | x_<=t) sums to 1: difference"
  yield Row(said, NLP, 0.0, difference(probs_BTV.sum(-1), np.ones((1, 5))))
  nll_BT = cross_entropy(logits_BTV, targets_BT)
  nll = float(jnp.where(batch["mask_BT"], nll_BT, 0).sum())
  carry, product = zero, 1.0
  for t in range(4):
    # One token at a time, the state handed on.
    carry, now_B1V = run(params, carry, tokens_BT[:, t : t + 1])
    product *= float(jax.nn.softmax(now_B1V)[0, 0, targets_BT[0, t]])
  said = "-log of the product of factors, state handed on: difference"
  yield Row(said, NLP, 0.0, abs(nll + np.log(product)))


def _sizes():
  H, D, K, T = 96, 96, 28, 100
  cell = cells.make("rnn", hidden=H)

  def both(key):
    return cell.init(key, D), nn.linear(key, K, H)

  shapes = jax.eval_shape(both, jax.random.key(0))
  count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
  said = "H^2 + HD + H + KH + K parameters, H = D = 96, K = 28"
  yield Row(said, SYSTEMS, 21244, count, 0)

  def run(T):
    params = cell.init(jax.random.key(0), D)
    return scan.trace(cell, params, jnp.zeros((1, T, D)))

  trace = jax.eval_shape(lambda: run(T))
  said = "numbers of state to go on, of 96 units"
  yield Row(said, SYSTEMS, H, trace.carry.size, 0)
  said = "states that a gradient over 100 steps keeps"
  yield Row(said, SYSTEMS, T * H, trace.entries.size, 0)


def _context():
  """Which inputs an output may see, by the gradient."""
  H, D, T, t = 3, 2, 5, 2
  stack = [cells.make("gru", hidden=H), cells.make("lstm", hidden=H)]
  params = parameters(lambda key: layers.init(stack, key, D))
  both = parameters(lambda key: wiring.init(stack[:1], key, D, "both"))
  x_BTD = normal(1, T, D)

  @jax.jit
  def reach(x_BTD):
    def forward(x_BTD):
      return layers.unroll(stack, params, x_BTD)[1][0, t].sum()

    def whole(x_BTD):
      return wiring.unroll(stack[:1], both, x_BTD)[1][0, t].sum()

    return jax.grad(forward)(x_BTD), jax.grad(whole)(x_BTD)

  causal, whole = (np.abs(g[0]).max(1) for g in reach(x_BTD))
  said = "two layers, both forward: what an output sees of later inputs"
  yield Row(said, SYSTEMS, 0.0, causal[t + 1 :].max(), 0)
  said = "a bidirectional layer: does it see later inputs?"
  yield Row(said, SYSTEMS, "yes", "yes" if whole[t + 1 :].min() > 0 else "no")
