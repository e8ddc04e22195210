import importlib
import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from test_bptt import live, subjaxprs

ROOT = pathlib.Path(__file__).parents[1]
SMALL = {"hidden": 6, "batch": 2, "steps": 5, "vocab": 7, "embed": 4}
PEERS = ("linen", "torch", "haiku", "equinox")


@pytest.fixture
def benchmarks(monkeypatch):
  monkeypatch.syspath_prepend(str(ROOT / "scripts"))
  return importlib.import_module("benchmarks.workloads")


def small(workloads, name):
  work = workloads.WORKLOADS[name]._replace(**SMALL)
  chunk, source = work.chunk and 3, work.source and 4
  return work._replace(chunk=chunk, source=source)


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize(
  "name",
  ["W2", "W6"]
  + [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("W3", "W4", "W5c", "W7", "W8")
  ],
)
def test_every_library_computes_the_same(name, peer, benchmarks):
  library = {"linen": "flax"}.get(peer, peer)
  if not importlib.util.find_spec(library):
    pytest.skip(f"{library} is not installed")
  work = small(benchmarks, name)
  theirs = importlib.import_module(f"benchmarks.{peer}_peer").build(work)
  if theirs is None:
    pytest.skip(f"{peer} has no {work.cell} of this kind")
  ours = importlib.import_module("benchmarks.rnnlab_peer").build(work)
  with jax.numpy_rank_promotion("allow"):
    loss, grads = theirs.result()
  expected, own = ours.result()
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  assert grads.keys() <= own.keys() and (len(grads) > 3 or not own)
  for leaf, grad in grads.items():
    largest = np.abs(own[leaf]).max()
    np.testing.assert_allclose(grad, own[leaf], atol=1e-5 * largest)


def flops(jaxpr):
  """Of all matrix products that results depend on."""
  total = 0
  for eqn in live(jaxpr):
    times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    total += times * sum(map(flops, subjaxprs(eqn)))
    if eqn.primitive.name == "dot_general":
      (contracted, _), _ = eqn.params["dimension_numbers"]
      left, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
      depth = np.prod([left[axis] for axis in contracted])
      total += int(2 * np.prod(out) * depth)
  return total


@pytest.mark.parametrize("name", ["W2", "W5c", "W6", "W8"])
def test_the_share_of_the_peak_counts_the_products_that_are_done(
  name, benchmarks
):
  peak = importlib.import_module("benchmarks.peak")
  peer = importlib.import_module("benchmarks.rnnlab_peer")
  # T divides by the chunk, so that no step is padding.
  work = small(benchmarks, name)._replace(steps=6)
  task, tree, _ = peer._task(work)
  params, batch = tree(benchmarks.weights(work)), benchmarks.data(work)

  def loss(params):
    mean, _ = task.loss(params, (), batch, jax.random.key(0))
    return mean.total

  function = loss if work.kind == "evaluate" else jax.grad(loss)
  assert peak.flops(work) == flops(jax.make_jaxpr(function)(params).jaxpr)


@pytest.mark.exhaustive
def test_a_sweep_is_measured_from_start_to_end(benchmarks, monkeypatch):
  members = importlib.import_module("benchmarks.members")
  timing = importlib.import_module("benchmarks.timing")
  quick = {"train.steps": 4}
  monkeypatch.setattr(members, "SETTINGS", members.SETTINGS | quick)
  how = timing.How(tuple(os.sched_getaffinity(0)), (), rounds=1, least=0)
  said = []
  with pytest.MonkeyPatch.context() as patch:
    others = set(members.WAYS) - {"sweep"}
    for way in others:
      patch.setitem(members.WAYS, way, lambda folder: None)
    found = members.measure(how, said.append)
  assert len(found["seconds"]["sweep"]) == 2
  assert found["ratio"].keys() == others and min(found["ratio"].values()) > 1
  assert said[0].startswith("W9  8 runs")


def test_a_workload_that_is_not_there_is_named():
  command = [sys.executable, "scripts/benchmark.py", "--only=W1,W99"]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 1 and done.stdout == ""
  assert "W99 is no workload: W1, W2" in done.stderr
