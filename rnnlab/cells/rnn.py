"""The plain recurrent network.

  a_t = W x_t + U h_{t-1} + b
  h_t = tanh(a_t)   or   relu(a_t)

Source: Elman, "Finding structure in time", 1990; with relu, an identity U and
zero b: Le, Jaitly and Hinton, 2015 (the IRNN).
"""

import jax
import jax.numpy as jnp

from rnnlab import cells, nn

GATES = "h"


def make(
  *,
  hidden: int,
  activation: str = "tanh",
  recurrent: str = "orthogonal",
  scale: float = 1.0,
  input: str = "xavier",
  bias: bool = True,
  initial: str = "zeros",
  dtype: str | None = None,
) -> cells.Cell:
  """A tanh or relu cell of `hidden` units; carry and out are h_HB."""
  if activation not in ("tanh", "relu"):
    raise ValueError(
      f"model.cell.activation is 'tanh' or 'relu', not {activation!r}"
    )
  act = {"tanh": jnp.tanh, "relu": jax.nn.relu}[activation]
  learned = cells.learned(initial, "h0_H")

  def init(key, d_in):
    return cells.packed(
      key,
      1,
      hidden,
      d_in,
      recurrent=recurrent,
      scale=scale,
      input=input,
      bias=bias,
      learned=learned,
    )

  def carry(params, batch):
    return cells.initial(params, "h0_H", hidden, batch)

  def project(params, x_DN):
    (u_HN,) = cells.project(params, x_DN, 1, dtype)
    return u_HN

  def weights(params, apart):
    return params["u_GH"]

  def drive(u_HH, h_HB, u_HB, a, memory):
    return u_HB + nn.product(u_HH, h_HB, dtype)

  def update(h_HB, a, memory):
    h_HB = act(a[0])
    return h_HB, cells.output(h_HB, dtype)

  return cells.Cell(init, carry, project, (drive,), update, weights)
