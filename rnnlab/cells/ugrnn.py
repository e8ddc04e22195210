"""One gate that blends the old state with a candidate: the lecture's update.

  [z c] = W x_t + U h_{t-1} + b                (gate order: GATES)
  h_t = (1 - sigmoid(z)) * h_{t-1} + sigmoid(z) * tanh(c)

Here z replaces: a small z carries the old state. The keep logit is -b_z.
Source: Collins, Sohl-Dickstein and Sussillo, 2017 (the UGRNN).
"""

import jax
import jax.numpy as jnp

from rnnlab import cells

GATES = "zc"


def make(
  *,
  hidden: int,
  keep: dict | None = None,
  recurrent: str = "orthogonal",
  scale: float = 1.0,
  input: str = "xavier",
  bias: bool = True,
  initial: str = "zeros",
  dtype: str | None = None,
) -> cells.Cell:
  """A single-gate cell of `hidden` units; carry and out are h_HB."""
  learned = cells.learned(initial, "h0_H")
  scheme = cells.keep_scheme(keep, bias)

  def init(key, d_in):
    key, key_keep = jax.random.split(key)
    params = cells.packed(
      key,
      2,
      hidden,
      d_in,
      recurrent=recurrent,
      scale=scale,
      input=input,
      bias=bias,
      learned=learned,
    )
    if scheme:
      z_H = -scheme.draw(key_keep, hidden)
      params["b_G"] = jnp.concatenate([z_H, jnp.zeros(hidden)])
    return params

  def carry(params, batch):
    return cells.initial(params, "h0_H", hidden, batch)

  def project(params, x_DN):
    return cells.project(params, x_DN, 2, dtype)

  def weights(params, apart):
    return cells.blocks(params["u_GH"], 2, apart)

  def drive(blocks, h_HB, u, a, memory):
    return cells.add(u, cells.recur(blocks, h_HB, 2, dtype))

  def update(h_HB, a, memory):
    z_HB, c_HB = a[0]
    z_HB = jax.nn.sigmoid(z_HB)
    h_HB = (1 - z_HB) * h_HB + z_HB * jnp.tanh(c_HB)
    return h_HB, cells.output(h_HB, dtype)

  def gates(a):
    return {"replace": a[0][0]}

  return cells.Cell(init, carry, project, (drive,), update, weights, gates)
