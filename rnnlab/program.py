"""The compiled calls of runs, shared by runs that differ in data alone.

A run (`train.Run`) is a generator: it asks for what is to be computed and is
answered, so it need not know whether it stands alone or beside others.

    alone(run, program)       one run
    abreast(runs, program)    several at once: their states are stacked, and one
                              vmapped call moves them all

Runs that are trained one after another, or in threads of their own, and share
what is `Shared` compile once as well.
"""

import collections
import fnmatch
import functools
import threading
from concurrent import futures
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rnnlab import monitor, parallel, strict_json
from rnnlab.update import Counted, evaluate, init_state, make_train_steps

# Settings that no compiled program knows of: init alone reads them, they are
# data to it, as the optimiser's numbers are, or say when one is called.
DATA = (
  "seed",
  "task.seed",
  "train.monitor",
  "model.*cell.keep.*",
  "model.*cell.recurrent",
  "model.*cell.scale",
  "model.*cell.input",
  *(f"opt.{name}" for name in ("lr", "warmup", "end", "weight_decay")),
  *(f"opt.{name}" for name in ("b1", "b2", "eps")),
)
# Of these it knows whether they are there.
SWITCHES = "opt.clip", "opt.momentum", "opt.average"


class Step(NamedTuple):
  """Asks for the updates up to number `stop`: (state, update.Updates)."""

  state: Any
  batches_K: Any
  stop: int
  elapsed: float
  numbers: dict


class Soon(NamedTuple):
  """Says that Steps are to come, of such shapes: a Future of their program, or
  None where nobody prepares it."""

  state: Any  # shapes
  batches_K: Any
  numbers: dict


class Report(NamedTuple):
  """Asks for the sums of the report over batches, an iterator: {name: Mean}."""

  params: Any
  carry: Any
  batches: Any


class Watch(NamedTuple):
  """Asks for what `monitor.measure` finds."""

  params: Any
  batch: Any


class Program:
  """The calls of one kind of run; each compiles when it is first used."""

  def __init__(self, task, optimizer, mesh):
    self.mesh, self.compilations = mesh, collections.Counter()
    self._steps = make_train_steps(task, optimizer)
    self._report = task.report
    self.train_steps = self._counted("train_steps", self._steps, donated=0)
    self.report = self._counted("report", self._report)
    watch = functools.partial(monitor.measure, task)
    self.watch = self._counted("monitor", watch)
    self._abreast = {}

  def _counted(self, name, function, donated=()):
    # All that comes out is whole on every device, a carry of rows too (to join
    # it costs little beside the gradients): each process can read and save it.
    whole = parallel.whole(self.mesh)
    how = {"donate_argnums": donated, "out_shardings": whole}
    return Counted(name, function, self.compilations, **how)

  def ahead(self, soon: Soon):
    """Compiles `train_steps` in a thread, beside what else is compiled."""
    if parallel.connected():  # which compile in one order
      return None
    whole = parallel.whole(self.mesh)
    shapes = jax.tree.map(lambda x: x.update(sharding=whole), soon.state)
    args = shapes, soon.batches_K, np.int32(0), np.float32(0), soon.numbers
    pool = futures.ThreadPoolExecutor(1)
    future = pool.submit(self.train_steps.compile, *args)
    pool.shutdown(wait=False)
    return future

  def abreast(self, same_batches: bool):
    """(train_steps, report) of several members, in tuples, a place a member.

    same_batches: all see the same ones, given once; otherwise a tuple of them.
    The report's figures are named (member, name).
    """
    if same_batches not in self._abreast:
      axis = None if same_batches else 0
      steps = jax.vmap(self._steps, in_axes=(0, axis, 0, None, 0))
      report = jax.vmap(self._report, in_axes=(0, 0, axis))

      def stack(members):
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *members)
        return self._spread(stacked, len(members))

      def given(batches):
        return batches if same_batches else stack(batches)

      def steps_M(states, batches_K, stops_M, elapsed, numbers):
        args = given(batches_K), stops_M, elapsed, stack(numbers)
        return _apart(steps(stack(states), *args), len(states))

      def report_M(params, carries, batch):
        members = len(params)
        found = report(stack(params), stack(carries), given(batch))
        carries, metrics = zip(*_apart(found, members), strict=True)
        return carries, {
          (m, name): mean
          for m, one in enumerate(metrics)
          for name, mean in one.items()
        }

      self._abreast[same_batches] = (
        self._counted("train_steps", steps_M, donated=0),
        self._counted("report", report_M),
      )
    return self._abreast[same_batches]

  def _spread(self, stacked, members):
    """The members shared out over the devices, where they divide."""
    if self.mesh.size == 1 or members % self.mesh.size:
      return stacked
    placed = NamedSharding(self.mesh, PartitionSpec(parallel.AXIS))
    return jax.lax.with_sharding_constraint(stacked, placed)


