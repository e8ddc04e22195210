"""Imports only go down, and each outside library has its one place."""

import ast
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
# A new module of rnnlab gets its floor here.
FLOORS = {
  **dict.fromkeys("settings shapes metrics backend nn gates cells".split(), 0),
  **dict.fromkeys(
    "stepping bptt scan layers wiring attention sampling".split(), 0
  ),
  **dict.fromkeys("models analysis flax_modules".split(), 1),
  **dict.fromkeys("tasks data optim".split(), 2),
  **dict.fromkeys("plan update feed program monitor train trained".split(), 3),
  **dict.fromkeys("sweep checkpoint".split(), 3),
  **dict.fromkeys("rundir strict_json progress cli figures".split(), 3),
  **dict.fromkeys("instruments ledger parallel interchange written".split(), 3),
  "scripts": 4,
}
# Importing any module runs rnnlab/__init__.py first, so it imports none.
FLOORS["rnnlab"] = -1
ONLY_IN = {"orbax": "checkpoint", "matplotlib": "figures"}
OURS = {"rnnlab", "scripts", "configs"}
FILES = sorted(
  path.relative_to(ROOT).as_posix()
  for top in OURS
  for path in (ROOT / top).rglob("*.py")
)


def home(dotted: str) -> str:
  """Returns the unit of a dotted name that has a floor: rnnlab.data.x: data."""
  parts = dotted.split(".")
  return parts[1] if parts[0] == "rnnlab" and len(parts) > 1 else parts[0]


def imported(path: str, source: str) -> list[str]:
  """Returns the dotted names a file imports, relative ones resolved."""
  package = path.split("/")[:-1]
  names = []
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Import):
      names += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      base = package[: len(package) - node.level + 1] if node.level else []
      base = base + (node.module.split(".") if node.module else [])
      names += [".".join([*base, alias.name]) for alias in node.names]
  return names


def faults(path: str, source: str) -> list[str]:
  """Returns one line for each import in a file that the floors forbid."""
  here = home(
    path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
  )
  found = []
  if here not in FLOORS and here != "configs":
    return [f"{path}: give the module {here!r} a floor in FLOORS"]
  for name in imported(path, source):
    top, there = name.split(".")[0], home(name)
    if here == "configs":
      wrong = top in OURS and "configs import nothing of the project"
    elif top == "configs":
      wrong = "only a flag names a config"
    elif top in OURS and there not in FLOORS:
      wrong = f"give the module {there!r} a floor in FLOORS"
    elif top in OURS and FLOORS[there] > FLOORS[here]:
      wrong = f"floor {FLOORS[here]} imports from floor {FLOORS[there]}"
    elif here == "data":
      allowed = {"numpy", *sys.stdlib_module_names}
      wrong = top not in allowed and there != here and "data is numpy only"
    elif top == "ml_collections":
      wrong = FLOORS[here] < 3 and f"a config on floor {FLOORS[here]}"
    else:
      wrong = ONLY_IN.get(top, here) != here and f"only in {ONLY_IN[top]}.py"
    if wrong:
      found.append(f"{path}: imports {name}: {wrong}")
  return found


def test_the_files_are_found():
  assert "rnnlab/data/names.py" in FILES


@pytest.mark.parametrize("path", FILES)
def test_imports_only_go_down(path):
  found = faults(path, (ROOT / path).read_text(encoding="utf-8"))
  assert not found, "\n".join(found)


@pytest.mark.parametrize(
  "path, line",
  [
    ("rnnlab/scan.py", "import rnnlab.models.lm"),
    ("rnnlab/scan.py", "from rnnlab import train"),
    ("rnnlab/cells/gru.py", "from ..tasks import make"),
    ("rnnlab/cells/__init__.py", "def f():\n  from rnnlab import data"),
    ("rnnlab/__init__.py", "from rnnlab import shapes"),
    ("rnnlab/__init__.py", "from . import shapes"),
    ("rnnlab/train.py", "import scripts.train"),
    ("rnnlab/train.py", "from configs import name_lm"),
    ("rnnlab/data/names.py", "import jax.numpy as jnp"),
    ("rnnlab/data/names.py", "from rnnlab import shapes"),
    ("rnnlab/train.py", "import orbax.checkpoint as ocp"),
    ("scripts/analyze.py", "from matplotlib import pyplot"),
    ("rnnlab/tasks/lm.py", "from ml_collections import ConfigDict"),
    ("configs/name_lm.py", "from rnnlab import cells"),
    ("configs/name_lm.py", "import scripts.train"),
    ("rnnlab/brand_new.py", "import jax"),
    ("rnnlab/train.py", "from rnnlab import brand_new"),
  ],
)
def test_a_forbidden_import_is_named(path, line):
  (found,) = faults(path, line)
  assert found.startswith(path)
  assert ("floor in FLOORS" in found) == ("brand_new" in path + line)


@pytest.mark.parametrize(
  "path, line",
  [
    ("rnnlab/cells/gru.py", "from rnnlab import gates, nn"),
    ("rnnlab/cells/gru.py", "from . import rnn"),
    ("rnnlab/tasks/lm.py", "from rnnlab.data import names"),
    ("rnnlab/data/names.py", "import numpy as np, hashlib, rnnlab.data.text"),
    ("rnnlab/checkpoint.py", "import orbax.checkpoint as ocp"),
    ("rnnlab/figures.py", "from matplotlib import pyplot"),
    ("rnnlab/train.py", "import ml_collections\nfrom rnnlab import sweep"),
    ("configs/name_lm.py", "import ml_collections"),
    ("scripts/train.py", "from absl import app\nfrom rnnlab import train"),
  ],
)
def test_an_import_downwards_is_allowed(path, line):
  assert faults(path, line) == []
