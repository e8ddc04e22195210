"""Runs that share a compiled program: the same numbers, compiled once."""

import collections
import copy
import functools
import os
import pathlib
import runpy
import signal
from concurrent import futures

import jax
import numpy as np
import pytest
import tiny
from conftest import all_cells

from rnnlab import (
  optim,
  program,
  rundir,
  settings,
  sweep,
  tasks,
  train,
  update,
)

ROOT = pathlib.Path(__file__).parents[1]
GATES = {"kind": "constant", "value": 2.0}
# Members of one kind: another seed, other numbers, other gates.
MEMBERS = [
  {},
  {"seed": 1, "opt.lr": 0.03, "opt.b1": 0.5},
  {"model.cell.keep": GATES, "opt.warmup": 2, "model.cell.recurrent": "xavier"},
]


def config(folder, **changes):
  gated = {"model.cell": {"name": "ugrnn", "keep": {"kind": "uniform"}}}
  gated |= {"train.log_every": 5, "train.save_every": 10}
  return tiny.config(folder, **copy.deepcopy(gated), **changes)


class Silent:
  """A progress that shows nothing."""

  def say(self, text):
    pass

  def update(self, share, text, keep=False):
    pass


def abreast(folder, members, name, shared=None):
  """(records, workdirs) of members trained at once."""
  folders = [folder / f"{name}{i}" for i in range(len(members))]
  given = [
    (config(folder, **m), f, Silent())
    for m, f in zip(members, folders, strict=True)
  ]
  return train.train_abreast(given, shared or program.Shared()), folders


@pytest.fixture(scope="module")
def single(tmp_path_factory):
  """[(record, rows)] of the members, each a run of its own."""
  folder, found = tmp_path_factory.mktemp("single"), []
  for i, member in enumerate(MEMBERS):
    record = train.train(config(folder, **member), folder / str(i))
    found.append((record, tiny.rows(folder / str(i))))
  assert len({record["fingerprint"] for record, _ in found}) == 3
  return found


def near(rows, others):
  assert [row.keys() for row in rows] == [row.keys() for row in others]
  for row, other in zip(rows, others, strict=True):
    for name, value in row.items():
      assert value == pytest.approx(other[name], rel=1e-5, abs=1e-7), name


def test_one_after_another_is_bit_for_bit_a_run_alone(tmp_path, single):
  shared = program.Shared()
  for i, (member, (record, rows)) in enumerate(
    zip(MEMBERS, single, strict=True)
  ):
    folder = tmp_path / str(i)
    again = train.train(config(tmp_path, **member), folder, shared=shared)
    assert again["fingerprint"] == record["fingerprint"]
    assert tiny.rows(folder) == rows
    assert again["compilations"] == {"report": 1, "train_steps": 1}
  assert len(shared.programs) == 1


def test_at_once_is_a_run_alone(tmp_path, single):
  records, folders = abreast(tmp_path, MEMBERS, "run")
  for record, folder, (wanted, rows) in zip(
    records, folders, single, strict=True
  ):
    assert record["compilations"] == {"report": 1, "train_steps": 1}
    assert record["best_step"] == wanted["best_step"]
    near(tiny.rows(folder), rows)
  # What they leave is a run's own: it is ended, and nothing is done again.
  again = train.train(config(tmp_path, **MEMBERS[1]), folders[1])
  assert again["fingerprint"] == records[1]["fingerprint"]
  assert again["compilations"] == {}


@pytest.mark.slow
def test_a_member_that_fails_stops_no_other(tmp_path, single):
  members = [
    {"opt.lr": -1.0},
    MEMBERS[0],
    {"opt.lr": 3e38},
    MEMBERS[2],
  ]
  records, folders = abreast(tmp_path, members, "run")
  assert "opt.lr" in str(records[0]) and isinstance(records[0], ValueError)
  assert "not finite" in str(records[2])
  assert records[1]["step"] == records[3]["step"] == 20
  assert records[1]["compilations"] == {"report": 1, "train_steps": 1}
  near(tiny.rows(folders[1]), single[0][1])
  near(tiny.rows(folders[3]), single[2][1])
  assert not folders[0].exists() and folders[2].exists()


