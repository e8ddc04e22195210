"""What gates hold on to, measured on the inputs that they read.

  half-life = log(1/2) / mean_t log k_t          k: the share of a state kept
  slope     = mean_t sigmoid(l) (1 - sigmoid(l))          l: a gate's own logit

The half-life is that of the direct path, in steps: what the blend alone would
keep, were nothing written back. A gate near 1 holds well and learns slowly: its
slope, at most 1/4, says how far its own logit can still move it. Averaging logs
makes this the geometric mean, so the path over T steps keeps 2^(-T/half-life)
exactly. A bias shows neither, since inputs and states move the gate too.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from rnnlab.metrics import Mean

# Logits beyond it are called large: the slope is below 5e-5.
LARGE = 10.0


def measure(recurrence, trace=None) -> dict[str, dict[str, Mean]]:
  """Sums over all real steps, by gate and measure: a Mean of arrays of H units.

  zero, one: how often the sigmoid is exactly that in the precision of the run;
  large: how often |logit| > LARGE; slope; and log_keep for the gate of the
  direct path. Add them up over batches with `add`. {} where nothing is gated.
  trace: the recurrence's own, if at hand.
  """
  cell = recurrence.cell
  if cell.gates is None:
    return {}
  trace = trace or recurrence.trace()
  gates = jax.vmap(cell.gates)(trace.activations)
  return {
    name: _sums(logits_THB, keep_logits(name, logits_THB), recurrence.mask_BT)
    for name, logits_THB in gates.items()
  }


def keep_logits(name, logits):
  """The logits of what a gate keeps of the old state; None if not its part."""
  role = name.rsplit("/", 1)[-1]
  return {"keep": logits, "replace": -logits}.get(role)


def _sums(logits_THB, keep_THB, mask_BT):
  T, _, B = logits_THB.shape
  mask_BT = jnp.ones((B, T), bool) if mask_BT is None else mask_BT
  real_T1B = mask_BT.T[:, None]
  count = jnp.sum(mask_BT, dtype=jnp.int32)

  def mean(x_THB):
    return Mean(jnp.sum(jnp.where(real_T1B, x_THB, 0), axis=(0, 2)), count)

  open_THB = jax.nn.sigmoid(logits_THB)
  sums = {
    "zero": mean((open_THB == 0).astype(jnp.float32)),
    "one": mean((open_THB == 1).astype(jnp.float32)),
    "large": mean((jnp.abs(logits_THB) > LARGE).astype(jnp.float32)),
    "slope": mean(open_THB * (1 - open_THB)),
  }
  if keep_THB is not None:
    # Of the logit: finite where the sigmoid has rounded to 1.
    sums["log_keep"] = mean(jax.nn.log_sigmoid(keep_THB))
  return sums


def add(sums, more):
  """Both together, in float64 on the host; sums is None at first."""
  more = jax.tree.map(
    lambda a: np.asarray(a, np.float64 if a.ndim else np.int64),
    jax.device_get(more),
  )
  return more if sums is None else jax.tree.map(np.add, sums, more)


def summary(sums) -> dict[str, dict]:
  """By gate: shares of saturated steps, `slope_H`, and `half_life_H` in steps.

  sums: of `measure`, on the host. half_life_H is there for the gate of the
  direct path, infinite where a unit lost nothing that its precision could tell.
  Raises ValueError where there was no real step.
  """
  found = {}
  for name, gate in sums.items():
    mean_H = {key: _mean(f"{name}: {key}", m) for key, m in gate.items()}
    found[name] = {
      "steps": int(gate["slope"].count),
      "zero": float(mean_H["zero"].mean()),
      "one": float(mean_H["one"].mean()),
      "large": float(mean_H["large"].mean()),
      "slope_H": mean_H["slope"],
    }
    if "log_keep" in mean_H:
      found[name]["half_life_H"] = half_life(mean_H["log_keep"])
  return found


def half_life(log_keep):
  """Steps after which half is left, of the mean log of what a step keeps."""
  with np.errstate(divide="ignore"):
    return np.abs(math.log(0.5) / np.asarray(log_keep))


def _mean(name, mean):
  if not mean.count:
    raise ValueError(f"{name}: there is no real step to measure")
  return mean.total / int(mean.count)
