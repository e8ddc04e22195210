"""PyTorch on the workloads, in the fastest of the ways tried here."""

import time

import torch
from torch import nn

from benchmarks import workloads

NAME = "torch"
LAYERS = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


def build(work):
  """The fastest of a few configurations, by a short trial of each."""
  if work.kind == "generate":
    return _generation(work)
  if work.kind == "evaluate":
    return _evaluation(work)
  trials = {
    f"Adam {name}": _training(work, {name: True})
    for name in ("fused", "foreach")
  }
  return _fastest(trials)


def _fastest(trials):
  took = {}
  for name, runner in trials.items():
    runner.run(1)
    began = time.perf_counter()
    runner.run(3)
    took[name] = time.perf_counter() - began
  best = min(took, key=took.get)
  return trials[best]._replace(note=best)


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


def _training(work, how):
  model, batch = _model(work), _data(work)
  optimizer = torch.optim.Adam(model.parameters(), lr=workloads.LR, **how)

  def run(n):
    for _ in range(n):
      optimizer.zero_grad(set_to_none=True)
      _loss(model, batch).backward()
      optimizer.step()

  def result():
    fresh = _model(work)
    loss = _loss(fresh, batch)
    loss.backward()
    found = {
      "embed": fresh.embed.weight.grad,
      "out.weight": fresh.out.weight.grad,
    }
    for name, parameter in fresh.named_parameters():
      part, _, leaf = name.rpartition(".")
      if "_l" in leaf and not leaf.startswith("bias_hh"):
        leaf, _, i = leaf.rpartition("_l")
        part = f"layer{i}" if part == "cells" else part
        found[f"{part}.{leaf}"] = parameter.grad
    return loss.item(), {name: grad.numpy() for name, grad in found.items()}

  return workloads.Runner(run, result)


def _evaluation(work):
  model, batch = _model(work).eval(), _data(work)

  def run(n):
    with torch.inference_mode():
      for _ in range(n):
        _loss(model, batch).item()

  def result():
    with torch.inference_mode():
      return _loss(model, batch).item(), {}

  return workloads.Runner(run, result)


def _generation(work):
  model = LM(work).eval()
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

  def result():
    with torch.inference_mode():
      return _loss(model, _data(work)).item(), {}

  return workloads.Runner(run, result)
