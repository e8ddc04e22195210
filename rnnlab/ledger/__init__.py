"""Worked numbers of notes on two lectures, computed again by this project.

A row is a claim, what the notes say, and what the project's own functions make
of it. Nothing computed is written down here: the expected value is the claim's.
One theme a file, with `rows() -> iterator of Row`, in float64 where it is run
under `jax.enable_x64`.
"""

import importlib
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np

# The two lectures. Their notes quote them and work their own examples.
NLP = "CMU Advanced NLP 2025, lecture 4"
SYSTEMS = "CMU 10-414/714, lecture 15"
# For what has to be equal, in float64.
EXACT = 1e-10


class Row(NamedTuple):
  """One claim. A verdict compares numbers by the tolerance, else for equality.

  The largest difference counts where there are several numbers; NaN is none.
  """

  claim: str
  source: str
  expected: Any  # what is claimed: a number, several, or a text
  computed: Any
  tolerance: float = EXACT

  @property
  def passes(self) -> bool:
    if isinstance(self.expected, str):
      return self.expected == self.computed
    expected, computed = np.asarray(self.expected), np.asarray(self.computed)
    if expected.shape != computed.shape:
      return False
    return bool(np.all(np.abs(computed - expected) <= self.tolerance))


def themes() -> list[str]:
  """The files of this folder that hold rows."""
  folder = pathlib.Path(__file__).parent
  return sorted(p.stem for p in folder.glob("*.py") if p.stem != "__init__")


def rows(*only) -> list[Row]:
  """All rows, or those of some themes, computed now."""
  with jax.enable_x64(True):
    return [
      row
      for theme in only or themes()
      for row in importlib.import_module(f"rnnlab.ledger.{theme}").rows()
    ]


def difference(actual, wanted) -> float:
  """The largest difference between two trees of arrays of the same shapes."""
  leaves = zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True)
  found = []
  for a, b in leaves:
    if np.shape(a) != np.shape(b):
      raise ValueError(f"shapes differ: {np.shape(a)} and {np.shape(b)}")
    found.append(float(np.max(np.abs(np.asarray(a) - np.asarray(b)))))
  return max(found)


def normal(*shape, seed=0):
  """An arbitrary example."""
  return np.random.default_rng(seed).normal(size=shape)


def parameters(init):
  """Arbitrary parameters of the shapes that `init(key)` gives."""
  rng = np.random.default_rng(0)
  shapes = jax.eval_shape(init, jax.random.key(0))
  return jax.tree.map(lambda p: 0.5 * rng.normal(size=p.shape), shapes)
