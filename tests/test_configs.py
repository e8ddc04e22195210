"""Every experiment of configs/, and settings from a file, a flag and a dict."""

import dataclasses
import importlib.util
import inspect
import math
import pathlib
import re

import pytest
import tiny
from absl import flags
from conftest import all_cells
from ml_collections import config_flags

from rnnlab import optim, rundir, settings
from rnnlab import train as trainer
from rnnlab.plan import Plan

CONFIGS = sorted(pathlib.Path(__file__).parents[1].glob("configs/*.py"))
nan, inf = math.nan, math.inf

# It is ml_collections that loads config files this way.
pytestmark = pytest.mark.filterwarnings(
  "ignore:the load_module:DeprecationWarning"
)


def module(path):
  spec = importlib.util.spec_from_file_location(path.stem, path)
  loaded = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(loaded)
  return loaded


def variants():
  """(file, variant) of every line `configs/x.py:variant` of a docstring."""
  found = []
  for path in CONFIGS:
    told = re.findall(
      rf"^ *configs/{path.name}(?::(\w+))?", module(path).__doc__, re.M
    )
    assert "" in told, f"{path}: the docstring has no line for the file itself"
    found += [(path, variant) for variant in told]
  return [
    pytest.param(
      path,
      variant,
      id=f"{path.stem}:{variant}".rstrip(":"),
      marks=[pytest.mark.exhaustive] if variant else [],
    )
    for path, variant in found
  ]


def parsed(*args):
  """What the commands make of these flags, as a dict."""
  values, argv = flags.FlagValues(), ["train.py", *args]
  config_flags.DEFINE_config_file(
    "config", lock_config=True, flag_values=values, sys_argv=argv
  )
  values(argv)
  return values.config.to_dict()


@pytest.mark.parametrize("path, variant", variants())
def test_an_experiment_takes_a_step(path, variant, tmp_path):
  experiment = f"--config={path}:{variant}".rstrip(":")
  listed = tiny.config(tmp_path)["task"]["path"]
  # Few examples: a list of them, or as many as are to be drawn.
  small = {"path": listed, "validation": 4, "test": 4, "steps": 8}
  config = parsed(
    experiment,
    *(
      f"--config.task.{name}={value}"
      for name, value in small.items()
      if name in parsed(experiment)["task"]
    ),
    "--config.task.batch_size=4",
    "--config.train.steps=1",
    "--config.opt.warmup=0",
  )
  record = trainer.train(config, tmp_path / "run")
  assert record["step"] == 1 and record["skipped"] == 0
  row = tiny.rows(tmp_path / "run")[-1]
  losses = [value for name, value in row.items() if name.startswith("train/")]
  assert losses and all(map(math.isfinite, losses)) and row["grad_norm"] > 0


def test_variants_differ_and_no_other_is_known():
  for path in CONFIGS:
    get_config = module(path).get_config
    told = [p.values[1] for p in variants() if p.values[0] == path]
    configs = [get_config(variant).to_json() for variant in told]
    assert len(set(configs)) == len(told)
    with pytest.raises(ValueError, match="no variant 'bogus'"):
      get_config("bogus")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_setting_of_cells_optimiser_and_trainer_is_listed(path):
  """A flag can set what a file lists, and each file lists it by itself."""
  config = module(path).get_config().to_dict()
  cell = {
    name
    for p in all_cells()
    for name in inspect.signature(
      importlib.import_module(f"rnnlab.cells.{p.values[0]['name']}").make
    ).parameters
  }
  assert config["model"]["cell"].keys() == cell - {"hidden"} | {"name"}
  opt = inspect.signature(optim.make).parameters.keys()
  # These follow from the trainer's.
  assert config["opt"].keys() == opt - {"steps", "steps_per_epoch", "budget"}
  plan = {field.name for field in dataclasses.fields(Plan)}
  # Without `epochs` where examples are drawn without end.
  endless = {"epochs"} if path.stem == "memory" else set()
  assert config["train"].keys() == plan - endless


# One rule for a setting, wherever it comes from


class Claimed(Exception):
  """All was checked; the next thing would be to write."""


def from_dict(folder, field, value):
  return tiny.config(folder, **{field: value})


def from_file(folder, field, value):
  path = folder / "experiment.py"
  path.write_text(
    "from ml_collections import config_dict\n"
    "nan, inf = float('nan'), float('inf')\n"
    "def get_config():\n"
    f"  return config_dict.create(**{from_dict(folder, field, value)})\n",
    encoding="utf-8",
  )
  return parsed(f"--config={path}")


