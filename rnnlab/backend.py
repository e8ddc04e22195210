"""What is done for the sake of one backend's compiler, each with its reason.

No choice here changes a number beyond rounding. Each was measured by a row of
`scripts/benchmark.py`.
"""

import os

import jax
from jax.experimental.layout import Layout, with_layout_constraint


def kind() -> str:
  """The backend to tune for: RNNLAB_TUNE_FOR, or else the one that jax uses.

  It is read when a program is traced; "none" leaves out what is done here.
  """
  return os.environ.get("RNNLAB_TUNE_FOR") or jax.default_backend()


def materialised(x):
  """x as it stands, written to memory: the compiler cannot look through it.

  XLA:CPU folds a transpose into the product beside it, and then takes a slow
  path (half the speed for W^T x, row W2). A barrier does not hold it back, as
  the CPU's compiler drops barriers first; a layout does.
  """
  if kind() != "cpu":
    return x
  return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def gate_by_gate() -> bool:
  """Whether a packed cell multiplies gate by gate, or all gates at once.

  All at once, the backward loop has to join the gates' cotangents, and XLA:CPU
  does that element by element (10 % of the backward pass, row W1). A GPU wants
  few large products.
  """
  return kind() == "cpu"


# Rows of a table, read as columns: 64 rows whose length is a multiple of 4 KiB
# all fall in one set of the first cache, which holds 8. With 64 bytes more a
# row they do not (a fifth of the whole step, row W1).
ROW_PADDING = 16
