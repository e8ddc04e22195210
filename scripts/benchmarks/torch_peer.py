"""PyTorch on the workloads, in the fastest of the ways tried here."""

import time

import torch
from torch import nn

from benchmarks import workloads

NAME = "torch"
LAYERS = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


def build(work):
  if work.kind == "generate":
    return _generation(work)
  if work.kind == "evaluate":
    return _evaluation(work)
  return _training(work)


class LM(nn.Module):
  def __init__(self, work):
    super().__init__()
    self.embed = nn.Embedding(work.vocab, work.embed)
    self.cells = LAYERS[work.cell](
      work.embed, work.hidden, num_layers=work.layers
    )
    self.out = nn.Linear(work.hidden, work.vocab)
    arrays = workloads.weights(work)
    for i in range(work.layers):
      _fill(self.cells, workloads.layer(arrays, f"layer{i}"), f"_l{i}")
    _fill_ends(self, arrays)

  def forward(self, batch):
    # Time first is the layout that PyTorch computes in.
    h_TBH, _ = self.cells(self.embed(batch["inputs_TB"]))
    return self.out(h_TBH)


class Seq2Seq(nn.Module):
  def __init__(self, work):
    super().__init__()
    self.embed = nn.Embedding(work.vocab, work.embed)
    cell = LAYERS[work.cell]
    self.encoder = cell(work.embed, work.hidden, batch_first=True)
    self.decoder = cell(work.embed, work.hidden, batch_first=True)
    self.out = nn.Linear(2 * work.hidden, work.vocab)
    arrays = workloads.weights(work)
    for name in ("encoder", "decoder"):
      _fill(getattr(self, name), workloads.layer(arrays, name), "_l0")
    _fill_ends(self, arrays)

  def forward(self, batch):
    source_BSH, last = self.encoder(self.embed(batch["source_TB"].T))
    h_BUH, _ = self.decoder(self.embed(batch["inputs_TB"].T), last)
    scores_BUS = h_BUH @ source_BSH.transpose(1, 2)
    context_BUH = torch.softmax(scores_BUS, -1) @ source_BSH
    logits_BUV = self.out(torch.cat([h_BUH, context_BUH], -1))
    return logits_BUV.transpose(0, 1)


def _fill(cells, arrays, suffix):
  for name, array in arrays.items():
    getattr(cells, name + suffix).data = torch.tensor(array)


def _fill_ends(model, arrays):
  model.embed.weight.data = torch.tensor(arrays["embed"])
  model.out.weight.data = torch.tensor(arrays["out.weight"])
  model.out.bias.data = torch.tensor(arrays["out.bias"])


def _data(work):
  """Tokens, time first and contiguous."""
  return {
    name[:-2] + "TB": torch.tensor(array.T.copy()).long()
    for name, array in workloads.data(work).items()
  }


def _loss(model, batch):
  logits = model(batch)
  targets = batch["targets_TB"].reshape(-1)
  return nn.functional.cross_entropy(
    logits.reshape(-1, logits.shape[-1]), targets
  )


def _model(work):
  return Seq2Seq(work) if work.source else LM(work)


def _training(work):
  model, batch = _model(work), _data(work)
  optimizer = None

  def prepare():
    """Takes the faster of PyTorch's two Adams, by a short trial of each."""
    nonlocal optimizer
    took = {}
    for name in ("fused", "foreach"):
      adam = torch.optim.Adam(
        model.parameters(), lr=workloads.LR, **{name: True}
      )
      optimizer = adam
      run(1)
      began = time.perf_counter()
      run(3)
      took[time.perf_counter() - began] = adam, f"Adam {name}"
    optimizer, note = took[min(took)]
    return workloads.Prepared(note=note)

  def run(n):
    for _ in range(n):
      optimizer.zero_grad(set_to_none=True)
      _loss(model, batch).backward()
      optimizer.step()

  def result():
    loss = _loss(model, batch)
    loss.backward()
    found = {
      "embed": model.embed.weight.grad,
      "out.weight": model.out.weight.grad,
    }
    for name, parameter in model.named_parameters():
      part, _, leaf = name.rpartition(".")
      if "_l" in leaf and not leaf.startswith("bias_hh"):
        leaf, _, i = leaf.rpartition("_l")
        part = f"layer{i}" if part == "cells" else part
        found[f"{part}.{leaf}"] = parameter.grad
    return loss.item(), {name: grad.numpy() for name, grad in found.items()}

  return workloads.Runner(result, prepare, run)


def _forward(work):
  """(model, the loss of its data without a graph)."""
  model, batch = _model(work).eval(), _data(work)

  def loss():
    with torch.inference_mode():
      return _loss(model, batch).item()

  return model, loss


def _evaluation(work):
  _, loss = _forward(work)

  def run(n):
    for _ in range(n):
      loss()

  return workloads.Runner(lambda: (loss(), {}), workloads.Prepared, run)


def _generation(work):
  model, loss = _forward(work)
  first_B = _data(work)["inputs_TB"][0]

  def run(n):
    with torch.inference_mode():
      for _ in range(n):
        token_B, carry, tokens = first_B, None, []
        for _ in range(work.steps):
          h_1BH, carry = model.cells(model.embed(token_B)[None], carry)
          probs_BV = torch.softmax(model.out(h_1BH[0]), -1)
          token_B = torch.multinomial(probs_BV, 1)[:, 0]
          tokens.append(token_B)
        torch.stack(tokens)

  return workloads.Runner(lambda: (loss(), {}), workloads.Prepared, run)
