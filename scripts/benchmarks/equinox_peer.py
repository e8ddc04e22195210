"""Equinox on the workloads that it has the cell for, scanned and vmapped."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import jax_peer, workloads

NAME = "equinox"
CELLS = {"gru": eqx.nn.GRUCell, "lstm": eqx.nn.LSTMCell}


def build(work):
  if work.cell not in CELLS:
    return None
  arrays = workloads.weights(work)
  names = [f"layer{i}" for i in range(work.layers)]
  names = ["encoder", "decoder"] if work.source else names
  params = {
    "embed": arrays["embed"],
    "cells": [_cell(work, i, arrays, name) for i, name in enumerate(names)],
    "out": arrays["out.weight"],
    "bias": arrays["out.bias"],
  }

  def start():
    zeros = jnp.zeros(work.hidden)
    return (zeros, zeros) if work.cell == "lstm" else zeros

  def visible(carry):
    return carry[0] if work.cell == "lstm" else carry

  def scan(cell, carry, x_TD):
    def body(carry, x_D):
      carry = cell(x_D, carry)
      return carry, visible(carry)

    return jax.lax.scan(body, carry, x_TD)

  def example(params, batch):
    """One sequence, as Equinox writes models; vmap makes the batch."""
    x_TD = params["embed"][batch["inputs_BT"]]
    if not work.source:
      for cell in params["cells"]:
        _, x_TD = scan(cell, start(), x_TD)
      return x_TD @ params["out"].T + params["bias"]
    encoder, decoder = params["cells"]
    source_SD = params["embed"][batch["source_BS"]]
    last, source_SH = scan(encoder, start(), source_SD)
    _, h_UH = scan(decoder, last, x_TD)
    context_UH = jax.nn.softmax(h_UH @ source_SH.T) @ source_SH
    wide = jnp.concatenate([h_UH, context_UH], -1)
    return wide @ params["out"].T + params["bias"]

  def one(params, carry, token):
    x_D, new = params["embed"][token], []
    carry = [start()] * work.layers if carry is None else carry
    for cell, own in zip(params["cells"], carry, strict=True):
      new.append(cell(x_D, own))
      x_D = visible(new[-1])
    return new, x_D @ params["out"].T + params["bias"]

  def step(params, carry, token_B):
    axes = None, None if carry is None else 0, 0
    return jax.vmap(one, axes)(params, carry, token_B)

  def shared(grads):
    found = {"embed": grads["embed"], "out.weight": grads["out"]}
    for name, cell in zip(names, grads["cells"], strict=True):
      found[f"{name}.weight_ih"] = cell.weight_ih
      found[f"{name}.weight_hh"] = cell.weight_hh
      found[f"{name}.bias_ih"] = cell.bias
    return found

  logits = jax.vmap(example, (None, 0))
  return jax_peer.build(work, params, logits, step, shared)


def _cell(work, i, arrays, name):
  own = workloads.layer(arrays, name)
  width = own["weight_ih"].shape[1]
  cell = CELLS[work.cell](width, work.hidden, key=jax.random.key(i))
  names = ["weight_ih", "weight_hh", "bias"]
  values = [own["weight_ih"], own["weight_hh"], own["bias_ih"]]
  if work.cell == "gru":
    names.append("bias_n")
    values.append(np.split(own["bias_hh"], 3)[2])
  return eqx.tree_at(
    lambda cell: [getattr(cell, n) for n in names],
    cell,
    [jnp.asarray(v) for v in values],
  )
