"""Cells that read a context while they step, made from any other cell.

Each adds to the input side of the cell inside, u, which is all that a cell
asks of its input; so it is a cell like any other, and `scan.unroll` runs it.
What it reads is the `memory`: differentiable, and the same at every step.
"""

import jax
import jax.numpy as jnp
import numpy as np

from rnnlab import attention, cells, nn


def visible(carry):
  """The state h of a cell's carry: by convention its first leaf."""
  return jax.tree.leaves(carry)[0]


def plus(u, v_GB):
  """Adds packed columns to the input side of a cell, gate by gate."""
  leaves, tree = jax.tree.flatten(u)
  ends = np.cumsum([len(leaf) for leaf in leaves])[:-1]
  return tree.unflatten(map(jnp.add, leaves, jnp.split(v_GB, ends)))


def constant(cell) -> cells.Cell:
  """Reads one vector at every step: memory is W_c c, as columns."""

  def wrap(stage):
    def run(weights, carry, u, a, memory_GB):
      return stage(weights, carry, plus(u, memory_GB), a, None)

    return run

  def update(carry, a, memory):
    return cell.update(carry, a, None)

  return cell._replace(drive=tuple(map(wrap, cell.drive)), update=update)


def attentive(cell, top, score, query) -> cells.Cell:
  """Attends from the previous state, and the context enters the update.

    c_t = attend(h_{t-1}),  then the cell with u_t + W_c c_t

  params: {"cell", "score", "query", "w_GC"}; memory: an attention.Source;
  top(carry): the state h_HB that asks; query(params, h_BH) -> q_BD. out is a
  dict of columns: h_HB, context_CB, scores_SB, weights_SB.
  Source: Bahdanau, Cho and Bengio, 2015, section 3.1.
  """

  def look(weights, carry, u, a, source):
    return _look(weights, top(carry), source, score, query)

  def mix(weights, carry, u, a, source):
    return nn.product(weights["w_GC"], a[0]["context_CB"])

  def wrap(i):
    def run(weights, carry, u, a, source):
      own = weights["cell"], carry, plus(u, a[1]), a[2:]
      return cell.drive[i](*own, None)

    return run

  def update(carry, a, source):
    carry, h_HB = cell.update(carry, a[2:], None)
    return carry, {"h_HB": h_HB} | a[0]

  stages = (look, mix, *map(wrap, range(len(cell.drive))))
  return _around(cell, stages, update, lambda a: a[2:])


def feeding(cell, score, query) -> cells.Cell:
  """Attends from the current state; what comes of it enters the next step.

    h_t from the cell with u_t + W_f f_{t-1};  c_t = attend(h_t)
    f_t = tanh(W_m [h_t c_t] + b_m)

  The carry is (the cell's, f_HB); out as in `attentive`, with f for h. params:
  {"cell", "score", "query", "w_GF", "mix"}; memory: an attention.Source.
  Source: Luong, Pham and Manning, 2015, section 3.3.
  """
  depth = len(cell.drive)

  def feed(weights, carry, u, a, source):
    return nn.product(weights["w_GF"], carry[1])

  def wrap(i):
    def run(weights, carry, u, a, source):
      own = weights["cell"], carry[0], plus(u, a[0]), a[1 : 1 + i]
      return cell.drive[i](*own, None)

    return run

  def look(weights, carry, u, a, source):
    _, h_HB = cell.update(carry[0], a[1 : 1 + depth], None)
    return _look(weights, h_HB, source, score, query)

  def mix(weights, carry, u, a, source):
    _, h_HB = cell.update(carry[0], a[1 : 1 + depth], None)
    both = jnp.concatenate([h_HB, a[1 + depth]["context_CB"]])
    pre = nn.product(weights["mix"]["w_VH"], both)
    return pre + weights["mix"]["b_V"][:, None]

  def update(carry, a, source):
    inner, _ = cell.update(carry[0], a[1 : 1 + depth], None)
    f_HB = jnp.tanh(a[-1])
    return (inner, f_HB), {"h_HB": f_HB} | a[1 + depth]

  def carry(params, batch):
    w_VH = params["mix"]["w_VH"]
    feed_HB = jnp.zeros((len(w_VH), batch), w_VH.dtype)
    return cell.carry(params["cell"], batch), feed_HB

  stages = (feed, *map(wrap, range(depth)), look, mix)
  around = _around(cell, stages, update, lambda a: a[1 : 1 + depth])
  return around._replace(carry=carry)


def _look(weights, h_HB, source, score, query):
  q_BD = query(weights, h_HB.T)
  found = attention.attend(score, weights["score"], q_BD[:, None], source)
  return {
    "context_CB": found.context_BUD[:, 0].T,
    "scores_SB": found.scores_BUS[:, 0].T,
    "weights_SB": found.weights_BUS[:, 0].T,
  }


def _around(cell, drive, update, own):
  """The cell inside keeps its carry, its input side and its gates in own(a)."""
  return cells.Cell(
    init=None,
    carry=lambda params, batch: cell.carry(params["cell"], batch),
    project=lambda params, x_DN: cell.project(params["cell"], x_DN),
    weights=lambda params, apart: (
      params | {"cell": cell.weights(params["cell"], apart)}
    ),
    drive=drive,
    update=update,
    gates=cell.gates and (lambda a: cell.gates(own(a))),
  )
