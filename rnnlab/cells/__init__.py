"""Recurrences as pure functions, one a file; `make(name, ...)` builds one."""

import importlib
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rnnlab import gates, nn, settings

# In which products may be computed; carries and sums stay float32.
DTYPES = ("float32", "bfloat16", "float16")


class Cell(NamedTuple):
  """One recurrence. Hyper-parameters are spent in init; nothing else sees them.

  Vectors are columns: h_HB. One step is
  `u = project(x)`, `a_i = drive[i](weights, carry, u, a_1 .. a_(i-1), memory)`,
  `carry, out = update(carry, a, memory)`. u and every a_i are pytrees of
  columns, in the packed cells one array a gate.

  A drive stage ends in a matrix product, and everything after the last product
  is in `update`. So the backward pass, which stores every `a`, repeats
  elementwise work alone and never a product.

  `gates` shows the sigmoids of a step by name, as rows of `a` the way they
  stand there: sigmoid(keep), or 1 - sigmoid(replace), multiplies the old state.
  A cell of several has names with a path, `1/keep`.
  """

  init: Any  # (key, d_in) -> params
  carry: Any  # (params, batch) -> carry: what a reset restores
  project: Any  # (params, x_DN) -> u: the input side, outside the time loop
  drive: Any  # tuple of (weights, carry, u, a, memory) -> a_i, linear in u
  update: Any  # (carry, a, memory) -> carry, out: gates and blend
  # (params, apart) -> weights: what drive reads at every step; apart: packed
  # matrices gate by gate.
  weights: Any = lambda params, apart: params
  gates: Any = None  # (a) -> {name: logits_HB}; None where nothing is gated


def make(name=None, **hparams) -> Cell:
  """The cell of the file `cells/<name>.py`; a wrong setting raises by name."""
  path = pathlib.Path(__file__).with_name(f"{name}.py")
  if not str(name).isidentifier() or name == "__init__" or not path.exists():
    raise ValueError(f"there is no cell named {name!r} in rnnlab/cells")
  module = importlib.import_module(f"rnnlab.cells.{name}")
  bound = settings.bind(module.make, "model.cell", hparams)
  if bound.get("dtype", DTYPES[0]) not in DTYPES:
    raise ValueError(
      f"model.cell.dtype is one of {DTYPES}, not {bound['dtype']!r}"
    )
  if not 0 <= bound.get("scale", 1.0) <= 1e4:
    raise ValueError(
      f"model.cell.scale must be in 0 .. 1e4, not {bound['scale']}"
    )
  return module.make(**bound)


def packed(key, gates, hidden, d_in, *, recurrent, scale, input, bias, learned):
  """Parameters of `gates` affine maps in one: w_GD, u_GH and, if asked, b_G.

  scale: a factor on what `recurrent` draws; 0.9 starts an orthogonal U at the
  spectral radius 0.9. learned: names of initial vectors that are parameters
  too; they start at 0.
  """
  key_w, key_u = jax.random.split(key)
  # The reference range of "uniform" is 1/sqrt(H) for both sides.
  bound = hidden**-0.5
  params = {
    "w_GD": nn.init(input, key_w, hidden, d_in, gates, bound),
    "u_GH": scale * nn.init(recurrent, key_u, hidden, hidden, gates, bound),
  }
  params |= {"b_G": jnp.zeros(gates * hidden)} if bias else {}
  return params | {name: jnp.zeros(hidden) for name in learned}


def project(params, x_DN, gates, dtype=None):
  """The input side of a packed cell, W x + b, as one u_HN a gate."""
  u_GN = nn.product(params["w_GD"], x_DN, dtype)
  if "b_G" in params:
    u_GN += params["b_G"][:, None]
  return tuple(jnp.split(u_GN, gates))


def blocks(u_GH, gates, apart):
  """A packed recurrent weight as `recur` takes it: a matrix a gate, or one."""
  return tuple(jnp.split(u_GH, gates)) if apart else (u_GH,)


def recur(blocks, h_HB, gates, dtype=None):
  """The state side of a packed cell, U h, as one r_HB a gate."""
  r = [nn.product(u_GH, h_HB, dtype) for u_GH in blocks]
  return tuple(r) if len(r) == gates else tuple(jnp.split(*r, gates))


def add(u, v):
  """The sum of two pytrees of columns."""
  return jax.tree.map(jnp.add, u, v)


def initial(params, name, hidden, batch):
  """The columns a reset restores: the learned `name`, or zeros."""
  dtype = params["u_GH"].dtype
  v_H = params[name] if name in params else jnp.zeros(hidden, dtype)
  return jnp.broadcast_to(v_H[:, None], (hidden, batch))


def learned(initial, *names):
  """The names of the initial vectors, if `initial` says they are learned."""
  if initial not in ("zeros", "learned"):
    raise ValueError(
      f"model.cell.initial is 'zeros' or 'learned', not {initial!r}"
    )
  return names if initial == "learned" else ()


def output(h_HB, dtype):
  """What a cell shows of its state: in the type its products are computed."""
  return h_HB if dtype is None else h_HB.astype(dtype)


def keep_scheme(keep, bias):
  """The gate scheme of a cell's `keep` settings; None is the keep logit 1.

  A cell without biases has nowhere to put one: None leaves its gates alone,
  settings raise ValueError.
  """
  if keep is None:
    return gates.constant(1.0) if bias else None
  if not bias:
    raise ValueError(
      f"model.cell.keep={dict(keep)} starts gates by their bias, but "
      "model.cell.bias is False"
    )
  return gates.make(**keep)


def dropping(cell) -> Cell:
  """The cell with the state that its products read times `memory`, a factor.

  The state itself, which is blended and carried on, is whole. Without a memory
  it is the cell.
  """

  def dropped(stage):
    def run(weights, carry, u, a, memory):
      if memory is not None:
        carry = jax.tree.map(lambda c_HB: c_HB * memory, carry)
      return stage(weights, carry, u, a, None)

    return run

  return cell._replace(drive=tuple(map(dropped, cell.drive)))
