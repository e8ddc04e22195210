"""A run that was ended in any way goes on as if it had not been."""

import json
import os
import shutil
import signal

import numpy as np
import pytest
import tiny

from rnnlab import checkpoint, rundir, trained
from rnnlab.train import train

# A few updates a call, and sums of a window that a kill cuts in two.
WINDOWS = {"train.log_every": 12, "train.eval_every": 20, "train.save_every": 8}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
  """record(**changes) -> (record, rows) of a run that nothing ended."""
  known = {}

  def run(**changes):
    key = tuple(sorted(changes.items()))
    if key not in known:
      folder = tmp_path_factory.mktemp("straight")
      record = train(tiny.config(folder, **changes), folder / "run")
      known[key] = record, tiny.rows(folder / "run")
    return known[key]

  return run


def same(tmp_path, settings, workdir, straight):
  """Trains to the end; whether all is as in the uninterrupted run."""
  record, rows = straight
  again = train(settings, workdir)
  assert again["fingerprint"] == record["fingerprint"]
  assert tiny.rows(workdir) == rows
  for name in ("val/nll", "best/val/nll", "best_step", "step", "skipped"):
    assert again[name] == record[name]
  return again


@pytest.mark.parametrize(
  ("changes", "at"),
  [({}, [7]), ({}, [2, 5, 13, 19]), (WINDOWS, [6]), (WINDOWS, [3, 10, 18])],
)
def test_killed_and_started_again(tmp_path, straight, changes, at):
  settings, run = tiny.config(tmp_path, **changes), tmp_path / "run"
  for step in at:
    tiny.kill(settings, run, step)
  record = same(tmp_path, settings, run, straight(**changes))
  assert record["compilations"] == {"train_steps": 1, "report": 1}


def test_killed_between_the_last_row_and_the_last_save(tmp_path, straight):
  # The last step is saved, then evaluated and logged, and saved once more.
  changes = {"train.eval_every": 8}
  settings, run = tiny.config(tmp_path, **changes), tmp_path / "run"
  save = checkpoint.save

  def killed_at_the_end(directory, step, state, facts, **how):
    if facts["ended"]:
      raise tiny.Killed
    save(directory, step, state, facts, **how)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(checkpoint, "save", killed_at_the_end)
    with pytest.raises(tiny.Killed):
      train(settings, run)
  assert tiny.rows(run) == straight(**changes)[1]
  same(tmp_path, settings, run, straight(**changes))


def test_the_log_after_a_kill(tmp_path, straight, capsys):
  settings, run = tiny.config(tmp_path), tmp_path / "run"
  tiny.kill(settings, run, 8)
  steps = [row["step"] for row in tiny.rows(run)]
  assert steps[-1] > 5  # and so past the checkpoint
  with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
    file.write('{"step": 9, "train/n')
  capsys.readouterr()
  same(tmp_path, settings, run, straight())
  told = capsys.readouterr().err
  assert "dropped a last line cut short" in told
  assert f"rows, steps 6 to {steps[-1]}" in told
  assert "going on from step 5" in told
  rows = tiny.rows(run)
  assert [row["step"] for row in rows] == list(range(21))
  assert [row["step"] for row in rows if "val/nll" in row] == [0, 10, 20]
  rates = list(tiny.rates(run).values())
  np.testing.assert_allclose(
    rates, [tiny.cosine(i) for i in range(20)], rtol=1e-5
  )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("changes", [{}, WINDOWS])
def test_a_signal_saves_and_ends(tmp_path, straight, changes, number):
  settings, run = tiny.config(tmp_path, **changes), tmp_path / "run"
  before = signal.getsignal(number)

  def raise_signal(i, batch):
    if i == 6:  # which is prepared while the call before it is under way
      signal.raise_signal(number)
    return batch

  with pytest.MonkeyPatch.context() as patch:
    tiny.wrap(patch, raise_signal)
    with pytest.raises(SystemExit, match="by a signal") as error:
      train(settings, run)
  assert error.value.code not in (0, None)
  assert signal.getsignal(number) is before
  assert checkpoint.steps(run / "checkpoints") == [4 if changes else 6]
  same(tmp_path, settings, run, straight(**changes))


def test_a_finished_run_does_nothing_and_says_so(tmp_path, capsys):
  settings, run = tiny.config(tmp_path), tmp_path / "run"
  record = train(settings, run)
  files, _ = tiny.digests(run), capsys.readouterr()
  again = train(settings, run)
  assert "ended already, at step 20; nothing to do" in capsys.readouterr().err
  assert tiny.digests(run) == files
  assert again.pop("compilations") == {}
  del record["compilations"]
  assert again == record


@pytest.mark.parametrize("ended", [True, False])
def test_more_steps_follow_the_new_schedule(tmp_path, ended):
  settings, run = tiny.config(tmp_path, **{"train.steps": 12}), tmp_path / "run"
  if ended:
    train(settings, run)
  else:
    tiny.kill(settings, run, 7)
  done = 12 if ended else 5
  record = train(tiny.config(tmp_path), run)
  assert record["step"] == 20
  assert [row["step"] for row in tiny.rows(run)] == list(range(21))
  want = [tiny.cosine(count, 12) for count in range(done)]
  want += [tiny.cosine(count, 20) for count in range(done, 20)]
  np.testing.assert_allclose(list(tiny.rates(run).values()), want, rtol=1e-5)
  (change,) = (run / "changes.jsonl").read_text("utf-8").splitlines()
  change = json.loads(change)
  assert (change["field"], change["old"], change["new"]) == (
    "train.steps",
    12,
    20,
  )
  assert rundir.load(run)[0]["train"]["steps"] == 20


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
  """A folder with names.txt and a run that was killed."""
  folder = tmp_path_factory.mktemp("killed")
  tiny.kill(tiny.config(folder, **{"train.keep": 2}), folder / "run", 14)
  return folder


