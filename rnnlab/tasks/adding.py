"""Add two numbers out of many: regression on what was read long ago.

  value   .41 .83 .07 .52 .96 .18 .33 .70
  mark      0   1   0   0   0   0   1   0     -> .83 + .33, after the last step

One mark stands in each half. Source: Hochreiter and Schmidhuber, 1997.
"""

import jax
import jax.numpy as jnp
import numpy as np

from rnnlab import settings
from rnnlab.analysis import context
from rnnlab.data import generated
from rnnlab.metrics import Mean
from rnnlab.models import reader
from rnnlab.tasks import Task
from rnnlab.wiring import CAUSAL

# An answer within it counts as right: as in the source.
TOLERANCE = 0.04


def make(
  *,
  model: dict,
  length: int = 100,
  batch_size: int = 32,
  eval_batch_size: int = 256,
  validation: int = 512,
  test: int = 512,
  seed: int = 0,
  data: bool = True,
) -> Task:
  """Builds the task.

  length: of a sequence, in steps. The loss is the squared error. The fact
  `memoryless` is that of the best constant, 1: the variance of the sum of two
  uniform numbers, 1/6. The rest as in `copying`.
  """
  if length < 2:
    raise ValueError(f"task.length must be at least 2, not {length}")
  sizes = {"inputs": 2, "outputs": 1}
  model = reader.make(
    **settings.bind(reader.make, "model", model, positional=sizes), **sizes
  )
  draw = _draw(length)
  loss, report, apply = _losses(model, length)
  of_data = {}
  if data:
    of_data = generated.of_task(
      draw,
      seed=seed,
      batch_size=batch_size,
      eval_batch_size=eval_batch_size,
      validation=validation,
      test=test,
      facts={"steps": length, "memoryless": 1 / 6},
    )

  def recurrences(params, carry, batch):
    def due(y_BTV):
      error_B = y_BTV[:, length - 1, 0] - batch["targets_B"]
      return jnp.pad(jnp.square(error_B)[:, None], ((0, 0), (length - 1, 0)))

    inputs_BTD = batch["inputs_BTD"][:, :length]
    there_BT = jnp.broadcast_to(
      batch["example_B"][:, None], inputs_BTD.shape[:2]
    )
    return [model.recurrence(params, inputs_BTD, due, there_BT)]

  def contexts(params):
    def f(x_BTV):
      return model.apply(params, x_BTV)[1]

    return [context.Claim("sum", f, context.vectors(2), CAUSAL)]

  run = jax.jit(apply)

  def generate(params, key, prompts):
    """Fresh examples of the numbers `prompts`: what was due and what came."""
    del key
    rows = draw(generated.rng(seed, "shown"), max(prompts) + 1)
    said_B = jax.device_get(run(params, rows["inputs_BTD"]))
    samples = []
    for b in prompts:
      value_T, mark_T = rows["inputs_BTD"][b].T
      marked = [f"{value_T[t]:.4f} at step {t}" for t in np.flatnonzero(mark_T)]
      samples.append(
        {
          "input": f"{' + '.join(marked)}, of {length}",
          "target": float(rows["targets_B"][b]),
          "prediction": float(said_B[b]),
        }
      )
    return samples

  return Task(
    vocab=None,
    init=model.init,
    carry=lambda params: (),
    loss=loss,
    report=report,
    generate=generate,
    reads="example",
    metric="mse",
    unit="sums",
    recurrences=recurrences,
    contexts=contexts,
    **of_data,
  )


def _draw(length):
  half = length // 2

  def draw(rng, n):
    # All numbers of a row at once, so that no row depends on n.
    drawn_BN = rng.random((n, length + 2), np.float32)
    value_BT = drawn_BN[:, :length]
    sizes_2 = np.array([half, length - half], np.float32)
    marks_B2 = np.floor(drawn_BN[:, length:] * sizes_2).astype(int) + [0, half]
    inputs_BTD = np.stack([value_BT, np.zeros_like(value_BT)], axis=-1)
    inputs_BTD[np.arange(n)[:, None], marks_B2, 1] = 1
    chosen_B2 = np.take_along_axis(value_BT, marks_B2, axis=1)
    return {"inputs_BTD": inputs_BTD, "targets_B": chosen_B2.sum(1)}

  return draw


def _losses(model, length):
  def apply(params, inputs_BTD):
    # What stands behind the last step reaches nothing before it: no mask.
    at = slice(length - 1, length)
    return model.apply(params, inputs_BTD, at=at)[1][:, 0, 0]

  def loss(params, carry, batch, key):
    error_B = apply(params, batch["inputs_BTD"]) - batch["targets_B"]
    mse = Mean.of(jnp.square(error_B), batch["example_B"])
    return mse, (carry, {"mse": mse})

  def report(params, carry, batch):
    error_B = apply(params, batch["inputs_BTD"]) - batch["targets_B"]
    example_B = batch["example_B"]
    return carry, {
      "mse": Mean.of(jnp.square(error_B), example_B),
      f"within_{TOLERANCE}": Mean.of(jnp.abs(error_B) < TOLERANCE, example_B),
    }

  return loss, report, apply
