"""What is done for the sake of one backend's compiler, each with its reason.

No choice here changes a number beyond rounding. Each was measured by a row of
`scripts/benchmark.py`.
"""

import ctypes
import os
import platform

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint


def kind() -> str:
  """The backend to tune for: RNNLAB_TUNE_FOR, or else the one that jax uses.

  It is read when a program is traced; "none" leaves out what is done here.
  """
  return os.environ.get("RNNLAB_TUNE_FOR") or jax.default_backend()


def cores() -> int:
  """How many cores this process may use."""
  if hasattr(os, "sched_getaffinity"):  # Linux alone says
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


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


def cumulated(x_BV):
  """x summed along its rows, up to every column.

  XLA:CPU adds up 16 numbers anew for each of them. A product with a triangle of
  ones is faster as long as V is small (3 % of row W7x64).
  """
  V = x_BV.shape[-1]
  if kind() != "cpu" or V > 128:
    return jnp.cumsum(x_BV, axis=-1)
  return x_BV @ jnp.triu(jnp.ones((V, V), x_BV.dtype))


# Rows of a table, read as columns: 64 rows whose length is a multiple of 4 KiB
# all fall in one set of the first cache, which holds 8. With 64 bytes more a
# row they do not (a fifth of the whole step, row W1).
ROW_PADDING = 16


def keep_memory(reserve: int = 4 << 30) -> bool:
  """Has the C library keep what is freed, in large pages; whether it does.

  XLA:CPU takes the memory of a program at every call and gives it back. The
  system then clears it again, page by page: a quarter of the time of row W1.
  So freed memory stays with the process, up to what it once needed, and the
  first `reserve` bytes of it lie in pages of 2 MiB where the system has them.
  On Linux with glibc alone; RNNLAB_KEEP_MEMORY=0 leaves all as it was. It acts
  on what is taken after the call, which has to come before jax's first array.
  """
  wanted = os.environ.get("RNNLAB_KEEP_MEMORY", "1") != "0"
  if not wanted or platform.libc_ver()[0] != "glibc":
    return False
  # A program takes its memory in the thread that runs it, and the heap of the
  # main thread alone can hold blocks of more than 64 MiB. Not one heap for all
  # threads: compiling would tear it to pieces (names, a third slower).
  jax.config.update("jax_cpu_enable_async_dispatch", False)
  libc = ctypes.CDLL(None)
  trim, maps = -1, -4  # of mallopt, from malloc.h
  libc.mallopt(trim, 2**31 - 1)
  libc.mallopt(maps, 0)
  libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
  libc.free.argtypes = [ctypes.c_void_p]
  libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
  start = libc.malloc(reserve)
  if start:  # taken from the system as addresses alone, not as memory
    page = 2 << 20
    libc.madvise(-(-start // page) * page, reserve - page, 14)  # huge pages
    libc.free(start)
  return True