def from_flag(folder, field, value):
  return parsed(
    f"--config={CONFIGS[0].with_name('name_lm.py')}",
    f"--config.task.path={tiny.config(folder)['task']['path']}",
    "--config.train.epochs=1000",
    f"--config.{field}={value}",
  )


@pytest.fixture(params=[from_dict, from_file, from_flag])
def claim(request, tmp_path, monkeypatch):
  """(field, value) -> the config a run would be started with, and record."""

  def claim(field, value):
    held = {}

    def keep(workdir, config, facts):
      held.update(config)
      raise Claimed

    monkeypatch.setattr(rundir, "claim", keep)
    config = request.param(tmp_path, field, value)
    with pytest.raises(Claimed):
      trainer.train(config, tmp_path / "run")
    for name in field.split("."):
      held = held[name]
    return held

  return claim


@pytest.mark.parametrize(
  "field, value",
  [
    ("model.layers", 2),
    ("opt.lr", 1),
    ("opt.lr", 0.25),
    ("train.patience", 3),
    ("task.unique", True),
    ("task.unique", False),
    ("model.cell.name", "lstm"),
    ("seed", 2**32 - 1),
  ],
)
def test_a_setting_that_fits_is_taken(claim, field, value):
  assert claim(field, value) == value


@pytest.mark.parametrize("claim", [from_dict, from_file], indirect=True)
@pytest.mark.parametrize("field", ["opt.clip", "train.patience"])
def test_none_is_not_set(claim, field):
  assert claim(field, None) is None


@pytest.mark.parametrize("claim", [from_dict, from_file], indirect=True)
@pytest.mark.parametrize(
  "field, words",
  [
    ("train.steps", "train.steps, train.epochs or train.seconds"),
    ("model.hidden", "model.hidden has to be set"),
    ("model.cell.name", "model.cell has to be set"),
    ("task.name", "no task named None"),
  ],
)
def test_what_has_to_be_set_is_named(claim, field, words):
  with pytest.raises(ValueError, match=words):
    claim(field, None)


def test_settings_bind_by_the_types_of_the_signature():
  def make(
    *,
    n: int,
    rate: float = 0.5,
    limit: int | None = None,
    on: bool = True,
    inner: dict | None = None,
    free=None,
  ): ...

  given = {"n": 3, "rate": 1, "limit": None, "on": False, "free": "x"}
  bound = settings.bind(make, "x", given | {"inner": {"a": None}})
  assert bound == {"n": 3, "rate": 1.0, "on": False, "free": "x"}
  assert type(bound["rate"]) is float
  assert settings.bind(make, "x", {"n": 0, "limit": 3})["limit"] == 3
  for wrong in (
    {"n": 2.0},
    {"n": True},
    {"rate": True},
    {"limit": 3.5},
    {"limit": "3"},
    {"on": 1},
    {"inner": 3},
  ):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"x.{name} must be.*not {value!r}"):
      settings.bind(make, "x", {"n": 1} | wrong)
  with pytest.raises(ValueError, match="x.n has to be set"):
    settings.bind(make, "x", {})
  with pytest.raises(
    ValueError, match="x.nn is no setting here .value 3.; .*n, r"
  ):
    settings.bind(make, "x", {"n": 1, "nn": 3})


@pytest.mark.parametrize(
  "field, value",
  [
    ("model.layers", True),
    ("model.layers", 2.0),
    ("model.layers", "two"),
    ("model.layers", 0),
    ("model.tied", "maybe"),
    ("opt.lr", nan),
    ("opt.lr", inf),
    ("opt.lr", -1.0),
    ("opt.lr", 0.0),
    ("opt.lr", "fast"),
    ("opt.lr", True),
    ("train.patience", 3.5),
    ("train.patience", True),
    ("train.patience", "three"),
    ("train.steps", -3),
    ("task.batch_size", 0),
    ("seed", -1),
    ("seed", 2**32),
    ("seed", True),
    ("seed", "x"),
    ("model.hiden", 3),
    ("model.cell.kep", 3),
    ("task.pth", "x"),
    ("opt.rate", 1.0),
    ("train.step", 3),
    ("modl", 3),
    ("model.cell.name", "elman"),
    ("task.name", "nam_lm"),
  ],
)
def test_a_setting_that_does_not_fit_is_refused_by_name(claim, field, value):
  refusals = ValueError, TypeError, AttributeError, KeyError, flags.Error
  with pytest.raises(refusals, match=field.split(".")[-1]):
    claim(field, value)
