"""The long short-term memory, four gates packed in one product.

  [i f q o] = W x_t + U h_{t-1} + b            (gate order: GATES)
  c_t = sigmoid(f) * c_{t-1} + sigmoid(i) * tanh(q)
  h_t = sigmoid(o) * tanh(c_t)

The carry is the pair (h, c): both are needed to go on. The keep logit is b_f.
Source: Hochreiter and Schmidhuber, 1997; forget gate: Gers et al., 2000.
"""

import jax
import jax.numpy as jnp

from rnnlab import cells

GATES = "ifqo"


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
  """An LSTM cell of `hidden` units; the carry is (h_HB, c_HB), out is h_HB."""
  learned = cells.learned(initial, "h0_H", "c0_H")
  scheme = cells.keep_scheme(keep, bias)

  def init(key, d_in):
    key, key_keep = jax.random.split(key)
    params = cells.packed(
      key,
      4,
      hidden,
      d_in,
      recurrent=recurrent,
      scale=scale,
      input=input,
      bias=bias,
      learned=learned,
    )
    if scheme:
      keep_H = scheme.draw(key_keep, hidden)
      i_H = -keep_H if scheme.opposes else jnp.zeros(hidden)
      rest_H = jnp.zeros(hidden)
      params["b_G"] = jnp.concatenate([i_H, keep_H, rest_H, rest_H])
    return params

  def carry(params, batch):
    return tuple(
      cells.initial(params, name, hidden, batch) for name in ("h0_H", "c0_H")
    )

  def project(params, x_DN):
    return cells.project(params, x_DN, 4, dtype)

  def weights(params, apart):
    return cells.blocks(params["u_GH"], 4, apart)

  def drive(blocks, carry, u, a, memory):
    h_HB, _ = carry
    return cells.add(u, cells.recur(blocks, h_HB, 4, dtype))

  def update(carry, a, memory):
    _, c_HB = carry
    i, f, q, o = a[0]
    c_HB = jax.nn.sigmoid(f) * c_HB + jax.nn.sigmoid(i) * jnp.tanh(q)
    h_HB = jax.nn.sigmoid(o) * jnp.tanh(c_HB)
    return (h_HB, c_HB), cells.output(h_HB, dtype)

  def gates(a):
    i, f, _, o = a[0]
    return {"keep": f, "input": i, "output": o}

  return cells.Cell(init, carry, project, (drive,), update, weights, gates)
