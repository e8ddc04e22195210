"""What a run sees of its recurrences while it trains: `train.monitor`.

By recurrence, on the first validation examples, the same ones every time, with
the parameters of the last update and without dropout:

  gradient/D         log10 of |dL/ds_{T-d}|, for d = 1, 2, 4 ... steps before
                     the last one, whose loss is L; the median row
  GATE/half_life/P   steps, of the unit at that percentile
  GATE/slope, large  of the gate's sigmoid; the share of |logit| > 10
  slope, saturated   of a cell without gates: the same of its tanh
  norm, norm_max     of the state that a step reads
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from rnnlab import instruments
from rnnlab.analysis import path, products, retention, sensitivity
from rnnlab.instruments.retention import half_life

# Examples that are looked at.
FIRST = 16
PERCENT = 5, 50, 95


def batch(task, params) -> dict:
  """The examples that are watched; refuses a task that has nothing to watch.

  params: arrays or their shapes.
  """
  if task.recurrences is None:
    raise ValueError(
      "train.monitor: this task does not say which recurrences it runs"
    )
  if not task.texts["validation"]:
    raise ValueError(
      "train.monitor looks at validation examples, but there are none"
    )
  return instruments.first_batch(task, params, "validation", FIRST)


def measure(task, params, batch) -> dict:
  """What `row` needs, by recurrence: traceable."""
  found = task.recurrences(params, task.carry(params), batch)
  return {str(read.name): _measure(read) for read in found}


def _measure(read):
  trace = read.trace()
  followed = path.follow(read, trace)
  real_TB = followed.steps.real_B
  log_TB = products.log_gradients(followed)
  norm_TB = jnp.linalg.norm(followed.steps.state_NB, axis=1)
  norm_TB = jnp.where(real_TB, norm_TB, 0)
  activity = None
  if followed.gates is None:
    activity = [jnp.mean(x_B) for x_B in sensitivity.activity(followed)]
  return {
    "gradient": {
      str(2**i): log_TB[2**i - 1] for i in range(len(log_TB).bit_length())
    },
    "gates": retention.measure(read, trace),
    "activity": activity,
    "norm": jnp.sum(norm_TB) / jnp.sum(real_TB),
    "norm_max": jnp.max(norm_TB),
  }


def row(measured) -> dict[str, float]:
  """The figures of a row of metrics.jsonl, "monitor/<recurrence>/<figure>"."""
  figures = {}
  for name, found in jax.device_get(measured).items():
    own = {}
    for distance, log_B in found["gradient"].items():
      if len(there_B := log_B[~np.isnan(log_B)]):
        median = np.quantile(there_B, 0.5, method="inverted_cdf")
        own[f"gradient/{distance}"] = float(median) / math.log(10)
    gates = retention.summary(retention.add(None, found["gates"]))
    for gate, of in gates.items():
      for percent in PERCENT if "half_life_H" in of else ():
        value = half_life(of, percent / 100)
        own[f"{gate}/half_life/{percent}"] = value
      own[f"{gate}/slope"] = float(of["slope_H"].mean())
      own[f"{gate}/large"] = of["large"]
    if found["activity"]:
      own |= dict(zip(("saturated", "slope"), found["activity"], strict=True))
    own |= {key: found[key] for key in ("norm", "norm_max")}
    figures |= {f"monitor/{name}/{key}": float(v) for key, v in own.items()}
  return figures