@pytest.mark.slow
def test_members_that_stand_at_different_steps_go_on_together(tmp_path, single):
  folders = [tmp_path / f"run{i}" for i in range(3)]
  tiny.kill(config(tmp_path, **MEMBERS[0]), folders[0], 12)
  tiny.kill(config(tmp_path, **MEMBERS[1]), folders[1], 7)
  train.train(config(tmp_path, **MEMBERS[2]), folders[2])
  records, _ = abreast(tmp_path, MEMBERS, "run")
  for record, folder, (_, rows) in zip(records, folders, single, strict=True):
    assert record["step"] == 20
    near(tiny.rows(folder), rows)


@pytest.mark.slow
def test_each_has_its_own_batches_where_their_order_is_swept(tmp_path):
  members = [{}, {"task.seed": 1}]
  records, folders = abreast(tmp_path, members, "run")
  for i, (member, folder) in enumerate(zip(members, folders, strict=True)):
    train.train(config(tmp_path, **member), tmp_path / f"alone{i}")
    near(tiny.rows(folder), tiny.rows(tmp_path / f"alone{i}"))
  assert tiny.rows(folders[0])[-1] != tiny.rows(folders[1])[-1]
  assert records[0]["compilations"] == {"report": 1, "train_steps": 1}


def test_a_clock_cannot_be_shared(tmp_path):
  records, folders = abreast(tmp_path, [{"train.seconds": 60.0}], "run")
  assert "train.seconds=60" in str(records[0]) and not folders[0].exists()


@pytest.mark.slow
@pytest.mark.parametrize(
  "together, stacked",
  [pytest.param(1, None, marks=pytest.mark.exhaustive), (2, True), (2, False)],
)
def test_a_sweep_does_not_depend_on_how_many_are_trained_at_once(
  tmp_path, single, together, stacked
):
  points = [
    sweep.Point(str(i), {"member": i}, config(tmp_path, **member))
    for i, member in enumerate(MEMBERS)
  ]
  other = config(tmp_path, **{"model.hidden": 5})
  points.insert(1, sweep.Point("other", {"member": -1}, other))
  points[0].config["model"]["cell"]["keep"] = {"kind": "half_life", "steps": 9}
  shared = program.Shared()
  rows = sweep.run(
    *(points, tmp_path / "sweep"),
    together=together,
    stacked=stacked,
    half_lives=True,
    shared=shared,
  )
  once = [{"report": 1, "train_steps": 1}] * 2
  if not stacked:  # or the last of five has a call of its own
    assert [p.compilations for p in shared.programs.values()] == once
  # Measured on real inputs, whose logits are small before training.
  (column,) = {
    n[: -len("/end")]
    for n in rows[0]
    if n.startswith("half") and n.endswith("/end")
  }
  assert rows[0][f"{column}/start"] == pytest.approx(9, rel=0.3)
  assert rows[0][f"{column}/end"] != rows[0][f"{column}/start"]
  for row, (record, _) in zip(rows[2:], single[1:], strict=True):
    assert row["status"] == "done"
    near = functools.partial(pytest.approx, rel=1e-5 if stacked else 0, abs=0)
    assert row["val/nll"] == near(record["best/val/nll"])
    assert row["final/val/nll"] == near(record["val/nll"])


@pytest.mark.slow
def test_a_signal_ends_all_threads_and_what_they_did_is_saved(tmp_path, single):
  points = [
    sweep.Point(str(i), {"member": i}, config(tmp_path, **member))
    for i, member in enumerate(MEMBERS)
  ]

  def told(log, row):
    append(log, row)
    if row["step"] == 10:
      os.kill(os.getpid(), signal.SIGTERM)

  append, workdir = rundir.MetricsLog.append, tmp_path / "sweep"
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(rundir.MetricsLog, "append", told)
    with pytest.raises(SystemExit, match="signal"):
      sweep.run(points, workdir, together=2, stacked=False)
  assert not (workdir / "2").exists()  # it had not begun
  reached = [tiny.rows(workdir / str(i))[-1]["step"] for i in (0, 1)]
  assert all(0 < step < 20 for step in reached)
  rows = sweep.run(points, workdir, together=2, stacked=False)
  for row, (record, _) in zip(rows, single, strict=True):
    assert row["final/val/nll"] == record["val/nll"]
    assert row["steps"] == 20


def test_threads_that_call_at_the_same_time_compile_once():
  counts = collections.Counter()
  double = update.Counted("double", lambda x: 2 * x, counts)
  double.compile(jax.ShapeDtypeStruct((3,), np.float32))
  with futures.ThreadPoolExecutor(8) as pool:
    for size in (3, 4, 5):
      x = np.ones(size, np.float32)
      for out in pool.map(double, [x] * 16):
        np.testing.assert_array_equal(out, 2 * x)
  assert counts == {"double": 3}