class Shared:
  """What the runs of one process have in common, made when it is first asked.

  Tasks by the settings of task and model, since all that a task does is a
  function of them; programs by kind; and jitted first states by both.
  """

  def __init__(self):
    self.programs, self._tasks, self._inits = {}, {}, {}
    self._making = threading.Lock()

  def task(self, config, make):
    """The task of these settings; make() builds it."""
    return self._once(self._tasks, _data(config), make)

  def program(self, config, task, optimizer, mesh) -> Program:
    """The program of these settings."""
    made = functools.partial(Program, task, optimizer, mesh)
    return self._once(self.programs, kind(config), made)

  def init(self, config, task, optimizer, mesh):
    """(key) -> the state before the first update, compiled."""

    def made():
      function = functools.partial(init_state, task, optimizer)
      return jax.jit(function, out_shardings=parallel.whole(mesh))

    return self._once(self._inits, (_data(config), kind(config)), made)

  def _once(self, made, key, make):
    with self._making:
      if key not in made:
        made[key] = make()
      return made[key]


def _data(config):
  return strict_json.dumps([config["task"], config["model"]])


def _apart(stacked, members):
  def of(m):
    return jax.tree.map(lambda x: x[m], stacked)

  return tuple(map(of, range(members)))


def kind(config) -> str:
  """What the settings of runs have in common that can share a program."""

  def rest(value, name):
    if isinstance(value, dict):
      inner = ((k, rest(v, f"{name}.{k}".strip("."))) for k, v in value.items())
      return {k: v for k, v in inner if v is not None} or None
    if any(fnmatch.fnmatchcase(name, pattern) for pattern in DATA):
      return None
    return value and True if name in SWITCHES else value

  return strict_json.dumps(rest(config, ""))


def alone(run, program: Program):
  """Answers one run until it ends; returns what it returns."""
  try:
    ask = next(run)
    while True:
      ask = run.send(_answer(ask, program))
  except StopIteration as end:
    return end.value


def _answer(ask, program):
  if isinstance(ask, Soon):
    return program.ahead(ask)
  if isinstance(ask, Report):
    return evaluate(program.report, *ask)
  if isinstance(ask, Watch):
    return program.watch(*ask)
  ask = ask._replace(stop=np.int32(ask.stop), elapsed=np.float32(ask.elapsed))
  return program.train_steps(*ask)


def abreast(runs, program: Program, same_batches: bool) -> list:
  """Answers several runs at once: what each of them returns, or raises.

  same_batches: all read the same data in the same order. A run that raises does
  not stop the others. A call moves the runs that are furthest behind; the
  others, and those that have ended, rest in their places, so one program serves
  from the first step to the last.
  """
  results, asks = [None] * len(runs), {}

  def proceed(run, answer=None):
    asks.pop(run, None)
    try:
      ask = runs[run].send(answer)
      asks[run] = runs[run].send(None) if isinstance(ask, Soon) else ask
    except StopIteration as end:
      results[run] = end.value
    except (Exception, SystemExit) as error:  # it has saved what it had to
      results[run] = error

  for run in range(len(runs)):
    proceed(run)
  # Of those that have something left to do. Theirs is what fills a place.
  members = list(asks)
  resting = {}
  while asks:
    reports = {m: ask for m, ask in asks.items() if isinstance(ask, Report)}
    watches = {m: ask for m, ask in asks.items() if isinstance(ask, Watch)}
    if watches:
      answers = {m: _answer(ask, program) for m, ask in watches.items()}
    elif reports:
      answers = _reports(reports, members, program, same_batches)
    else:
      resting |= asks
      answers = _steps(asks, resting, members, program, same_batches)
    for run, answer in answers.items():
      proceed(run, answer)
  return results


def _reports(asks, members, program, same_batches):
  """The answers to reports, asked for by some of the members or by all."""
  if not same_batches:
    return {m: _answer(ask, program) for m, ask in asks.items()}
  ask = next(iter(asks.values()))
  shown = [asks.get(m, ask) for m in members]
  params, carries = (
    tuple(s.params for s in shown),
    tuple(s.carry for s in shown),
  )
  _, report = program.abreast(same_batches)
  sums = evaluate(report, params, carries, ask.batches)
  return {
    m: {name: mean for (place, name), mean in sums.items() if place == i}
    for i, m in enumerate(members)
    if m in asks
  }


def _steps(asks, resting, members, program, same_batches):
  """The answers to the asks of those that are furthest behind.

  resting: the last Step of every member; the states of all move to new memory.
  """
  lead = min(asks.values(), key=lambda ask: ask.stop)
  moving = {
    m
    for m, ask in asks.items()
    if ask.stop == lead.stop and _shapes(ask) == _shapes(lead)
  }
  places = [resting[m] for m in members]
  batches_K = lead.batches_K
  if not same_batches:
    batches_K = tuple(
      resting[m].batches_K if m in moving else lead.batches_K for m in members
    )
  stops_M = np.int32([lead.stop if m in moving else 0 for m in members])
  steps, _ = program.abreast(same_batches)
  found = steps(
    tuple(place.state for place in places),
    batches_K,
    stops_M,
    np.float32(lead.elapsed),
    tuple(place.numbers for place in places),
  )
  for m, (state, _) in zip(members, found, strict=True):
    resting[m] = resting[m]._replace(state=state)
    if m in asks:
      asks[m] = resting[m]
  return {
    m: answer for m, answer in zip(members, found, strict=True) if m in moving
  }


def _shapes(ask):
  return jax.tree.map(np.shape, ask.batches_K)
