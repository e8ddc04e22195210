"""The leak audit: what an output can read, and where it should not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import remembering
import reversing
import tiny
from conftest import exhaustive_but
from test_tagger import WIRINGS, V, drawn, make

from rnnlab import instruments, tasks, trained
from rnnlab.analysis import context
from rnnlab.analysis.context import Claim
from rnnlab.wiring import CAUSAL, FULL, Context

S = 8


def claim(f, declared, draw=None):
  return Claim("mine", f, draw or context.vectors(2, 1, S), declared)


def shifted(x_BSD, by):
  """Output u reads input u + by and no other."""
  return jnp.roll(x_BSD, -by, 1).at[:, -by:].set(0) if by else x_BSD


@pytest.mark.parametrize("k", [0, 3])
def test_the_pattern_is_that_of_the_function(k):
  found = context.audit(claim(lambda x: jnp.cumsum(x, 1), CAUSAL))
  assert np.array_equal(found.reached_US, np.tri(S, dtype=bool))
  assert found.leaks == found.unused == [] and found.seen == Context(S - 1, 0)
  found = context.audit(claim(lambda x: shifted(x, k), Context(0, k)))
  assert np.array_equal(found.reached_US, np.eye(S, k=k, dtype=bool))
  assert found.seen == Context(-k, k)
  # Declared one step short, every output leaks, and is named.
  if k:
    short = claim(lambda x: shifted(x, k), Context(None, k - 1))
    assert context.audit(short).leaks == [(u, u + k) for u in range(S - k)]
    with pytest.raises(ValueError, match=f"output 0 reads input {k};.*outputs"):
      context.check(short)


def test_a_whole_sequence_is_told_from_a_prefix():
  mean = claim(lambda x: x - x.mean(1, keepdims=True), CAUSAL)
  found = context.audit(mean)
  assert found.reached_US.all()
  assert len(found.leaks) == S * (S - 1) / 2
  assert context.audit(mean._replace(context=FULL)).leaks == []


def test_a_leak_of_a_row_of_outputs_of_its_own_is_named():
  """As of a mask that is off by one at one place."""

  def f(x):
    return jnp.cumsum(x, 1).at[:, 3].add(x[:, 6])

  with pytest.raises(
    ValueError, match="^mine is declared causal, but output 3 reads input 6$"
  ):
    context.check(claim(f, CAUSAL))


def test_what_has_no_derivative_is_seen_by_value():
  def stopped(x):
    return jnp.cumsum(x, 1) + jax.lax.stop_gradient(shifted(x, 1))

  assert context.audit(claim(stopped, CAUSAL)).leaks == [
    (u, u + 1) for u in range(S - 1)
  ]

  def whole_numbers(key):
    return jax.random.randint(key, (1, S), 0, 50)

  found = context.audit(
    claim(lambda x: jnp.sort(x, axis=1), FULL, whole_numbers)
  )
  assert found.reached_US.any(0).all() and found.leaks == []
  counted = claim(lambda x: jnp.cumsum(x, 1), CAUSAL, whole_numbers)
  assert context.audit(counted).seen == Context(S - 1, 0)


def test_what_is_lost_in_rounding_is_seen_by_the_derivative():
  def faint(x):
    return jnp.cumsum(x, 1) + 1e-20 * shifted(x, 2)

  assert context.audit(claim(faint, CAUSAL)).leaks == [
    (u, u + 2) for u in range(S - 2)
  ]


def test_several_points_open_what_one_shuts():
  """A path that half of all points shut."""

  def f(x):
    return jax.nn.relu(x[..., :1] - 0.5)

  whole = np.eye(S, dtype=bool)
  one = context.audit(claim(f, whole), draws=1)
  many = context.audit(claim(f, whole), draws=20)
  assert one.unused and not many.unused and not many.leaks


def test_nothing_is_said_of_what_is_not_finite_or_of_another_size():
  with pytest.raises(ValueError, match="mine: an output or derivative is not"):
    context.audit(claim(lambda x: jnp.log(-jnp.abs(x)), CAUSAL))
  with pytest.raises(ValueError, match=r"mine: declared for \(2, 2\)"):
    context.audit(claim(lambda x: x, np.ones((2, 2), bool)))


def test_a_declared_context_in_words_and_steps():
  told = [CAUSAL, FULL, Context(None, 4), Context(0, None)]
  words = ["causal", "full", "all back, 4 ahead", "0 back, all ahead"]
  assert list(map(str, told)) == words
  assert np.array_equal(CAUSAL.may_read(2, 3), np.tri(2, 3, dtype=bool))
  band = np.array([[1, 1, 0], [1, 1, 1], [0, 1, 1]], bool)
  assert np.array_equal(Context(1, 1).may_read(3, 3), band)


@pytest.mark.parametrize(
  "settings",
  exhaustive_but(
    ["lookahead"],
    [pytest.param(WIRINGS[n], id=n) for n in ("lookahead", "alternating")],
  ),
)
def test_every_wiring_reads_what_it_declares_and_all_of_it(settings, x64):
  model = make(**settings)
  f = functools.partial(model.apply, drawn(model))
  found = context.check(claim(f, model.context, context.tokens(V, 1, S)))
  assert found.unused == []
  told = {"causal": (None, 0), "lookahead": (None, 2), "backward": (0, None)}
  name = next(name for name, own in WIRINGS.items() if own == settings)
  assert model.context == Context(*told.get(name, (None, None)))


def tasks_of(folder):
  """A task of each kind, and parameters with nothing left at zero."""
  source = folder / "m.py"
  source.write_text("def f(a):\n  return a\n")
  yield tiny.task(tiny.config(folder) | {"model": LM})
  yield remembering.make("copying")
  yield reversing.make(folder, reversing.words())
  model = {"embed": 3, "hidden": 4, "cell": LM["cell"], "lookahead": 2}
  yield tasks.make("tagging", path=str(source), model=model)


LM = {"embed": 4, "hidden": 5, "cell": {"name": "rnn"}}


@pytest.mark.slow
def test_every_task_reads_what_it_declares(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  kinds = set()
  for task in tasks_of(tmp_path):
    for each in task.contexts(remembering.drawn(task)):
      found = context.check(each)
      assert found.unused == [], each.name
      kinds.add(context.declared(each))
  assert kinds == {"causal", "full", "all back, 2 ahead"}


def test_a_run_that_leaks_says_so(tmp_path):
  leaky = claim(lambda x: shifted(x, 1), CAUSAL)
  held = claim(lambda x: jnp.cumsum(x, 1), CAUSAL)._replace(name="held")
  task = remembering.make("adding")._replace(contexts=lambda p: [leaky, held])
  params = task.init(jax.random.key(0))
  run = trained.Trained(task, params, 3, [], lambda: params)
  reading = instruments.read("context", run)
  (text,) = reading.record["failed"]
  assert text.startswith("mine is declared causal, but output 0 reads input 1;")
  assert reading.record["mine"]["leaks"] == S - 1
  assert reading.record["held"] == {
    "declared": "causal",
    "reads": f"{S - 1} back, 0 ahead",
    "leaks": 0,
    "not used": 0,
    "outputs": S,
    "inputs": S,
  }
  assert reading.draw(tmp_path / "c.png").stat().st_size > 10_000
  task = task._replace(contexts=None)
  with pytest.raises(ValueError, match="context: this run's task does not say"):
    instruments.read("context", run._replace(task=task))
