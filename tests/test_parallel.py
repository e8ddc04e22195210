"""The same numbers on one device and on several, and what cannot be shared."""

import collections
import functools
import json
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from rnnlab import feed, optim, parallel, rundir, update
from rnnlab import train as trainer
from rnnlab.metrics import Mean, cross_entropy
from rnnlab.models import lm
from rnnlab.train import train
from rnnlab.update import evaluate, init_state, make_train_steps

# Neither divides over 4 or 8 devices, so padding is put to the test too.
ODD = {"task.batch_size": 6, "task.eval_batch_size": 5}
REVERSAL = {
  "task": {
    "name": "name_reversal",
    "split": "shuffle",
    "batch_size": 6,
    "eval_batch_size": 5,
  },
  "model": {
    "embed": 4,
    "hidden": 8,
    "dropout": 0.3,
    "attention": {"score": "additive", "width": 4, "query": "previous"},
    "context": {"init": True, "update": True},
    "cell": {"name": "gru"},
  },
}


def same_rows(rows, others, rtol=1e-6):
  """Equal columns, counts and rates; losses to the tolerance."""
  assert len(rows) == len(others)
  for row, other in zip(rows, others, strict=True):
    assert row.keys() == other.keys()
    for name, value in row.items():
      # Each is a sum over many terms; that of the norm is over squares too.
      rel = {"step": 0, "skipped": 0, "lr": 0, "grad_norm": 1e-5}.get(
        name, rtol
      )
      np.testing.assert_allclose(value, other[name], rtol=rel, err_msg=name)


def waits_in_time(text):
  """Which exchanges of a compiled program stand inside its loops over time.

  The scan over updates is a while loop in XLA's words, and so is that over time
  inside it, in which nothing may wait for another device.
  """
  exchanges = re.findall(
    r" (?:all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
    r'(?:-start)?\(.*?op_name="([^"]*)"',
    text,
  )
  assert exchanges
  return [name for name in exchanges if name.count("while/body") > 1]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
  """(record, rows) of a run on one device."""
  folder = tmp_path_factory.mktemp("one")
  record = train(tiny.config(folder, **ODD), folder / "run")
  return record, tiny.rows(folder / "run")


@pytest.mark.parametrize(
  "devices", [2, pytest.param(0, marks=pytest.mark.slow)]
)
def test_a_run_on_several_devices(tmp_path, monkeypatch, caplog, one, devices):
  calls, call = [], trainer.Run._call

  def look(loop):
    calls.append((loop, loop.ready))
    return call(loop)

  monkeypatch.setattr(trainer.Run, "_call", look)
  settings = tiny.config(tmp_path, **ODD, **{"train.data_parallel": devices})
  jax.config.update("jax_log_compiles", True)  # in all threads
  try:
    record = train(settings, tmp_path / "run")
  finally:
    jax.config.update("jax_log_compiles", False)
  same_rows(tiny.rows(tmp_path / "run"), one[1])
  assert record["best_step"] == one[0]["best_step"]
  assert record["compilations"] == {"train_steps": 1, "report": 1}
  # What is traced once is compiled again where its inputs lie otherwise.
  assert caplog.text.count("Compiling jit(traced)") == 2
  loop, (stop, batches_K) = calls[-1]
  found = rundir.load(tmp_path / "run")[1]["devices"]
  assert found["devices"] == loop.mesh.size == (devices or 8)
  assert found["processes"] == 1 and found["matmul_precision"] == "default"
  assert all(
    len(leaf.sharding.device_set) == loop.mesh.size
    for leaf in jax.tree.leaves(loop.state)
  )
  args = loop.state, batches_K, np.int32(stop), np.float32(0)
  args += (loop.optimizer.numbers,)
  text = loop.program.train_steps._jitted.lower(*args).compile().as_text()
  assert waits_in_time(text) == []


@pytest.mark.slow
def test_a_checkpoint_goes_on_anywhere(tmp_path, one):
  run, devices = tmp_path / "run", [8, 1, 2]
  for at, n in zip((6, 11, 16), devices, strict=True):
    settings = tiny.config(tmp_path, **ODD, **{"train.data_parallel": n})
    tiny.kill(settings, run, at)
  record = train(tiny.config(tmp_path, **ODD), run)
  same_rows(tiny.rows(run), one[1])
  assert record["step"] == 20
  changes = map(json.loads, (run / "changes.jsonl").read_text().splitlines())
  told = collections.defaultdict(list)
  for change in changes:
    told[change["field"]].append(change.get("new", 1))
  assert told["devices.devices"] == told["train.data_parallel"] == [1, 2, 1]


