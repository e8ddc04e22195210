"""Haiku on the workloads that it has the cell for: the LSTM.

Its GRU resets before the product and its plain RNN is a relu network.
"""

import haiku as hk
import jax
import numpy as np

from benchmarks import jax_peer, workloads

NAME = "haiku"


def build(work):
  if work.cell != "lstm":
    return None
  names = [f"layer{i}" for i in range(work.layers)]

  def parts():
    embed = hk.Embed(work.vocab, work.embed, name="embed")
    cells = [hk.LSTM(work.hidden, name=name) for name in names]
    return embed, hk.DeepRNN(cells), hk.Linear(work.vocab, name="out")

  def whole(batch):
    embed, core, out = parts()
    x_TBD = embed(batch["inputs_BT"].T)
    h_TBH, _ = hk.dynamic_unroll(core, x_TBD, core.initial_state(work.batch))
    return out(h_TBH).swapaxes(0, 1)

  def one(carry, token_B):
    embed, core, out = parts()
    carry = core.initial_state(work.batch) if carry is None else carry
    h_BH, carry = core(embed(token_B), carry)
    return carry, out(h_BH)

  arrays = workloads.weights(work)
  params = {
    "embed": {"embeddings": arrays["embed"]},
    "out": {"w": arrays["out.weight"].T, "b": arrays["out.bias"]},
  }
  for name in names:
    own = workloads.layer(arrays, name)
    # [x h] goes through one map, whose gates stand in the order i g f o.
    w_GI = np.concatenate([own["weight_ih"], own["weight_hh"]], axis=1)
    b_G = _reorder(own["bias_ih"]).copy()
    b_G[2 * work.hidden : 3 * work.hidden] -= 1  # Haiku adds it when it runs
    params[f"{name}/linear"] = {"w": _reorder(w_GI).T, "b": b_G}

  def shared(grads):
    found = {
      "embed": grads["embed"]["embeddings"],
      "out.weight": grads["out"]["w"].T,
    }
    for i, name in enumerate(names):
      width = work.embed if i == 0 else work.hidden
      w_GI = _reorder(grads[f"{name}/linear"]["w"].T)
      found[f"{name}.weight_ih"] = w_GI[:, :width]
      found[f"{name}.weight_hh"] = w_GI[:, width:]
      found[f"{name}.bias_ih"] = _reorder(grads[f"{name}/linear"]["b"])
    return found

  def applied(function):
    pure = hk.without_apply_rng(hk.transform(function))
    return pure.apply

  return jax_peer.build(
    work, jax.tree.map(np.asarray, params), applied(whole), applied(one), shared
  )


def _reorder(packed):
  """i f g o to i g f o, and back."""
  i, f, g, o = np.split(packed, 4)
  return np.concatenate([i, g, f, o])
