"""One matrix product in XLA, for the machine's peak."""

import jax
import jax.numpy as jnp

from benchmarks.workloads import Prepared, Runner


def build(shape):
  rows, depth, columns = shape
  a, b = jnp.ones((rows, depth)), jnp.ones((depth, columns))
  product = jax.jit(jnp.matmul)

  def run(n):
    for _ in range(n):
      out = product(a, b)
    out.block_until_ready()

  return Runner(lambda: (0.0, {}), Prepared, run)