def make(name, folder):
  """A task small enough to be shared."""
  base = tiny.config(folder, **ODD)
  if name == "name_reversal":
    path = base["task"]["path"]
    return tiny.task(REVERSAL | {"task": REVERSAL["task"] | {"path": path}})
  task = tiny.task(base)
  return carried(task, base) if name == "carried" else task


def carried(task, settings):
  """The task, with the state of each row carried to the next batch."""
  size = task.vocab.size
  model = lm.make(vocab_size=size, **settings["model"])

  def loss(params, carry, batch, key):
    mask_BT = batch["mask_BT"]
    carry, logits_BTV = model.apply(
      params, batch["inputs_BT"], carry, mask_BT=mask_BT, key=key
    )
    nll = Mean.of(cross_entropy(logits_BTV, batch["targets_BT"]), mask_BT)
    return nll, (carry, {"nll": nll})

  def eval_batches(*args):
    return task.eval_batches("validation", 8)

  return task._replace(
    carry=lambda params: (jnp.full((8, settings["model"]["hidden"]), 0.5),),
    loss=loss,
    report=lambda params, carry, batch: loss(params, carry, batch, None)[1],
    train_batches=lambda start: task.eval_batches("train", 8),
    eval_batches=eval_batches,
  )


def run(task, devices, updates=3):
  """(metrics of the updates, sums of an evaluation, compiled text)."""
  mesh, optimizer = parallel.mesh(devices), optim.make(lr=0.01, clip=1.0)
  compile = functools.partial(jax.jit, out_shardings=parallel.whole(mesh))
  init = compile(lambda key: init_state(task, optimizer, key))
  state, feed = init(jax.random.key(0)), task.train_batches(0)
  batches_K = jax.tree.map(
    lambda *rows: np.stack(rows), *(next(feed) for _ in range(updates))
  )
  batches_K = parallel.split(mesh, batches_K, axis=1)
  args = state, batches_K, np.int32(updates), np.float32(0), optimizer.numbers
  steps = compile(make_train_steps(task, optimizer)).lower(*args).compile()
  state, out = steps(*args)
  batches = (
    parallel.split(mesh, batch) for batch in task.eval_batches("validation")
  )
  carry = task.carry(state.params)
  sums = evaluate(compile(task.report), state.params, carry, batches)
  return jax.device_get(out), sums, steps.as_text()


@pytest.mark.slow
@pytest.mark.parametrize(
  "name",
  [
    pytest.param("name_lm", marks=pytest.mark.exhaustive),
    pytest.param("name_reversal", marks=pytest.mark.exhaustive),
    "carried",
  ],
)
def test_updates_and_evaluation_of_every_kind(tmp_path, name):
  task = make(name, tmp_path)
  out, sums, _ = run(task, 1)
  others, other_sums, text = run(task, 4)
  assert np.all(out.metrics["nll"].count == others.metrics["nll"].count)
  np.testing.assert_allclose(
    others.metrics["nll"].total, out.metrics["nll"].total, rtol=1e-6
  )
  np.testing.assert_allclose(others.grad_norm_K, out.grad_norm_K, rtol=1e-5)
  assert sums.keys() == other_sums.keys()
  for name, mean in sums.items():
    assert mean.count == other_sums[name].count > 0, name
    np.testing.assert_allclose(
      other_sums[name].total, mean.total, rtol=1e-6, atol=1e-6, err_msg=name
    )
  assert waits_in_time(text) == []


def test_rows_are_spread_and_filled_up():
  mesh = parallel.mesh(8)
  batch = {
    "x_KBT": np.arange(60).reshape(2, 10, 3) + 1,
    "mask_KBT": np.ones((2, 10, 3), bool),
    "one_K": np.arange(2.0, dtype=np.float32),
  }
  split = parallel.split(mesh, batch, axis=1)
  for name in ("x_KBT", "mask_KBT"):
    assert split[name].shape == (2, 16, 3)
    shards = split[name].addressable_shards
    assert {shard.data.shape for shard in shards} == {(2, 2, 3)}
    np.testing.assert_array_equal(split[name][:, :10], batch[name])
    assert not split[name][:, 10:].any()
  assert split["one_K"].sharding.is_fully_replicated
  one = parallel.split(parallel.mesh(1), batch, axis=1)
  jax.tree.map(np.testing.assert_array_equal, one, batch)


