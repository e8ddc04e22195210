"""Encoder-decoders for the tests: every wiring, small, and what it computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from rnnlab.models import seq2seq

V, E, H = 12, 3, 4

# Ways for the source to reach the decoder, by the settings of `make`.
INIT = {"init": True, "update": False, "output": False}
FIXED = {
  "fixed-init": {"context": INIT},
  "fixed-update": {"context": INIT | {"init": False, "update": True}},
  "fixed-output": {"context": INIT | {"init": False, "output": True}},
  "fixed-all": {"context": INIT | {"update": True, "output": True}},
}
LECTURE = {"attention": {"score": "dot", "project": True}}
BAHDANAU = {
  "direction": "both",
  "attention": {"score": "additive", "width": 5, "query": "previous"},
  "context": {"update": True},
}
LUONG = {"attention": {"score": "bilinear"}, "context": {"feed": True}}
ATTENTIVE = {
  "lecture": LECTURE,
  "bahdanau": BAHDANAU,
  "luong": LUONG,
  # The same three, with one thing changed that the others have.
  "previous-to-output": {
    "attention": {"score": "scaled_dot", "query": "previous", "project": True}
  },
  "update-alone": BAHDANAU
  | {"context": {"init": False, "update": True, "output": False}},
  "feed-alone": {
    "attention": {"score": "dot", "project": True},
    "context": {"init": False, "feed": True},
  },
}
WIRINGS = FIXED | ATTENTIVE
# Enough of them to try with whatever else a model may be made of.
MAIN = {
  name: WIRINGS[name] for name in ("lecture", "bahdanau", "luong", "fixed-all")
}
DEEP = {
  "layers": 2,
  "direction": "both",
  "decoder_hidden": 3,
  "cell": {"name": "lstm"},
}


def make(**settings):
  sizes = {"vocab_size": V, "embed": E, "hidden": H, "cell": {"name": "gru"}}
  return seq2seq.make(**sizes | settings)


def drawn(model, seed=0):
  """Parameters with no zeros left, so that nothing is hidden by one."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda p: jnp.asarray(0.5 * rng.normal(size=p.shape), p.dtype),
    jax.eval_shape(model.init, jax.random.key(seed)),
  )


def tokens(*shape, seed=1):
  return np.random.default_rng(seed).integers(0, V, shape, np.int32)


@functools.partial(jax.jit, static_argnums=0)
def run(model, params, tokens_BS, tokens_BU, /, *, mask_BU=None, **masks):
  """Encodes and decodes: encoded, carry, logits_BUV, attended."""
  encoded = model.encode(params, tokens_BS, **masks)
  return encoded, *model.decode(
    params, encoded, encoded.carry, tokens_BU, mask_BU=mask_BU
  )


def softmax(e, axis=-1):
  e = np.exp(e - e.max(axis, keepdims=True))
  return e / e.sum(axis, keepdims=True)


def score(name, params, q_D, k_D):
  """One score, for one query and one key, as the equation says it."""
  if name == "dot":
    return q_D @ k_D
  if name == "scaled_dot":
    return q_D @ k_D / np.sqrt(len(k_D))
  if name == "bilinear":
    return q_D @ params["w_AD"] @ k_D
  pre_A = params["w_AD"] @ q_D + params["u_AD"] @ k_D + params["b_A"]
  return params["v_A"] @ np.tanh(pre_A)


def reference(params, source_S, target_U, settings):
  """Logits and weights of one row with tanh cells, equation by equation."""
  p = jax.tree.map(np.asarray, params)
  ask = {"score": None, "query": "current"} | settings.get("attention", {})
  way = {"init": True, "update": False, "output": True, "feed": False}
  way |= settings.get("context", {})

  def cell(own, x, h, more=0.0):
    return np.tanh(own["w_GD"] @ x + own["u_GH"] @ h + own["b_G"] + more)

  def affine(own, x):
    return own["w_VH"] @ x + own["b_V"]

  sides, ends = [], []
  for name in ("forward", "backward"):
    if own := p["encoder"][0].get(name):
      h, found = np.zeros(H), {}
      order = range(len(source_S))
      for s in order if name == "forward" else reversed(order):
        found[s] = h = cell(own, p["embed_VD"][source_S[s]], h)
      sides.append(np.stack([found[s] for s in order]))
      ends.append(h)
  states_SC, last_C = np.concatenate(sides, 1), np.concatenate(ends)

  def attend(state):
    q = affine(p["query"], state) if ask.get("project") else state
    e = [score(ask["score"], p["score"], q, k) for k in states_SC]
    return softmax(np.array(e)), softmax(np.array(e)) @ states_SC

  h = np.zeros(H)
  if way["init"]:
    h = affine(p["bridge"][0], last_C) if "bridge" in p else last_C
  f, logits, weights = np.zeros(H), [], []
  for token in target_U:
    before, c, more = h, last_C, 0.0
    if ask["score"] and ask["query"] == "previous":
      w, c = attend(before)
    if way["update"]:
      more = p["w_GC"] @ c
    if way["feed"]:
      more = p["w_GF"] @ f
    h = cell(p["decoder"][0], p["embed_VD"][token], before, more)
    if ask["score"] and ask["query"] == "current":
      w, c = attend(h)
    if ask["score"]:
      weights.append(w)
    shown = np.concatenate([h, c]) if way["output"] else h
    if way["feed"]:
      shown = f = np.tanh(affine(p["mix"], np.concatenate([h, c])))
    logits.append(affine(p["out"], shown))
  return np.array(logits), np.array(weights)
