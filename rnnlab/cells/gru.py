"""The gated recurrent unit; z replaces, and the reset's place is a choice.

  r_t = sigmoid(W_r x_t + U_r h_{t-1} + b_r)   (gate order: GATES)
  z_t = sigmoid(W_z x_t + U_z h_{t-1} + b_z)
  c_t = tanh(W_c x_t + b_c + U_c (r_t * h_{t-1}))          reset="before"
  c_t = tanh(W_c x_t + b_c + r_t * (U_c h_{t-1} + bh_c))   reset="after"
  h_t = (1 - z_t) * h_{t-1} + z_t * c_t

A small z carries the old state; the keep logit is -b_z. PyTorch writes
h_t = (1 - z) n + z h, where z keeps: negate the z rows to convert, exactly. The
two places of the reset cannot be converted into each other.
Source: Cho et al., 2014 (before); PyTorch and cuDNN (after).
"""

import jax
import jax.numpy as jnp

from rnnlab import cells, nn

GATES = "rzc"


def make(
  *,
  hidden: int,
  reset: str = "after",
  keep: dict | None = None,
  recurrent: str = "orthogonal",
  scale: float = 1.0,
  input: str = "xavier",
  bias: bool = True,
  initial: str = "zeros",
  dtype: str | None = None,
) -> cells.Cell:
  """A GRU cell of `hidden` units; carry and out are h_HB."""
  if reset not in ("before", "after"):
    raise ValueError(f"model.cell.reset is 'before' or 'after', not {reset!r}")
  learned = cells.learned(initial, "h0_H")
  scheme = cells.keep_scheme(keep, bias)

  def init(key, d_in):
    key, key_keep = jax.random.split(key)
    params = cells.packed(
      key,
      3,
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
      params["b_G"] = params["b_G"].at[hidden : 2 * hidden].set(z_H)
    if bias and reset == "after":
      params["bh_H"] = jnp.zeros(hidden)
    return params

  def carry(params, batch):
    return cells.initial(params, "h0_H", hidden, batch)

  def project(params, x_DN):
    return cells.project(params, x_DN, 3, dtype)

  def weights(params, apart):
    if reset == "after":
      return cells.blocks(params["u_GH"], 3, apart), params.get("bh_H")
    u_GH, u_HH = jnp.split(params["u_GH"], [2 * hidden])
    return cells.blocks(u_GH, 2, apart), u_HH

  def after(weights, h_HB, u, a, memory):
    blocks, bh_H = weights
    r_HB, z_HB, state_HB = cells.recur(blocks, h_HB, 3, dtype)
    if bias:
      state_HB = state_HB + bh_H[:, None]
    return u[0] + r_HB, u[1] + z_HB, u[2], state_HB

  def before(weights, h_HB, u, a, memory):
    return cells.add(u[:2], cells.recur(weights[0], h_HB, 2, dtype))

  def candidate(weights, h_HB, u, a, memory):
    r_HB = jax.nn.sigmoid(a[0][0])
    return u[2] + nn.product(weights[1], r_HB * h_HB, dtype)

  def update(h_HB, a, memory):
    if reset == "after":
      r_HB, z_HB, c_HB, state_HB = a[0]
      c_HB = c_HB + jax.nn.sigmoid(r_HB) * state_HB
    else:
      (_, z_HB), c_HB = a
    z_HB = jax.nn.sigmoid(z_HB)
    h_HB = (1 - z_HB) * h_HB + z_HB * jnp.tanh(c_HB)
    return h_HB, cells.output(h_HB, dtype)

  def gates(a):
    r_HB, z_HB, *_ = a[0]
    return {"reset": r_HB, "replace": z_HB}

  drive = (after,) if reset == "after" else (before, candidate)
  return cells.Cell(init, carry, project, drive, update, weights, gates)
