"""The leak audit: which inputs can reach each output of a function of time.

  reached[u, s]  where  d y_u / d x_s  is not zero, or y_u changes with x_s

A product with an exact zero is an exact zero, so where no path leads from an
input to an output both are zero to the last bit, and where one does they are
not, but for points in which a path happens to be shut: several are drawn.

The derivative sees paths so long that their effect is lost in rounding. The
change of value sees what has no derivative: integers, a `stop_gradient`, a
backward pass that was written by hand and is wrong.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rnnlab.wiring import Context

# Steps of a function that takes any number: enough for every lookahead up to
# some, and few enough that no path dies out on the way.
STEPS = 24


class Claim(NamedTuple):
  """A function of time, and what its outputs are declared to read."""

  name: str
  f: Any  # (x_BS..) -> y_BU..: the second axis is time on both sides
  draw: Any  # (key) -> x: a random point
  context: Any  # wiring.Context, or may_US, True where u may read s


class Found(NamedTuple):
  """What an audit found."""

  reached_US: Any  # by derivative or by value
  may_US: Any

  @property
  def leaks(self) -> list:
    """(output, input) that is read and may not be."""
    return _pairs(self.reached_US & ~self.may_US)

  @property
  def unused(self) -> list:
    """(output, input) that may be read and is not: a context not used."""
    return _pairs(~self.reached_US & self.may_US)

  @property
  def seen(self) -> Context:
    """How far the outputs read: the most steps back and ahead of their own."""
    u, s = np.nonzero(self.reached_US)
    if not len(u):
      return Context(0, -1)
    return Context(int((u - s).max()), int((s - u).max()))


def tokens(vocab, batch=2, steps=STEPS):
  """(key) -> one-hot vectors of random tokens, x_BTV: for a `Claim`.

  With a derivative at hand they show more than integers would; a function that
  takes nothing else is given them by `jax.random.randint`.
  """

  def draw(key):
    tokens_BT = jax.random.randint(key, (batch, steps), 0, vocab)
    return jax.nn.one_hot(tokens_BT, vocab)

  return draw


def vectors(width, batch=2, steps=STEPS):
  """(key) -> random vectors, x_BTD: for a `Claim`."""
  return lambda key: jax.random.normal(key, (batch, steps, width))


def audit(claim, key=None, draws=3) -> Found:
  """Looks which inputs reach which outputs, at `draws` random points.

  Raises ValueError where an output is not finite: then nothing can be said.
  """
  key = jax.random.key(0) if key is None else key
  measure = jax.jit(lambda key: _reached(claim.f, claim.draw, key))
  reached = []
  for k in jax.random.split(key, draws):
    found_US, finite = jax.device_get(measure(k))
    if not finite:
      raise ValueError(f"{claim.name}: an output or derivative is not finite")
    reached.append(found_US)
  reached_US = np.any(reached, axis=0)
  may_US = claim.context
  if isinstance(may_US, Context):
    may_US = may_US.may_read(*reached_US.shape)
  if np.shape(may_US) != reached_US.shape:
    raise ValueError(
      f"{claim.name}: declared for {np.shape(may_US)} outputs and inputs, but "
      f"there are {reached_US.shape}"
    )
  return Found(reached_US, np.asarray(may_US, bool))


def check(claim, key=None, draws=3) -> Found:
  """`audit`, which raises ValueError with the positions of every leak."""
  found = audit(claim, key, draws)
  if found.leaks:
    raise ValueError(told(claim, found))
  return found


def told(claim, found) -> str:
  """The leaks of an audit in words, positions from 0."""
  by_output = {}
  for u, s in found.leaks:
    by_output.setdefault(u, []).append(str(s))
  outputs = [
    f"output {u} reads input {', '.join(s)}" for u, s in by_output.items()
  ]
  more = f" and {len(outputs) - 4} outputs more" if len(outputs) > 4 else ""
  return (
    f"{claim.name} is declared {declared(claim)}, but "
    f"{'; '.join(outputs[:4])}{more}"
  )


def reads(found) -> str:
  """How far the outputs were seen to read, in words."""
  if not found.reached_US.any():
    return "nothing"
  back, ahead = found.seen
  return f"{back} back, {ahead} ahead"


def declared(claim) -> str:
  """The declared context in words."""
  named = isinstance(claim.context, Context)
  return str(claim.context) if named else "as listed"


def _pairs(at_US):
  return [tuple(pair) for pair in np.argwhere(at_US).tolist()]


def _reached(f, draw, key):
  """(reached_US, whether all is finite) at one point."""
  key_x, key_other, key_c = jax.random.split(key, 3)
  x, other = draw(key_x), draw(key_other)
  continuous = jnp.issubdtype(x.dtype, jnp.inexact)
  y, pull = jax.vjp(f, x) if continuous else (f(x), None)
  U, S = y.shape[1], x.shape[1]

  def at(step, array):
    steps = jnp.arange(array.shape[1]) == step
    return steps.reshape(1, -1, *(1,) * (array.ndim - 2))

  def by_step(changed):
    return jnp.any(changed, axis=(0, *range(2, changed.ndim)))

  def swapped(s):
    """The outputs with another value at step s; past the last, with none."""
    return f(jnp.where(jnp.broadcast_to(at(s, x), x.shape), other, x))

  # All by one compiled body: another might round in another way.
  y_S = jax.lax.map(swapped, jnp.arange(S + 1))
  changed_SBU = y_S[:-1] != jnp.broadcast_to(y_S[-1], y_S[:-1].shape)
  reached_US = jnp.any(changed_SBU, axis=(1, *range(3, y_S.ndim))).T
  finite = jnp.all(jnp.isfinite(y))
  if not continuous:
    return reached_US, finite

  def inputs_of(u):
    """Which inputs a random direction of output u has a derivative to."""
    # Of one direction, since parts cancel out in almost none.
    c = jax.random.normal(jax.random.fold_in(key_c, u), y.shape, y.dtype)
    (dx,) = pull(jnp.where(jnp.broadcast_to(at(u, y), y.shape), c, 0))
    return by_step(dx != 0), jnp.all(jnp.isfinite(dx))

  by_gradient_US, finite_U = jax.lax.map(inputs_of, jnp.arange(U))
  return reached_US | by_gradient_US, finite & finite_U.all()
