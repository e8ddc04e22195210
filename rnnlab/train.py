"""The trainer: from a config to a run directory, killed or not.

One pass of the loop is one compiled call of K updates. Around it: rows in
metrics.jsonl, evaluations, checkpoints, and the ends of a run. All that the
loop remembers is kept with the checkpoints, so a run that was killed and
started again does what it would have done.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import platform
import signal
import time

import flax
import jax
import numpy as np
import optax

from rnnlab import (
  checkpoint,
  metrics,
  monitor,
  optim,
  parallel,
  rundir,
  settings,
  strict_json,
  tasks,
)
from rnnlab.data import batching
from rnnlab.feed import Feed
from rnnlab.plan import History, Plan
from rnnlab.program import Report, Shared, Soon, Step, Watch, abreast, alone
from rnnlab.progress import Progress
from rnnlab.update import accumulating, init_state


def train(
  config: dict,
  workdir,
  started: float | None = None,
  shared: Shared | None = None,
  progress: Progress | None = None,
  signalled: list | None = None,
) -> dict:
  """Trains as config says, in workdir; the same call again goes on.

  config: nested plain values under `seed`, `task`, `model`, `opt`, `train`; all
  is checked before anything is written, and ValueError names the field.
  started: when the wall-clock budget began (time.monotonic()), by default now.
  shared: what the runs of this process have in common. signalled: the list of
  an `interruptible` around several runs. Returns the final record; its
  "val/nll" (or the task's own metric) is that of the final parameters. A run
  that has ended is left alone and its record returned again.

  Several processes call this alike, on one file system. The first of them alone
  writes; a ValueError or OSError of one that concerns the run ends all.
  """
  run = Run(config, started, shared or Shared())
  with contextlib.ExitStack() as held:
    if progress is None:
      shown = Progress("train", shown=parallel.first())
      progress = held.enter_context(shown)
    directory = held.enter_context(run.claim(workdir))
    if signalled is None:
      signalled = held.enter_context(interruptible())
    return alone(run.steps(directory, progress, signalled), run.program)


def train_abreast(members, shared: Shared) -> list:
  """Trains several runs at once, in one compiled call for all.

  members: of (config, workdir, progress). The runs differ in what a program
  does not know of (`program.DATA`, the optimiser's numbers), and have no
  wall-clock budget, which they could not share. Returns the record of each, or
  the Exception that it ended with.
  """
  results, runs, feeds = [None] * len(members), {}, {}
  with contextlib.ExitStack() as held:
    signalled = held.enter_context(interruptible())
    for i, (config, workdir, progress) in enumerate(members):
      try:
        run = Run(config, None, shared)
        if run.plan.seconds:
          raise ValueError(
            f"train.seconds={run.plan.seconds:g} is the budget of one run; "
            "runs that share their calls cannot share it"
          )
        # Of one object where they read the same data: prepared once for all.
        data = strict_json.dumps(config["task"])
        run.feed = feeds.setdefault(data, run.feed)
        directory = held.enter_context(run.claim(workdir))
        runs[i] = run, run.steps(directory, progress, signalled)
      except Exception as error:
        results[i] = error
    if runs:
      (program,) = {run.program for run, _ in runs.values()}
      found = abreast(
        [steps for _, steps in runs.values()], program, len(feeds) == 1
      )
      for i, result in zip(runs, found, strict=True):
        results[i] = result
  for result in results:
    if isinstance(result, SystemExit):  # a signal is for all of them
      raise result
  return results


class Run:
  """One run. Where there are several processes, each has one of its own and all
  take the same turns; the first alone writes and prints."""

  def __init__(self, config, started, shared):
    self.started = time.monotonic() if started is None else started
    with parallel.together():
      config = strict_json.settle(config, "config")
      sections = {"seed", "task", "model", "opt", "train"}
      if odd := sorted(sections ^ config.keys()):
        raise ValueError(
          f"config needs {', '.join(sorted(sections))}; see {odd}"
        )
      batching.check_seed("seed", config["seed"])
      self.config = config
      self.plan = Plan(**settings.bind(Plan, "train", config["train"]))
      make = functools.partial(tasks.make, **config["task"])
      task = shared.task(config, lambda: make(model=config["model"]))
      self.task = accumulating(task, self.plan.accumulate, self.plan.epochs)
      self._prepare(shared)
    self.facts = {
      "vocabulary": self.task.vocab and list(self.task.vocab.symbols),
      "data": self.task.facts,
      "versions": {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "optax": optax.__version__,
        "numpy": np.__version__,
      },
      "devices": parallel.facts(self.mesh),
    }
    told = config | self.facts
    parallel.same({k: strict_json.dumps(v) for k, v in told.items()})

  def _prepare(self, shared):
    plan, task = self.plan, self.task
    self.mesh = parallel.mesh(plan.data_parallel)
    self.end = plan.end(task.per_epoch)
    fixed = {
      "steps": self.end,
      "steps_per_epoch": task.per_epoch,
      "budget": plan.seconds is not None,
    }
    given = settings.bind(optim.make, "opt", self.config["opt"])
    for name in given.keys() & fixed.keys():
      raise ValueError(
        f"opt.{name} follows from train and cannot be set to {given[name]!r}"
      )
    self.optimizer = optim.make(**given | fixed)
    self.evaluated = plan.evaluated(given.get("average"))
    self.key = jax.random.key(self.config["seed"])
    # By shapes alone: what the model refuses, it refuses here.
    made = self.config, task, self.optimizer, self.mesh
    self.init = shared.init(*made)
    # By a function that says nothing of devices: a checkpoint is read on one.
    first = functools.partial(init_state, task, self.optimizer)
    self.like = jax.eval_shape(first, self.key)
    self.program = shared.program(*made)
    self.feed = Feed(task, self.mesh, plan.updates_per_call, self.end)
    self.step, self.history, self.pending = 0, History(), None
    self.earlier, self.call_seconds, self.clock = 0.0, 0.0, 0.0
    self.validates = bool(task.texts["validation"])
    if plan.patience and not self.validates:
      raise ValueError(
        f"train.patience={plan.patience} waits for validation, but the "
        "validation split is empty"
      )
    if plan.monitor:
      self.watched = monitor.batch(task, self.like.params)
    if any(leaf.ndim for leaf in jax.tree.leaves(self.like.carry)):
      self._check_rows()

  def claim(self, workdir):
    """The run directory, locked, with the settings and facts written down."""
    with parallel.together():
      directory = rundir.RunDir(workdir)
      if parallel.first():
        directory = rundir.claim(workdir, self.config, self.facts)
    return directory

  def _check_rows(self):
    """Refuses batches that need more rows to divide than the carry has."""
    n = self.mesh.size
    for name, batches in (
      ("batch_size", self.task.train_batches(0)),
      ("eval_batch_size", self.task.eval_batches("validation")),
    ):
      for batch in itertools.islice(batches, 1):
        rows = len(jax.tree.leaves(batch)[0])
        near = [size for size in (rows // n * n, (rows // n + 1) * n) if size]
        if rows % n:
          raise ValueError(
            f"task.{name}={rows} does not divide over {n} devices, and this "
            f"task carries a state from batch to batch, row by row; "
            f"{' or '.join(map(str, near))} would"
          )

  def steps(self, directory, progress, signalled):
    """The run as a generator: it asks (`program`), and returns the record.

    signalled: a list that is no longer empty once the run has to stop.
    """
    self.directory, self.progress = directory, progress
    self.signalled = signalled
    self.log = rundir.MetricsLog(directory.metrics)
    compiling = yield from self._begin()
    plan = dataclasses.asdict(self.plan)
    if (self.history.ended or {}).get("plan") == plan:
      progress.say(
        f"this run has ended already, at step {self.step}; nothing to do"
      )
      return self._record()
    self.history.ended = None
    if self.end and self.step > self.end:
      progress.say(
        f"the run stands at step {self.step}, past the {self.end} asked for"
      )
    if self.validates and self.plan.seconds:
      # Compiled now, so that the clock tells what an evaluation takes. Two, as
      # a carry may have other rows in all batches but the first.
      yield self._asked(itertools.islice(self._validation(), 2))
    if self.validates and self.step == 0:
      yield from self._evaluate()
    if compiling:
      compiling.result()
    self.ready, why = self.feed.at(self.step), self._why_end()
    compilations = self.program.compilations
    while not why and not self.stopped:
      began, compiled = time.monotonic(), compilations.total()
      yield from self._call()
      if compilations.total() == compiled:  # or it foretells nothing
        self.call_seconds = time.monotonic() - began
      why = self._why_end()
      if (yield from self._report(why)):
        why = self._why_end()  # an evaluation takes time, and may be the last
    if self.stopped:
      self._settle()
      if self.step:
        self._save()
      raise SystemExit(
        f"stopped at step {self.step} by a signal, all is saved in "
        f"{directory.path}; the same command goes on from there"
      )
    if self.step == 0:
      raise ValueError(
        f"train.seconds={self.plan.seconds:g} leaves no time for an update: "
        f"{self._elapsed():.1f} s have passed at the start"
      )
    self._settle()
    if self.validates and self.history.validation["step"] != self.step:
      yield from self._evaluate()
    elif self.history.window:
      self._row({})
    self.history.ended = {"plan": plan, "why": why}
    self._save()
    return self._record()

  def _begin(self):
    """The state to go on from; returns what `Soon` was answered with."""
    data = ", ".join(f"{name} {v}" for name, v in self.task.facts.items())
    notes = [f"data: {data}"]
    if not self.validates:
      notes.append("the validation split is empty: no evaluation, no best")
    with parallel.together():
      found = self._restore()
    what = f"what it finds in {self.directory.checkpoints}"
    parallel.same({what: checkpoint.fingerprint(found.state) if found else ""})
    compiling = None
    if found is None:
      if ready := self.feed.at(0):  # beside init and the first evaluation
        compiling = yield Soon(self.like, ready[1], self.optimizer.numbers)
      self.state = self.init(self.key)
    else:
      self.state = parallel.replicate(self.mesh, found.state)
      self.step, self.history = found.step, History(**found.facts)
      self.earlier = self.history.elapsed
      notes += [f"passed over checkpoint {note}" for note in found.skipped]
    with parallel.together():
      if parallel.first():
        if found:
          checkpoint.set_aside(self.directory.checkpoints, found.step)
        # Not the step: its row may have been written after the checkpoint.
        notes += self.log.rewind(self.history.logged)
    notes += [f"going on from step {self.step}"] if found else []
    for note in notes:
      self.progress.say(note)
    self.mark = self.read = time.monotonic()
    return compiling

  def _restore(self):
    """The newest checkpoint, or None for a run that begins."""
    found = checkpoint.restore(self.directory.checkpoints, self.like)
    rows = self.log.read(self.directory.metrics)
    if not found and rows and rows[-1]["step"] > self.plan.save_every:
      raise ValueError(
        f"{self.directory.metrics} tells of step {rows[-1]['step']}, but "
        f"{self.directory.checkpoints} holds no checkpoint; to start over, "
        "name another directory"
      )
    return found

  def _params(self):
    """The parameters that are evaluated."""
    return getattr(self.state, self.evaluated)

  def _asked(self, batches):
    params = self._params()
    return Report(params, self.task.carry(params), batches)

  def _validation(self):
    batches = self.task.eval_batches("validation")
    return (parallel.split(self.mesh, batch) for batch in batches)

  def _elapsed(self):
    return self.earlier + time.monotonic() - self.started

  def _share(self):
    """How much of the run is done, by steps or by the clock."""
    steps = self.step / self.end if self.end else 0
    clock = self._elapsed() / self.plan.seconds if self.plan.seconds else 0
    return min(max(steps, clock), 1)

  def _why_end(self):
    """What ends the run here, the same in all processes; None goes on."""
    # Half as much again, since the machine may be slower by then; and two
    # calls, since one is always under way.
    reserve = 1.5 * self.history.slowest + 2 * self.call_seconds + 1
    self.clock, reserve, self.stopped = parallel.largest(
      self._elapsed(), reserve, bool(self.signalled)
    )
    if self.end and self.step >= self.end:
      return "steps"
    if self.plan.patience and self.history.worse >= self.plan.patience:
      return "patience"
    if self.plan.seconds and self.clock + reserve >= self.plan.seconds:
      return "seconds"
    return None

  def _call(self):
    """Asks for the updates that are ready."""
    stop, batches_K = self.ready
    self.feed.soon(stop)  # while the devices work on this call
    share = self.clock / self.plan.seconds if self.plan.seconds else 0.0
    self.state, updates = yield Step(
      self.state, batches_K, stop, share, self.optimizer.numbers
    )
    self.step, before = stop, self.pending
    self.pending = updates
    # Where the answer comes before the devices have begun, the host reads the
    # call before while they work.
    self._read(before)
    self.ready = self.feed.at(self.step)

  def _report(self, why_end):
    """What is due at this step: a row, an evaluation, a checkpoint.

    Returns whether it evaluated.
    """
    plan, best = self.plan, self.history.best_step
    validates = self.validates and self.step % plan.eval_every == 0
    saves = self.step % plan.save_every == 0
    if validates:
      yield from self._evaluate()
    elif saves or self.step % plan.log_every == 0:
      self._settle()
      # The last row of a run waits for its evaluation: a step, a row.
      if self.step % plan.log_every == 0 and not why_end:
        self._row({}, (yield from self._watch()))
    if saves or self.history.best_step != best:
      self._save()
    return validates

  def _settle(self):
    """Reads what is still on the device."""
    pending, self.pending = self.pending, None
    self._read(pending)

  def _read(self, updates):
    """Adds the figures of one call to the window."""
    if updates is None:
      return
    updates = jax.device_get(updates)
    self.read = time.monotonic()
    done, window = updates.done_K, self.history.window
    sums = metrics.to_host(updates.metrics)
    norms = updates.grad_norm_K[done]
    sums["grad_norm"] = metrics.Mean(float(norms.sum()), len(norms))
    for name, mean in sums.items():
      total, count = window.get(name, (0.0, 0))
      window[name] = (total + mean.total, count + mean.count)
    window["lr"] = float(updates.rate_K[done][-1])
    window["skipped"] = int(updates.skipped_K[done][-1])
    streak = int(updates.streak_K[done].max())
    if streak >= self.plan.max_skips:
      self._settle()  # of the call under way too, or its figures were lost
      self._row({})
      self._save()
      raise ValueError(
        f"{streak} updates in a row were not finite and were refused "
        f"(train.max_skips={self.plan.max_skips}); step {self.step} holds the "
        f"parameters from before, saved in {self.directory.checkpoints}"
      )

  def _watch(self):
    """What the monitor sees, where it is due: figures of a row."""
    if not self.plan.monitor or self.step % self.plan.monitor:
      return {}
    found = yield Watch(self.state.params, self.watched)
    return monitor.row(found)

  def _row(self, validation, watched=None):
    """Writes the window as a row of metrics.jsonl and empties it."""
    window, self.history.window = self.history.window, {}
    row = {"step": self.step}
    sums = {name: v for name, v in window.items() if isinstance(v, tuple)}
    for name, (total, count) in sums.items():
      if count:
        name = name if name == "grad_norm" else f"train/{name}"
        row[name] = total / count
    row |= {name: window[name] for name in ("lr", "skipped") if name in window}
    row |= validation | (watched or {})
    metric, unit = self.task.metric, self.task.unit
    speed = sums.get(metric, (0, 0))[1] / max(self.read - self.mark, 1e-9)
    self.mark = time.monotonic()
    row |= {f"{unit}/s": round(speed), "seconds": round(self._elapsed(), 3)}
    with parallel.together():
      if parallel.first():
        self.log.append(row)
    self.history.logged = self.step
    figures = [f"step {self.step}" + (f"/{self.end}" if self.end else "")]
    for split, label in (("train", metric), ("val", f"val {metric}")):
      name = f"{split}/{metric}"
      figures += [f"{label} {row[name]:.4f}"] if name in row else []
    if window:
      figures += [f"lr {row['lr']:.2e}", f"{speed / 1000:.1f}k {unit}/s"]
    if row.get("skipped"):
      figures += [f"{row['skipped']} updates refused"]
    self.progress.update(self._share(), "  ".join(figures), bool(validation))

  def _evaluate(self):
    self._settle()
    began = time.monotonic()
    sums = yield self._asked(self._validation())
    history, metric = self.history, f"val/{self.task.metric}"
    now = sums[self.task.metric].value(metric)
    values = {f"val/{name}": mean.value(name) for name, mean in sums.items()}
    history.validation = {"step": self.step} | values
    best = math.inf if history.best is None else history.best
    if self.step and now < best:  # which no NaN is
      history.best, history.best_step, history.worse = now, self.step, 0
    elif self.step:
      history.worse += 1
    history.slowest = max(history.slowest, time.monotonic() - began)
    self._row(values, (yield from self._watch()))

  def _save(self):
    self.history.elapsed = self._elapsed()
    best = self.history.best_step
    with parallel.together():
      # The first process holds all of the state, so it writes alone.
      if parallel.first():
        checkpoint.save(
          self.directory.checkpoints,
          self.step,
          parallel.local(self.state),
          dataclasses.asdict(self.history),
          keep=self.plan.keep,
          protect=() if best is None else (best,),
        )

  def _record(self):
    history, params = self.history, self._params()
    validation, metric = history.validation or {}, f"val/{self.task.metric}"
    return {
      "step": self.step,
      "ended": history.ended["why"],
      metric: validation.get(metric),
      f"best/{metric}": history.best,
      "best_step": history.best_step,
      "parameters": sum(p.size for p in jax.tree.leaves(params)),
      "skipped": int(self.state.skipped),
      "fingerprint": checkpoint.fingerprint(params),
      "compilations": dict(self.program.compilations),
      "seconds": round(history.elapsed, 3),
      "data": self.task.facts,
      "workdir": str(self.directory.path),
    }


@contextlib.contextmanager
def interruptible():
  """Collects SIGINT and SIGTERM in a list, so that a run can end in order."""
  signalled, before = [], {}
  for number in (signal.SIGINT, signal.SIGTERM):
    with contextlib.suppress(ValueError):  # only the main thread may
      before[number] = signal.signal(
        number, lambda number, frame: signalled.append(number)
      )
  try:
    yield signalled
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
