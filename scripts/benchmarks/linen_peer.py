"""Flax Linen on the workloads: `nn.RNN` around its own cells."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from benchmarks import jax_peer, workloads

NAME = "linen"
CELLS = {
  "rnn": nn.SimpleCell,
  "gru": nn.GRUCell,
  "lstm": nn.OptimizedLSTMCell,
}
# The gates in PyTorch's order, by the names of Flax's layers.
GATES = {"rnn": [""], "gru": ["r", "z", "n"], "lstm": ["i", "f", "g", "o"]}


class LM(nn.Module):
  work: workloads.Workload

  def setup(self):
    work = self.work
    self.embed = nn.Embed(work.vocab, work.embed)
    self.cells = [CELLS[work.cell](work.hidden) for _ in range(work.layers)]
    self.runs = [nn.RNN(cell) for cell in self.cells]
    self.out = nn.Dense(work.vocab)

  def __call__(self, batch):
    x_BTD = self.embed(batch["inputs_BT"])
    for run in self.runs:
      x_BTD = run(x_BTD)
    return self.out(x_BTD)

  def step(self, carry, token_B):
    x_BD = self.embed(token_B)
    if carry is None:
      shape = (self.work.batch, self.work.hidden)
      zeros = jnp.zeros(shape)
      carry = [(zeros, zeros) if self.work.cell == "lstm" else zeros]
      carry *= self.work.layers
    new = []
    for cell, own in zip(self.cells, carry, strict=True):
      own, x_BD = cell(own, x_BD)
      new.append(own)
    return new, self.out(x_BD)


class Seq2Seq(nn.Module):
  work: workloads.Workload

  def setup(self):
    work = self.work
    self.embed = nn.Embed(work.vocab, work.embed)
    self.cells = [CELLS[work.cell](work.hidden) for _ in range(2)]
    self.encoder = nn.RNN(self.cells[0], return_carry=True)
    self.decoder = nn.RNN(self.cells[1])
    self.out = nn.Dense(work.vocab)

  def __call__(self, batch):
    last, source_BSH = self.encoder(self.embed(batch["source_BS"]))
    h_BUH = self.decoder(self.embed(batch["inputs_BT"]), initial_carry=last)
    weights_BUS = nn.softmax(h_BUH @ source_BSH.swapaxes(1, 2))
    context_BUH = weights_BUS @ source_BSH
    return self.out(jnp.concatenate([h_BUH, context_BUH], -1))


def build(work):
  model = Seq2Seq(work) if work.source else LM(work)
  arrays = workloads.weights(work)
  names = [f"layer{i}" for i in range(work.layers)]
  names = ["encoder", "decoder"] if work.source else names
  params = {
    "embed": {"embedding": arrays["embed"]},
    "out": {"kernel": arrays["out.weight"].T, "bias": arrays["out.bias"]},
  }
  for i, name in enumerate(names):
    params[f"cells_{i}"] = _cell(work, workloads.layer(arrays, name))

  def logits(params, batch):
    return model.apply({"params": params}, batch)

  def step(params, carry, token_B):
    return model.apply({"params": params}, carry, token_B, method="step")

  def shared(grads):
    found = {
      "embed": grads["embed"]["embedding"],
      "out.weight": grads["out"]["kernel"].T,
    }
    for i, name in enumerate(names):
      own, gates = grads[f"cells_{i}"], GATES[work.cell]
      for leaf, side in (("weight_ih", "i"), ("weight_hh", "h")):
        found[f"{name}.{leaf}"] = np.concatenate(
          [own[side + gate]["kernel"].T for gate in gates]
        )
    return found

  return jax_peer.build(work, params, logits, step, shared)


def _cell(work, arrays):
  gates = GATES[work.cell]
  # The LSTM of Flax has its one bias on the state's side.
  first = "h" if work.cell == "lstm" else "i"
  split = {key: np.split(array, len(gates)) for key, array in arrays.items()}
  params = {}
  for g, gate in enumerate(gates):
    params["i" + gate] = {"kernel": split["weight_ih"][g].T}
    params["h" + gate] = {"kernel": split["weight_hh"][g].T}
    params[first + gate]["bias"] = split["bias_ih"][g]
  if work.cell == "gru":
    params["hn"]["bias"] = split["bias_hh"][2]
  return params
