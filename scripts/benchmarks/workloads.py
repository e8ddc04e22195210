"""What is timed: sizes, data and weights, the same for every library.

Weights are numpy arrays in PyTorch's names, layout and gate order; a library
that keeps them otherwise converts them, and its gradients back.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

GATES = {"rnn": 1, "gru": 3, "lstm": 4}
LR = 1e-3  # of Adam, with its usual 0.9, 0.999 and 1e-8


class Workload(NamedTuple):
  """One row of the table. float32, no dropout, no padding, mean loss."""

  title: str
  cell: str
  hidden: int
  batch: int
  steps: int  # T; U of an encoder-decoder; tokens to generate
  kind: str = "train"  # or "evaluate", "generate"
  layers: int = 1
  vocab: int = 96
  embed: int = 64
  source: int | None = None  # S of an encoder-decoder
  per_call: int = 1  # updates a compiled call, in rnnlab
  chunk: int | None = None  # steps between checkpoints, in rnnlab


class Runner(NamedTuple):
  """A workload in one library.

  result() is the loss and its gradients before the first update, {name: array}
  in the layout of `weights`; {} where the work has none. prepare() makes it
  ready to run and says what that took and which way was chosen. run(n), after
  it, does the work n times and waits.
  """

  result: Callable[[], tuple[float, dict]]
  prepare: Callable[[], "Prepared"]
  run: Callable[[int], Any]


class Prepared(NamedTuple):
  compile_seconds: float = 0.0
  temporary_bytes: int | None = None
  note: str = ""


LSTM = dict(cell="lstm", hidden=256, batch=64, steps=128)
NAMES = dict(cell="rnn", hidden=128, batch=32, steps=32, vocab=28, embed=128)
LONG = dict(cell="lstm", hidden=128, batch=8, steps=4096)

WORKLOADS = {
  "W1": Workload("char LM step, LSTM 256", **LSTM),
  "W2": Workload(
    "char LM step, 2 x LSTM 512",
    **LSTM | dict(hidden=512, batch=32, layers=2),
  ),
  "W3": Workload("char LM step, GRU 256", **LSTM | dict(cell="gru", steps=64)),
  "W4": Workload("names step, tanh 128", **NAMES),
  "W4x16": Workload("names, 16 steps a call", **NAMES, per_call=16),
  "W5": Workload("long step, LSTM 128, T 4096", **LONG),
  "W5c": Workload("long step, checkpointed", **LONG, chunk=64),
  "W6": Workload(
    "seq2seq step, GRU 128, dot attention",
    cell="gru",
    hidden=128,
    batch=64,
    steps=12,
    source=20,
    vocab=28,
    embed=128,
  ),
  "W7": Workload(
    "generate 1000 tokens, batch 1",
    **LSTM | dict(batch=1, steps=1000),
    kind="generate",
  ),
  "W7x64": Workload(
    "generate 1000 tokens, batch 64",
    **LSTM | dict(steps=1000),
    kind="generate",
  ),
  "W8": Workload("evaluation of W1", **LSTM, kind="evaluate"),
}


def weights(work: Workload) -> dict[str, np.ndarray]:
  """Uniform in +-1/sqrt(width), PyTorch's range; forget gates start at 1."""
  rng = np.random.default_rng(0)

  def draw(rows, width=None):
    shape = (rows,) if width is None else (rows, width)
    bound = (width or work.hidden) ** -0.5
    return rng.uniform(-bound, bound, shape).astype(np.float32)

  H, gates = work.hidden, GATES[work.cell] * work.hidden
  arrays = {"embed": rng.standard_normal((work.vocab, work.embed), np.float32)}
  names = [f"layer{i}" for i in range(work.layers)]
  for i, name in enumerate(["encoder", "decoder"] if work.source else names):
    width = work.embed if i == 0 or work.source else H
    arrays[f"{name}.weight_ih"] = draw(gates, width)
    arrays[f"{name}.weight_hh"] = draw(gates, H)
    arrays[f"{name}.bias_ih"] = draw(gates)
    arrays[f"{name}.bias_hh"] = np.zeros(gates, np.float32)
    if work.cell == "lstm":
      arrays[f"{name}.bias_ih"][H : 2 * H] += 1
    if work.cell == "gru":  # the one bias that the reset gate scales
      arrays[f"{name}.bias_hh"][2 * H :] = draw(H)
  wide = 2 * H if work.source else H
  return arrays | {
    "out.weight": draw(work.vocab, wide),
    "out.bias": draw(work.vocab),
  }


def layer(arrays: dict, name: str) -> dict:
  """The arrays of one layer, under their own names."""
  start = f"{name}."
  return {
    key.removeprefix(start): array
    for key, array in arrays.items()
    if key.startswith(start)
  }


def data(work: Workload) -> dict[str, np.ndarray]:
  """Random tokens: inputs_BT, targets_BT and, if there is one, source_BS."""
  rng = np.random.default_rng(1)

  def draw(steps):
    return rng.integers(work.vocab, size=(work.batch, steps), dtype=np.int32)

  tokens = draw(work.steps + 1)
  arrays = {"inputs_BT": tokens[:, :-1], "targets_BT": tokens[:, 1:]}
  return arrays | ({"source_BS": draw(work.source)} if work.source else {})
