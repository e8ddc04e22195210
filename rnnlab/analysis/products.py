"""Long products of step Jacobians, held as logarithms.

  P = J_T ... J_{T-d+1}           the last d steps of a path

After a thousand steps an entry of P may have no float. So P q_0 is kept as
Q diag(e^d) M, one QR decomposition a step: Q orthonormal, the scales as
logarithms, M of moderate size. Sorting the columns before each step keeps M so.
Source: Loh et al., "Stable numerical simulations of models of interacting
electrons", 1989; for exponents, Benettin et al., 1980.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from rnnlab.analysis.path import basis, pull, push


def log_singular_values(path, k=None, *, distance=None):
  """log sigma_BK of the product over the last `distance` steps, largest first.

  k: how many; None is all of them. Fewer start from random directions, which
  passes there and back turn into the leading ones, more passes where they are
  short; what is found then is never more than the true value. distance: an
  int, traced or not; None is the whole path. Steps that a row does not have
  change nothing. -inf where a product has no such direction left.
  """
  T, N, B = path.steps.state_NB.shape
  distance = T if distance is None else distance
  if k is None or k >= N:
    passes, q_RNB = 1, basis(path.steps.state_NB[0])
  else:
    passes = 2 + 128 // distance
    q_RNB, _ = _qr(directions(path.steps.state_NB[0], k))
  R = len(q_RNB)

  def there_and_back(_, found):
    q_RNB, log_BR, m_BRR = _forward(path, found[0], T - distance)
    return _back(path, q_RNB, T - distance), log_BR, m_BRR

  like = jnp.zeros((B, R), q_RNB.dtype), jnp.zeros((B, R, R), q_RNB.dtype)
  _, log_BR, m_BRR = lax.fori_loop(0, passes, there_and_back, (q_RNB, *like))
  return _settle(log_BR, m_BRR)


def log_gradients(path):
  """log of the norm of dL/ds_{T-d}, log_TB[d - 1] for the distances 1 .. T.

  L is the loss of the last step, or, where the path has none, the last state
  along a random direction, of norm 1. NaN at distances that a row does not
  have.
  """
  T, _, B = path.steps.state_NB.shape
  ct_NB = path.loss_NB
  if ct_NB is None:
    ct_1NB = directions(path.steps.state_NB[0])
    ct_NB = pull(path, path.at(T - 1), ct_1NB)[0]

  def body(state, at):
    ct_NB, log_B = state
    ct_NB, more_B = unit(ct_NB)
    log_B = log_B + more_B
    return (pull(path, at, ct_NB[None])[0], log_B), log_B

  before = jax.tree.map(lambda x: jnp.roll(x, 1, axis=0), path.steps)
  start = ct_NB, jnp.zeros(B, ct_NB.dtype)
  _, log_TB = lax.scan(body, start, before, reverse=True)
  distance_T1 = jnp.arange(T)[:, None] + 1
  there_TB = distance_T1 <= path.length_B[None]
  return jnp.where(there_TB, log_TB[::-1], jnp.nan)


def step_norms(path, m=32):
  """The norm of every J_t, norm_TB: the factors of the contraction bound.

  By m of Lanczos' iterations on J'J. What they have not settled, the residual,
  is added, so that it may be too large but hardly ever too small, as a factor
  of a bound has to be. 1 where a row has no step.
  """
  m = min(m, path.steps.state_NB.shape[1])
  # In chunks, so that the m x m matrices of all steps need no memory.
  return lax.map(lambda at: _norm(path, at, m), path.steps, batch_size=64)


def _norm(path, at, m):
  (v_NB,) = directions(at.state_NB)

  def body(state, _):
    # No orthogonalisation against all earlier vectors: what is lost without it
    # are the copies of values found already, not the largest value.
    before_NB, v_NB, beta_B = state
    w_NB = pull(path, at, push(path, at, v_NB[None]))[0]
    alpha_B = jnp.sum(v_NB * w_NB, axis=0)
    w_NB = w_NB - alpha_B[None] * v_NB - beta_B[None] * before_NB
    new_NB, log_B = unit(w_NB)
    beta_B = jnp.exp(log_B)
    return (v_NB, new_NB, beta_B), (alpha_B, beta_B)

  start = jnp.zeros_like(v_NB), v_NB, jnp.zeros_like(v_NB[0])
  _, (alpha_MB, beta_MB) = lax.scan(body, start, length=m)
  off_BMM = jax.vmap(lambda b: jnp.diag(b, 1))(beta_MB[:-1].T)
  tri_BMM = jax.vmap(jnp.diag)(alpha_MB.T) + off_BMM + off_BMM.mT
  values_BM, vectors_BMM = jnp.linalg.eigh(tri_BMM)
  residual_B = beta_MB[-1] * jnp.abs(vectors_BMM[:, -1, -1])
  return jnp.sqrt(jnp.maximum(values_BM[:, -1] + residual_B, 0))


def directions(state_NB, k=1):
  """k random directions of norm 1, the same ones for all rows: q_KNB."""
  # Drawn here: compiling a draw takes longer than all that is done with it.
  q_KN = np.random.default_rng(0).normal(size=(k, len(state_NB)))
  q_KN /= np.linalg.norm(q_KN, axis=1, keepdims=True)
  q_KN1 = jnp.asarray(q_KN, state_NB.dtype)[..., None]
  return jnp.broadcast_to(q_KN1, (k, *state_NB.shape))


def _forward(path, q_RNB, start):
  """P q_0 = Q diag(e^log) M, for orthonormal q_0: (Q, log_BR, M)."""
  T, R, B = path.steps.real_B.shape[0], q_RNB.shape[0], q_RNB.shape[2]

  def body(t, loop):
    q_RNB, log_BR, m_BRR = loop
    moved_RNB = push(path, path.at(t), q_RNB)
    size_BR = jnp.log(jnp.sqrt(jnp.sum(moved_RNB**2, axis=1))).T
    order_BR = jnp.argsort(-(size_BR + log_BR), axis=1)
    moved_RNB = jnp.take_along_axis(moved_RNB, order_BR.T[:, None], axis=0)
    log_BR, m_BRR = _sorted(log_BR, m_BRR, order_BR)
    q_RNB, r_BRR = _qr(moved_RNB)
    log_BR, x_BRR = _graded(r_BRR, log_BR)
    return q_RNB, log_BR, x_BRR @ m_BRR

  eye_BRR = jnp.broadcast_to(jnp.eye(R, dtype=q_RNB.dtype), (B, R, R))
  loop = q_RNB, jnp.zeros((B, R), q_RNB.dtype), eye_BRR
  return lax.fori_loop(start, T, body, loop)


def _back(path, q_RNB, start):
  """Takes orthonormal directions back through the steps, by P'."""
  T = path.steps.real_B.shape[0]

  def body(i, q_RNB):
    return _qr(pull(path, path.at(T - 1 - i), q_RNB))[0]

  return lax.fori_loop(0, T - start, body, q_RNB)


