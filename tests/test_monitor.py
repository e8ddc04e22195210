"""What a run logs of its recurrences: due when asked, and free when not."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from test_configs import CONFIGS, parsed
from test_program import Silent

from rnnlab import monitor, program, tasks, train, trained
from rnnlab.instruments import retention

STEPS = {"train.steps": 8, "train.log_every": 2, "train.eval_every": 4}
GATED = {"model.cell": {"name": "ugrnn"}, "train.save_every": 4}
WATCHED = {"train.monitor": 4}


def config(folder, **changes):
  return tiny.config(folder, **STEPS | GATED | changes)


def apart(workdir):
  """The rows of a run without the monitor's figures, and these by step."""
  rows, seen = tiny.rows(workdir), {}
  for row in rows:
    figures = {k: row.pop(k) for k in [*row] if k.startswith("monitor/")}
    seen |= {row["step"]: figures} if figures else {}
  return rows, seen


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """(folder, shared, records) of the same run, off and then on."""
  folder, shared = tmp_path_factory.mktemp("monitor"), program.Shared()
  records = [
    train.train(config(folder, **changes), folder / name, shared=shared)
    for name, changes in (("off", {}), ("on", WATCHED))
  ]
  return folder, shared, records


def test_it_costs_nothing_when_off_and_changes_nothing_when_on(runs):
  folder, shared, (off, on) = runs
  # One program for both: the second run compiled the monitor alone.
  assert len(shared.programs) == 1
  assert off["compilations"] == {"report": 1, "train_steps": 1}
  assert on["compilations"] == off["compilations"] | {"monitor": 1}
  assert on["fingerprint"] == off["fingerprint"]
  rows, seen = apart(folder / "on")
  assert (rows, {}) == apart(folder / "off")
  assert list(seen) == [0, 4, 8]
  assert all(figures.keys() == seen[0].keys() for figures in seen.values())


def test_a_row_tells_what_the_instruments_would(runs):
  folder, _, _ = runs
  loaded = trained.load(folder / "on", "latest")
  _, seen = apart(folder / "on")
  assert loaded.step == 8
  measured = retention.meter(loaded.task)(
    loaded.params, "validation", monitor.FIRST
  )
  for gate, found in measured.items():
    own = {k: v for k, v in seen[8].items() if k.startswith(f"monitor/{gate}/")}
    wanted = {
      f"monitor/{gate}/slope": found["slope_H"].mean(),
      f"monitor/{gate}/large": found["large"],
    }
    if "half_life_H" in found:
      for share in (5, 50, 95):
        value = retention.half_life(found, share / 100)
        wanted[f"monitor/{gate}/half_life/{share}"] = value
    assert own == pytest.approx(wanted, rel=1e-5)
  batch = monitor.batch(loaded.task, loaded.params)
  (read,) = loaded.task.recurrences(loaded.params, (), batch)
  entries = np.moveaxis(np.asarray(read.trace().entries[0]), -1, 0)
  norms = np.linalg.norm(entries, axis=-1)[batch["mask_BT"]]
  assert seen[8]["monitor/stack/norm"] == pytest.approx(norms.mean(), rel=1e-5)
  assert seen[8]["monitor/stack/norm_max"] == pytest.approx(
    norms.max(), rel=1e-5
  )


