"""What the tests share: the CPU, strict ranks, float64, and all cells."""

import atexit
import importlib
import inspect
import os
import pathlib
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs that run for milliseconds are worth no long compilation. Several
# devices are there for those who ask for them; all else runs on the first.
os.environ["XLA_FLAGS"] = " ".join(
  [
    os.environ.get("XLA_FLAGS", ""),
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_force_host_platform_device_count=8",
  ]
)
# Many tests run the same programs, in several processes at once, and the
# commands that tests start run them again: each is compiled once.
os.environ["JAX_COMPILATION_CACHE_DIR"] = (
  os.environ["JAX_COMPILATION_CACHE_DIR"]
  if "PYTEST_XDIST_WORKER" in os.environ
  else tempfile.mkdtemp("-compiled")
)
# Tokens of texts are kept beside them.
os.environ["XDG_CACHE_HOME"] = os.environ["JAX_COMPILATION_CACHE_DIR"]
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.05"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rnnlab import cells, scan

if "PYTEST_XDIST_WORKER" not in os.environ:
  atexit.register(
    shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True
  )
jax.config.update("jax_numpy_rank_promotion", "raise")

# Settings under which one file is several recurrences.
VARIANTS = {
  "rnn": [{"activation": "tanh"}, {"activation": "relu"}],
  "gru": [{"reset": "before"}, {"reset": "after"}],
}


# Stand for themselves in an exhaustive run alone: what sets them apart (an
# activation, a gate fewer) has tests of its own.
RARE = "rnn-relu", "ugrnn"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  for item in items:
    if item.get_closest_marker("exhaustive"):
      item.add_marker(pytest.mark.slow)


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
        name = "-".join([path.stem, *variant.values()])
        marks = [pytest.mark.exhaustive] if name in RARE else []
        settings = {"name": path.stem, **variant}
        found.append(pytest.param(settings, id=name, marks=marks))
  return found


def exhaustive_but(quick, found):
  """The same parameters, all marked exhaustive but those with the ids `quick`.

  For laws of long compilations, of which a run of the tests wants one.
  """
  assert set(quick) <= {each.id for each in found}
  return [
    pytest.param(
      *each.values,
      id=each.id,
      marks=[
        *each.marks,
        *([] if each.id in quick else [pytest.mark.exhaustive]),
      ],
    )
    for each in found
  ]


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


def compiled(cell, **options):
  """`run(params, x_BTD, carry=None)`: values and gradients, as one dict.

  The gradients are those of a loss that reads every output and the final
  carry, with respect to the parameters, the inputs and the carry.
  """

  def loss(params, x, carry):
    final, out = scan.unroll(cell, params, x, carry, **options)
    leaves = jax.tree.leaves((final, out))
    return sum(jnp.sum(jnp.sin(leaf + 0.5)) for leaf in leaves), (final, out)

  grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))

  def run(params, x, carry=None):
    (dparams, dx, dcarry), (final, out) = grads(params, x, carry)
    return {
      "final": final,
      "out": out,
      "dparams": dparams,
      "dx": dx,
      "dcarry": dcarry,
    }

  return run


def rows(cell, params, batch, seed=0):
  """A carry for `unroll`, batch first, with nothing left at zero."""
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda c: jnp.asarray(rng.normal(size=(batch, *c.shape[:-1])), c.dtype),
    cell.carry(params, batch),
  )


@pytest.fixture
def x64():
  """Float64 inside the test."""
  with jax.enable_x64(True):
    yield