def in_order(points, together):
  """The numbers of the points, call by call; nothing is trained."""
  calls = []
  members = [(point.config, i, None) for i, point in enumerate(points)]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(train, "train", lambda _, i, *rest: calls.append([i]))
    patch.setattr(
      *(train, "train_abreast"),
      lambda group, shared: calls.append([i for _, i, _ in group]) or group,
    )
    ended = sweep._results(members, together, True, program.Shared())
    assert sorted(i for i, _ in ended) == [*range(len(points))]
  return calls


def test_what_is_trained_at_once_shares_a_program_and_no_clock(tmp_path):
  changes = [{}, {"seed": 1}, {"train.seconds": 9.0}, {"seed": 2}]
  changes += [{"model.hidden": 3}, {"seed": 3}, {"seed": 4}]
  points = [
    sweep.Point(str(i), {}, config(tmp_path, **change))
    for i, change in enumerate(changes)
  ]
  assert in_order(points, together=1) == [[i] for i in range(7)]
  assert in_order(points, together=16) == [[2], [0, 1, 3, 5, 6], [4]]
  assert in_order(points, together=4) == [[2], [0, 1], [3, 5, 6], [4]]


def test_shares_are_all_of_the_points_once():
  for n in (1, 5, 36):
    for count in (1, 2, 7):
      parts = [sweep.share(list(range(n)), i, count) for i in range(count)]
      assert sum(parts, []) == list(range(n))
      assert max(map(len, parts)) - min(map(len, parts)) <= 1
  with pytest.raises(ValueError, match="part 3 of 3: it has to be 0 to 2"):
    sweep.share([1, 2], 3, 3)


# What no program knows of


def lowered(config):
  """The program of the updates of a config, as a text."""
  task = tasks.make(**config["task"], model=config["model"])
  fixed = {"steps": 100, "steps_per_epoch": task.per_epoch}
  given = settings.bind(optim.make, "opt", config["opt"])
  optimizer = optim.make(**given | fixed)
  key = jax.random.key(config["seed"])
  state = jax.eval_shape(lambda k: update.init_state(task, optimizer, k), key)
  batch = next(task.train_batches(0))
  batches_K = jax.tree.map(lambda x: np.stack([x]), batch)
  args = state, batches_K, np.int32(1), np.float32(0), optimizer.numbers
  return (
    jax.jit(update.make_train_steps(task, optimizer)).lower(*args).as_text()
  )


def assert_kinds(base, changed, same):
  assert (program.kind(base) == program.kind(changed)) == same
  assert (lowered(base) == lowered(changed)) == same


@pytest.mark.parametrize("cell", all_cells())
def test_what_init_alone_reads_changes_no_program(tmp_path, cell):
  base = tiny.config(tmp_path, **{"model.cell": cell})
  free = {"recurrent": "lecun", "scale": 0.5, "input": "uniform"}
  if cell["name"] != "rnn":
    free["keep"] = {"kind": "chrono", "t_max": 20.0}
  changed = tiny.config(tmp_path, **{"model.cell": cell | free})
  changed |= {"seed": 7, "opt": base["opt"] | {"lr": 0.5, "warmup": 1}}
  assert_kinds(base, changed, True)


def test_what_a_program_knows_makes_another_kind(tmp_path):
  base = tiny.config(tmp_path)
  for changes in (
    {"model.hidden": 9},
    {"model.dropout": 0.1},
    {"opt": base["opt"] | {"clip": 1.0}},
    {"opt": base["opt"] | {"schedule": "constant"}},
  ):
    assert_kinds(base, tiny.config(tmp_path, **changes), False)


@pytest.mark.slow
@pytest.mark.parametrize("arg", ["copying", "adding"])
def test_the_gates_of_a_memory_task_are_one_kind(arg):
  found = runpy.run_path(str(ROOT / "configs" / "memory.py"))
  base = found["get_config"](arg)
  base.lock()
  points = sweep.points(found["sweep"], arg, base)
  # Three cells, and so three programs for 36 runs.
  assert len({program.kind(point.config) for point in points}) == 3
  first = [point.config for point in points[:12]]
  assert len({lowered(config) for config in first[::3]}) == 1