def test_the_gradient_by_distance_is_autodiff(runs):
  folder, _, _ = runs
  loaded = trained.load(folder / "on", "latest")
  _, seen = apart(folder / "on")
  batch = monitor.batch(loaded.task, loaded.params)
  (read,) = loaded.task.recurrences(loaded.params, (), batch)
  h_BTH = np.moveaxis(np.asarray(read.trace().entries[0]), -1, 0)
  length_B = batch["mask_BT"].sum(1)
  rows, last_B1 = np.arange(len(length_B)), length_B[:, None] - 1

  @jax.jit
  @jax.grad
  def gradient(h_BH, start_B):
    """Of the rows' last loss, by their states before the steps start_B."""
    steps_BT = jnp.arange(read.mask_BT.shape[1])[None] >= start_B[:, None]
    rest = read._replace(carry=(h_BH,), mask_BT=read.mask_BT & steps_BT)
    loss_BT = read.loss(rest.trace().out)
    return jnp.sum(jnp.take_along_axis(loss_BT, last_B1, axis=1))

  distances = 2 ** np.arange(int(length_B.max()).bit_length())
  names = {f"monitor/stack/gradient/{d}": d for d in distances}
  assert len(names) > 2
  assert {name for name in seen[8] if "gradient" in name} == {*names}
  for name, distance in names.items():
    start_B = np.maximum(length_B - distance, 0)
    found_BH = gradient(h_BTH[rows, start_B], start_B)
    norm_B = np.linalg.norm(found_BH, axis=1)[length_B >= distance]
    middle = np.quantile(norm_B, 0.5, method="inverted_cdf")
    assert seen[8][name] == pytest.approx(np.log10(middle), abs=1e-4)


@pytest.mark.slow
def test_runs_trained_at_once_are_watched_one_by_one(runs, tmp_path):
  folder, _, _ = runs
  members = [
    (config(tmp_path, **WATCHED, **more), tmp_path / name, Silent())
    for name, more in (("a", {}), ("b", {"seed": 1}))
  ]
  train.train_abreast(members, program.Shared())
  _, alone = apart(folder / "on")
  for (_, path, _), same in zip(members, (True, False), strict=True):
    _, seen = apart(path)
    assert list(seen) == [0, 4, 8]
    assert (seen[8] == pytest.approx(alone[8], rel=1e-3)) == same


@pytest.mark.slow
def test_a_killed_run_logs_what_it_would_have(runs, tmp_path):
  folder, _, _ = runs
  settings = config(folder, **WATCHED)
  tiny.kill(settings, tmp_path / "killed", 6)
  train.train(settings, tmp_path / "killed")
  assert apart(tmp_path / "killed") == apart(folder / "on")


# ml_collections loads config files in a way that Python 3.12 will not have.
@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_experiment_can_be_watched(path):
  given = parsed(f"--config={path}", "--config.train.monitor=1000000")
  small = {"validation": 4, "test": 4}
  if path.stem == "tagging":  # less to read than the whole library of Python
    small["path"] = str(pathlib.Path(monitor.__file__).with_name("models"))
  known = given["task"].keys()
  given["task"] |= {k: v for k, v in small.items() if k in known}
  task = tasks.make(**given["task"], model=given["model"])
  params = jax.eval_shape(task.init, jax.random.key(0))
  found = jax.eval_shape(
    lambda params: monitor.measure(task, params, monitor.batch(task, params)),
    params,
  )
  assert found and all("norm" in own for own in found.values())


@pytest.mark.parametrize(
  "changes, words",
  [
    ({"train.monitor": 3}, "train.monitor=3.*train.log_every=2"),
    ({"train.monitor": 0}, "train.monitor must be > 0"),
    ({"train.monitor": True}, "train.monitor must be of type int"),
  ],
)
def test_a_setting_that_cannot_be_is_refused(changes, words, tmp_path):
  with pytest.raises(ValueError, match=words):
    train.train(config(tmp_path, **changes), tmp_path / "run")
  assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
  "field, value, words",
  [
    ("recurrences", None, "which recurrences"),
    ("texts", {"validation": []}, "there are none"),
  ],
)
def test_a_task_with_nothing_to_watch_is_refused(
  field, value, words, tmp_path, monkeypatch
):
  tiny.wrap(monkeypatch, **{field: lambda old: value})
  with pytest.raises(ValueError, match=f"train.monitor.*{words}"):
    train.train(config(tmp_path, **WATCHED), tmp_path / "run")