def _settle(log_BR, m_BRR):
  """log of the singular values of diag(e^log) M: the QR algorithm on logs.

  diag(e^d) M = diag(e^d) R' Q' for M' = Q R, and R is graded with the scales
  until nothing but the diagonal is left. Its off-diagonal enters squared.
  """
  small = jnp.sqrt(jnp.finfo(log_BR.dtype).eps) / 4

  def going(loop):
    n, _, _, off_B = loop
    return (n < 1000) & jnp.any(off_B > small)

  def body(loop):
    n, log_BR, m_BRR, _ = loop
    order_BR = jnp.argsort(-log_BR, axis=1)
    log_BR, m_BRR = _sorted(log_BR, m_BRR, order_BR)
    r_BRR = jnp.linalg.qr(jnp.swapaxes(m_BRR, 1, 2), mode="r")
    log_BR, m_BRR = _graded(r_BRR, log_BR)
    off_BRR = jnp.abs(m_BRR) * (1 - jnp.eye(m_BRR.shape[-1]))[None]
    return n + 1, log_BR, m_BRR, jnp.max(off_BRR, axis=(1, 2))

  loop = jnp.asarray(0), log_BR, m_BRR, jnp.full_like(log_BR[:, 0], jnp.inf)
  log_BR = lax.while_loop(going, body, loop)[1]
  return -jnp.sort(-log_BR, axis=1)


def _graded(r_BRR, log_BR):
  """R diag(e^log) = diag(e^new) X, and X has a diagonal of +-1."""
  diagonal_BR = jnp.abs(jnp.diagonal(r_BRR, axis1=1, axis2=2))
  new_BR = log_BR + jnp.log(diagonal_BR)
  ratio_BRR = log_BR[:, None, :] - new_BR[:, :, None]
  # A direction that is gone, e^-inf, has nothing in its row.
  gone_BR1 = jnp.isneginf(new_BR)[:, :, None]
  ratio_BRR = jnp.where(gone_BR1 | (r_BRR == 0), 0, ratio_BRR)
  x_BRR = jnp.where(gone_BR1, 0, r_BRR * jnp.exp(ratio_BRR))
  return new_BR, x_BRR


def _sorted(log_BR, m_BRR, order_BR):
  m_BRR = jnp.take_along_axis(m_BRR, order_BR[:, :, None], axis=1)
  return jnp.take_along_axis(log_BR, order_BR, axis=1), m_BRR


def _qr(x_RNB):
  """Row by row: (q_RNB, r_BRR)."""
  q_BNR, r_BRR = jnp.linalg.qr(jnp.transpose(x_RNB, (2, 1, 0)))
  return jnp.transpose(q_BNR, (2, 1, 0)), r_BRR


def unit(v_NB):
  """Columns of norm 1 and the logs of what they were; zero stays zero."""
  norm_1B = jnp.sqrt(jnp.sum(v_NB**2, axis=0, keepdims=True))
  return v_NB / jnp.where(norm_1B > 0, norm_1B, 1), jnp.log(norm_1B[0])
