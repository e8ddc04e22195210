"""Step Jacobians of the cells as they are derived on paper.

One example: vectors, and matrices J_HH[i, j] = d new_i / d old_j. The general
way, for any cell, is `path.jacobian`; these are what it must agree with.

  rnn     diag(1 - h'^2) U
  gates   d s/dh = diag(s (1 - s)) U_s for every sigmoid s
  ugrnn, gru   diag(1-z) + diag(c-h) dz/dh + diag(z) dc/dh
  lstm    of the pair (h, c): dc'/dc = diag(f), the direct edge; all else
          comes through h
"""

import jax
import jax.numpy as jnp


def rnn(params, h_H, u_G):
  """tanh: diag(1 - h'^2) U."""
  new_H = jnp.tanh(u_G + params["u_GH"] @ h_H)
  return (1 - new_H**2)[:, None] * params["u_GH"]


def ugrnn(params, h_H, u_G):
  """The three terms of the gated update, as a dict: direct, gate, candidate."""
  u_z, u_c = jnp.split(params["u_GH"], 2)
  z_H, c_H = jnp.split(u_G + params["u_GH"] @ h_H, 2)
  z_H, c_H = jax.nn.sigmoid(z_H), jnp.tanh(c_H)
  dc_HH = (1 - c_H**2)[:, None] * u_c
  return _blend(h_H, z_H, c_H, _slope(z_H) * u_z, dc_HH)


def gru(params, h_H, u_G, reset):
  """The same, with the reset `before` or `after` the product."""
  u_r, u_z, u_c = jnp.split(params["u_GH"], 3)
  a_r, a_z, a_c = jnp.split(u_G, 3)
  r_H = jax.nn.sigmoid(a_r + u_r @ h_H)
  z_H = jax.nn.sigmoid(a_z + u_z @ h_H)
  dr_HH = _slope(r_H) * u_r
  if reset == "before":
    # c = tanh(a_c + U_c (r h))
    c_H = jnp.tanh(a_c + u_c @ (r_H * h_H))
    inner_HH = u_c @ (jnp.diag(r_H) + h_H[:, None] * dr_HH)
  else:
    # c = tanh(a_c + r (U_c h + b))
    state_H = u_c @ h_H + params["bh_H"]
    c_H = jnp.tanh(a_c + r_H * state_H)
    inner_HH = r_H[:, None] * u_c + state_H[:, None] * dr_HH
  dc_HH = (1 - c_H**2)[:, None] * inner_HH
  return _blend(h_H, z_H, c_H, _slope(z_H) * u_z, dc_HH)


def lstm(params, h_H, c_H, u_G):
  """Four blocks: {"hh", "hc", "ch", "cc"}, new by old."""
  i, f, q, o = jnp.split(u_G + params["u_GH"] @ h_H, 4)
  i, f, q, o = (
    jax.nn.sigmoid(i),
    jax.nn.sigmoid(f),
    jnp.tanh(q),
    jax.nn.sigmoid(o),
  )
  u_i, u_f, u_q, u_o = jnp.split(params["u_GH"], 4)
  ch_HH = (
    c_H[:, None] * _slope(f) * u_f
    + q[:, None] * _slope(i) * u_i
    + (i * (1 - q**2))[:, None] * u_q
  )
  t_H = jnp.tanh(f * c_H + i * q)
  shown_H1 = (o * (1 - t_H**2))[:, None]
  return {
    "hh": t_H[:, None] * _slope(o) * u_o + shown_H1 * ch_HH,
    "hc": shown_H1 * jnp.diag(f),
    "ch": ch_HH,
    "cc": jnp.diag(f),
  }


def _blend(h_H, z_H, c_H, dz_HH, dc_HH):
  return {
    "direct": jnp.diag(1 - z_H),
    "gate": (c_H - h_H)[:, None] * dz_HH,
    "candidate": z_H[:, None] * dc_HH,
  }


def _slope(s_H):
  return (s_H * (1 - s_H))[:, None]
