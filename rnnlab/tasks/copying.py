"""Recall symbols after a lag: what the gates keep decides.

  read    2 0 5 . . . . . . > . .
  recall  - - - - - - - - - 2 0 5

`items` symbols, `lag` blanks, a go mark; from it on, the symbols in order. With
loss="recall" these steps alone are supervised; with "all" every step is, and
before the go mark blanks are due. Source: Hochreiter and Schmidhuber, 1997;
with the loss on all steps: Arjovsky, Shah and Bengio, 2016.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from rnnlab import settings
from rnnlab.analysis import context
from rnnlab.data import generated
from rnnlab.metrics import Mean, cross_entropy
from rnnlab.models import reader
from rnnlab.tasks import Task
from rnnlab.wiring import CAUSAL


def make(
  *,
  model: dict,
  items: int = 1,
  lag: int = 100,
  symbols: int = 8,
  loss: str = "recall",
  batch_size: int = 32,
  eval_batch_size: int = 256,
  validation: int = 512,
  test: int = 512,
  seed: int = 0,
  data: bool = True,
) -> Task:
  """Builds the task.

  symbols: how many there are. loss: "recall" or "all". validation, test: how
  many examples. seed: of all examples, 0 <= seed < 2**32. model: settings of
  `reader.make`. data: False leaves `generate` alone. The fact `memoryless` is
  the nll without a memory: of a guess wherever a symbol is due. Raises
  ValueError by name.
  """
  least = {"items": (items, 1), "lag": (lag, 0), "symbols": (symbols, 2)}
  for name, (value, limit) in least.items():
    if value < limit:
      raise ValueError(f"task.{name} must be at least {limit}, not {value}")
  if loss not in ("recall", "all"):
    raise ValueError(f"task.loss is 'recall' or 'all', not {loss!r}")
  steps = items + lag + items
  supervised = items if loss == "recall" else steps
  draw = _draw(items, lag, symbols, supervised)
  # A blank is a class only where blanks are to be predicted.
  sizes = {"inputs": symbols + 2, "outputs": symbols + (loss == "all")}
  model = reader.make(
    **settings.bind(reader.make, "model", model, positional=sizes), **sizes
  )
  at = slice(steps - supervised, steps)
  loss_of, report, apply = _losses(model, at, items)
  of_data = {}
  if data:
    of_data = generated.of_task(
      draw,
      seed=seed,
      batch_size=batch_size,
      eval_batch_size=eval_batch_size,
      validation=validation,
      test=test,
      facts={
        "steps": steps,
        "memoryless": items * math.log(symbols) / supervised,
      },
    )

  def recurrences(params, carry, batch):
    def due(y_BTV):
      nll_BU = cross_entropy(y_BTV[:, at], batch["targets_BU"])
      return jnp.pad(nll_BU, ((0, 0), (steps - supervised, 0)))

    inputs_BT = batch["inputs_BT"][:, :steps]
    there_BT = jnp.broadcast_to(batch["example_B"][:, None], inputs_BT.shape)
    return [model.recurrence(params, inputs_BT, due, there_BT)]

  def contexts(params):
    def f(x_BTV):
      return model.apply(params, x_BTV)[1]

    return [context.Claim("recall", f, context.tokens(symbols + 2), CAUSAL)]

  run = jax.jit(apply)

  def generate(params, key, prompts):
    """Fresh examples of the numbers `prompts`: what was due and what came.

    key is not used. logprob: of all that is due in the recall, in nats.
    """
    del key
    rows = draw(generated.rng(seed, "shown"), max(prompts) + 1)
    logits_BUV = jax.device_get(run(params, rows["inputs_BT"]))[:, -items:]
    due_BU, said_BU = rows["targets_BU"][:, -items:], logits_BUV.argmax(-1)
    nll_BU = np.asarray(cross_entropy(logits_BUV, due_BU))
    return [
      {
        "input": f"{_text(due_BU[b], symbols)}, {lag} blanks, go",
        "target": _text(due_BU[b], symbols),
        "prediction": _text(said_BU[b], symbols),
        "logprob": -float(nll_BU[b].sum()),
      }
      for b in prompts
    ]

  return Task(
    vocab=None,
    init=model.init,
    carry=lambda params: (),
    loss=loss_of,
    report=report,
    generate=generate,
    reads="example",
    unit="symbols",
    recurrences=recurrences,
    contexts=contexts,
    **of_data,
  )


def _draw(items, lag, symbols, supervised):
  blank, go = symbols, symbols + 1

  def draw(rng, n):
    items_BU = rng.integers(symbols, size=(n, items), dtype=np.int32)
    inputs_BT = np.full((n, items + lag + items), blank, np.int32)
    targets_BT = inputs_BT.copy()
    inputs_BT[:, :items] = targets_BT[:, -items:] = items_BU
    inputs_BT[:, items + lag] = go
    return {"inputs_BT": inputs_BT, "targets_BU": targets_BT[:, -supervised:]}

  return draw


def _text(ids, symbols):
  return " ".join(str(i) if i < symbols else "." for i in ids)


def _losses(model, at, items):
  def apply(params, inputs_BT):
    # What stands behind the last step reaches nothing before it: no mask.
    return model.apply(params, inputs_BT, at=at)[1]

  def nll_of(params, batch):
    targets_BU = batch["targets_BU"]
    logits_BUV = apply(params, batch["inputs_BT"])
    there_BU = jnp.broadcast_to(batch["example_B"][:, None], targets_BU.shape)
    nll = Mean.of(cross_entropy(logits_BUV, targets_BU), there_BU)
    return nll, logits_BUV

  def loss(params, carry, batch, key):
    nll, _ = nll_of(params, batch)
    return nll, (carry, {"nll": nll})

  def report(params, carry, batch):
    nll, logits_BUV = nll_of(params, batch)
    right_BU = logits_BUV.argmax(-1) == batch["targets_BU"]
    right_BU, example_B = right_BU[:, -items:], batch["example_B"]
    there_BU = jnp.broadcast_to(example_B[:, None], right_BU.shape)
    return carry, {
      "nll": nll,
      "accuracy": Mean.of(right_BU, there_BU),
      "exact_match": Mean.of(right_BU.all(1), example_B),
    }

  return loss, report, apply
