"""What the tests share: the CPU, strict ranks, float64, and all cells."""

import importlib
import inspect
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rnnlab import cells

jax.config.update("jax_numpy_rank_promotion", "raise")

# Settings under which one file is several recurrences.
VARIANTS = {
  "rnn": [{"activation": "tanh"}, {"activation": "relu"}],
  "gru": [{"reset": "before"}, {"reset": "after"}],
}


def all_cells(*takes):
  """Settings of every cell in rnnlab/cells whose `make` takes these names.

  Found by listing the files, so that a law is tested for a new cell the day it
  is added. For `pytest.mark.parametrize("settings", all_cells())`.
  """
  found = []
  for path in sorted(pathlib.Path(cells.__file__).parent.glob("*.py")):
    if path.stem == "__init__":
      continue
    module = importlib.import_module(f"rnnlab.cells.{path.stem}")
    known = inspect.signature(module.make).parameters
    for variant in VARIANTS.get(path.stem, [{}]):
      if all(name in known for name in takes):
        found.append(
          pytest.param(
            {"name": path.stem, **variant},
            id="-".join([path.stem, *variant.values()]),
          )
        )
  return found


def draw(cell, d_in, seed=0, scale=0.3):
  """Parameters with nothing left at zero: initial ones plus normal noise."""
  params = cell.init(jax.random.key(seed), d_in)
  leaves, tree = jax.tree.flatten(params)
  rng = np.random.default_rng(seed)
  return tree.unflatten(
    leaf + jnp.asarray(scale * rng.normal(size=leaf.shape), leaf.dtype)
    for leaf in leaves
  )


def assert_close(actual, expected, atol=1e-12, rtol=0):
  """Equal trees: structure, shapes, and values to the tolerance."""
  assert jax.tree.structure(actual) == jax.tree.structure(expected)
  for a, b in zip(
    jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
  ):
    assert np.shape(a) == np.shape(b)
    np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)


@pytest.fixture
def x64():
  """Float64 inside the test."""
  with jax.enable_x64(True):
    yield