@pytest.mark.parametrize(
  ("name", "old", "new"),
  [
    ("model.hidden", 8, 16),
    ("model.layers", 1, 2),
    ("model.cell.name", "rnn", "lstm"),
    ("opt.name", "adam", "sgd"),
    ("opt.lr", 0.01, 0.02),
    ("task.batch_size", 8, 16),
    ("task.seed", 0, 1),
    ("seed", 0, 1),
  ],
)
def test_another_experiment_is_refused(killed, name, old, new):
  files = tiny.digests(killed)
  settings = tiny.config(killed, **{"train.keep": 2, name: new})
  with pytest.raises(ValueError) as error:
    train(settings, killed / "run")
  assert f"{name} was {old!r}, now {new!r}" in str(error.value)
  assert tiny.digests(killed) == files


def test_other_data_are_refused_by_content(killed, tmp_path):
  files = tiny.digests(killed)
  text = (killed / "names.txt").read_text("utf-8")
  settings = tiny.config(tmp_path, **{"train.keep": 2})
  for changed, message in [
    (text.replace("a", "z"), "vocabulary was .*'a'.*, now .*'z'"),
    (text + "ade\n", "data.names was 60, now 61"),
    (text.replace("ab", "ba"), "data.sha256 was"),
  ]:
    (tmp_path / "names.txt").write_text(changed, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
      train(settings, killed / "run")
  assert tiny.digests(killed) == files


def test_a_second_trainer_is_refused(killed):
  first = rundir.RunDir(killed / "run")
  first.acquire()
  with first, pytest.raises(ValueError, match=f"by process {os.getpid()}"):
    train(tiny.config(killed, **{"train.keep": 2}), killed / "run")


@pytest.mark.parametrize("workdir", ["runs/x", "./runs/x/", "mein Läuf/x"])
def test_wherever_it_lies(tmp_path, monkeypatch, straight, workdir):
  (tmp_path / "a").mkdir()
  (tmp_path / "b").mkdir()
  settings = tiny.config(tmp_path)
  monkeypatch.chdir(tmp_path / "a")
  tiny.kill(settings, workdir, 8)
  shutil.move(tmp_path / "a" / workdir, tmp_path / "b" / "moved")
  monkeypatch.chdir(tmp_path / "b")
  same(tmp_path, settings, "moved", straight())
  assert trained.load("../b/moved", "latest").step == 20
  assert not (tmp_path / "a" / workdir).exists()


def truncate(checkpoint):
  largest = max(
    (p for p in checkpoint.rglob("*") if p.is_file()),
    key=lambda path: path.stat().st_size,
  )
  os.truncate(largest, largest.stat().st_size // 2)


def test_what_a_kill_left_behind_is_passed_over(
  killed, tmp_path, straight, capsys
):
  run = shutil.copytree(killed, tmp_path / "copy") / "run"
  kept = run / "checkpoints"
  assert checkpoint.steps(kept) == [5, 10]
  (kept / "99").mkdir()
  (kept / "tmp-15" / "state").mkdir(parents=True)
  truncate(kept / "10")
  settings = tiny.config(tmp_path, **{"train.keep": 2})
  capsys.readouterr()
  same(tmp_path, settings, run, straight(**{"train.keep": 2}))
  told = capsys.readouterr().err
  for name in ("99: ", "10: ", "tmp-15: left unfinished"):
    assert f"passed over checkpoint {name}" in told
  assert "going on from step 5" in told
  left = {path.name for path in kept.iterdir()}
  # 10 is the best of a run that did not improve later, or dropped.
  assert left >= {"damaged-10", "damaged-99", "15", "20"}
  assert "tmp-15" not in left


def test_all_damaged_is_refused(killed, tmp_path):
  run = shutil.copytree(killed, tmp_path / "copy") / "run"
  for step in (5, 10):
    truncate(run / "checkpoints" / str(step))
  files = tiny.digests(run)
  with pytest.raises(ValueError, match="no checkpoint in .* is whole") as error:
    train(tiny.config(killed, **{"train.keep": 2}), run)
  assert "5: " in str(error.value) and "10: " in str(error.value)
  assert tiny.digests(run) == files


def test_a_save_that_fails_is_an_error(tmp_path, monkeypatch, straight):
  settings, run = tiny.config(tmp_path), tmp_path / "run"
  write = checkpoint._write_arrays

  def full(path, arrays):
    if path.parent.name == "tmp-15":
      raise OSError(28, "No space left on device")
    write(path, arrays)

  with monkeypatch.context() as patch:
    patch.setattr(checkpoint, "_write_arrays", full)
    with pytest.raises(OSError, match="checkpoint 15 could not be saved"):
      train(settings, run)
  assert checkpoint.steps(run / "checkpoints")[-1] == 10
  same(tmp_path, settings, run, straight())


def test_a_log_without_its_checkpoints_is_not_begun_again(tmp_path):
  settings, run = tiny.config(tmp_path), tmp_path / "run"
  train(settings, run)
  shutil.rmtree(run / "checkpoints")
  before = tiny.digests(run)
  with pytest.raises(ValueError, match="tells of step 20, but .*no checkpoint"):
    train(settings, run)
  assert tiny.digests(run) == before
