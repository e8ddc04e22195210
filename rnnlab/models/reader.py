"""A stack of cells that reads a sequence, and an affine readout of its states.

  y_t = W_o h_t + b_o

at every step, or at the few that are asked for. The readout is the same for a
classification and a regression: the caller takes y for logits or for values.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rnnlab import cells, nn, scan
from rnnlab import layers as stacks
from rnnlab.analysis import memory
from rnnlab.models import check_sizes


class Reader(NamedTuple):
  """A model of sequences: functions of params. See the functions in `make`."""

  init: Any  # (key) -> params
  apply: Any  # (params, x, carry, **options) -> carry, y_BUV
  recurrence: Any  # (params, x, loss, mask_BT) -> layers.Recurrence


def make(
  *,
  inputs: int,
  outputs: int,
  hidden: int,
  embed: int | None = None,
  layers: int = 1,
  chunk: int | str | None = None,
  cell: dict,
) -> Reader:
  """Builds the model.

  inputs: the width of the input vectors; a token stands for a one-hot one.
  embed: a learned linear map to so many dimensions first; None reads the
  inputs as they are. chunk: that of `scan.unroll`: less memory for the backward
  pass, for some recomputation; or "auto:512MiB" as in `lm.make`. cell: settings
  of `cells.make`, the name included.
  """
  check_sizes(inputs=inputs, outputs=outputs)
  check_sizes(hidden=hidden, embed=embed, layers=layers)
  memory.budget_of(chunk)
  stack = tuple(cells.make(hidden=hidden, **cell) for _ in range(layers))

  def init(key):
    key_e, key_c, key_o = jax.random.split(key, 3)
    params = {
      "cells": stacks.init(stack, key_c, embed or inputs),
      "out": nn.linear(key_o, outputs, hidden),
    }
    if embed:
      params["embed_VD"] = jax.random.normal(key_e, (inputs, embed))
    return params

  def inputs_of(params, x):
    if embed:
      return stacks.embedded(params["embed_VD"], x)
    integer = jnp.issubdtype(x.dtype, jnp.integer)
    return scan.Lookup(jnp.eye(inputs), x) if integer else x

  def readout(params, h_BTH):
    y_BTV = nn.product(h_BTH, params["out"]["w_VH"].T)
    return y_BTV + jnp.broadcast_to(params["out"]["b_V"], y_BTV.shape)

  def apply(params, x, carry=None, *, at=slice(None), **options):
    """Reads x from `carry` on, and reads out the steps of the slice `at`.

    x: tokens_BT or x_BTV. Returns (carry, y_BUV), U the steps of `at`: no
    other has a readout. options: those of `scan.unroll`.
    """
    x = inputs_of(params, x)
    steps_at_once = memory.chunk_of(chunk, stack, params["cells"], x)
    options = {"chunk": steps_at_once} | options
    carry, h_BTH = stacks.unroll(stack, params["cells"], x, carry, **options)
    return carry, readout(params, h_BTH[:, at])

  def recurrence(params, x, loss, mask_BT):
    """All layers as one recurrence, for an analysis.

    loss(y_BTV) -> loss_BT: what is due at each step, 0 where nothing is.
    """
    return stacks.Recurrence(
      "stack",
      stacks.as_cell(stack),
      params["cells"],
      inputs_of(params, x),
      mask_BT=mask_BT,
      loss=lambda h_BTH: loss(readout(params, h_BTH)),
    )

  return Reader(init, apply, recurrence)