@pytest.mark.parametrize(
  ("value", "words"),
  [
    (9, "data_parallel=9, but there are 8 devices"),
    (-1, "train.data_parallel must be > 0, not -1"),
    (2.0, "train.data_parallel must be of type int, not 2.0"),
  ],
)
def test_what_cannot_be_shared_is_refused(tmp_path, value, words):
  settings = tiny.config(tmp_path, **{"train.data_parallel": value})
  with pytest.raises(ValueError, match=words):
    train(settings, tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_rows_of_a_carry_are_not_filled_up(tmp_path, monkeypatch):
  make, settings = trainer.tasks.make, tiny.config(tmp_path)
  monkeypatch.setattr(
    trainer.tasks, "make", lambda **how: carried(make(**how), settings)
  )
  settings["train"]["data_parallel"] = 3
  with pytest.raises(ValueError, match="batch_size=8 .* 3 devices.* 6 or 9 "):
    train(settings, tmp_path / "run")
  assert not (tmp_path / "run").exists()


def test_the_next_batches_are_begun_before_a_call_is_made(
  tmp_path, monkeypatch
):
  events, made, soon = [], [], feed.Feed.soon

  def look(i, batch):
    made.append((i, threading.current_thread()))
    return batch

  def begun(own, step):
    events.append(("begun", step))
    soon(own, step)

  def called(own, *args):
    if len(args) == 5:  # updates, up to the third
      events.append(("called", int(args[2])))
    return call(own, *args)

  monkeypatch.setattr(feed.Feed, "soon", begun)
  call = update.Counted.__call__
  monkeypatch.setattr(update.Counted, "__call__", called)
  tiny.wrap(monkeypatch, look)
  train(tiny.config(tmp_path, **ODD), tmp_path / "run")
  calls = [step for name, step in events if name == "called"]
  assert calls == list(range(1, 21))
  for step in calls:
    assert events.index(("begun", step)) < events.index(("called", step))
  # Each once, in a thread that is not the trainer's.
  assert [i for i, _ in made] == list(range(20))
  assert threading.current_thread() not in {thread for _, thread in made}


ADDRESS, COUNT, INDEX = parallel.JAX


@pytest.mark.parametrize(
  ("env", "words"),
  [
    ({COUNT: "2", INDEX: "0"}, f"{ADDRESS} is not set"),
    ({ADDRESS: "a:1", INDEX: "0"}, f"{COUNT} is not set"),
    ({ADDRESS: "a:1", COUNT: "2"}, f"{INDEX} is not set"),
    ({ADDRESS: "a:1", COUNT: "two", INDEX: "0"}, f"{COUNT} .* not 'two'"),
    ({ADDRESS: "a:1", COUNT: "2", INDEX: "2"}, f"{INDEX} must be below .*=2"),
    ({ADDRESS: "a", COUNT: "2", INDEX: "0"}, "must be host:port, not 'a'"),
  ],
)
def test_an_environment_that_is_not_whole(monkeypatch, env, words):
  for name, value in env.items():
    monkeypatch.setenv(name, value)
  with pytest.raises(ValueError, match=words):
    parallel.launched()


def test_what_the_environment_says(monkeypatch):
  assert parallel.launched() is None
  slurm = dict.fromkeys(parallel.SLURM, "1")
  for name, value in slurm.items():
    monkeypatch.setenv(name, value)
  assert parallel.launched() is None
  monkeypatch.setenv("SLURM_NTASKS", "4")
  assert parallel.launched() == {}
  for name, value in {ADDRESS: "a:1", COUNT: "3", INDEX: "2"}.items():
    monkeypatch.setenv(name, value)
  assert parallel.launched() == {
    "coordinator_address": "a:1",
    "num_processes": 3,
    "process_id": 2,
  }
  monkeypatch.setenv(COUNT, "1")
  monkeypatch.setenv(INDEX, "0")
  assert parallel.launched() is None


def test_alone_nothing_is_exchanged():
  assert parallel.first() and not parallel.connected()
  assert parallel.largest(1.5, True) == (1.5, True)
  parallel.same({"anything": ""})
  with pytest.raises(OSError, match="full"), parallel.together():
    raise OSError("full")
