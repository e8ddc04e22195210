"""The ledger: every claim holds, and would not if the code were another."""

import math
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from test_scripts import ROOT, command, record

from rnnlab import attention, ledger, metrics, nn
from rnnlab.analysis import retention
from rnnlab.data import names, pairs
from rnnlab.ledger import Row
from rnnlab.ledger import gates as of_gates

NAN = float("nan")


@pytest.mark.parametrize(
  "expected, computed, tolerance, passes",
  [
    (1.0, 1.0, 0, True),
    (1.0, 1.1, 0.2, True),
    (1.0, 1.1, 0.05, False),
    (1.0, NAN, 10, False),
    (0.0, math.inf, 10, False),
    ((1.0, 2.0), [1.0, 2.1], 0.2, True),
    ((1.0, 2.0), [1.0, 2.1], 0.05, False),
    ((1.0, 2.0), [1.0, 2.1], (0.0, 0.2), True),
    ((1.0, 2.0), [1.1, 2.0], (0.0, 0.2), False),
    ((1.0, 2.0), [1.0], 10, False),
    (1.0, [1.0], 10, False),
    ("ada", "ada", 0, True),
    ("ada", "adb", 10, False),
  ],
)
def test_a_verdict(expected, computed, tolerance, passes):
  assert Row("c", "s", expected, computed, tolerance).passes is passes


QUICK = ("training", "attention")


@pytest.mark.parametrize(
  "theme",
  [
    pytest.param(theme, marks=[] if theme in QUICK else [pytest.mark.slow])
    for theme in ledger.themes()
  ],
)
def test_every_claim_holds(theme):
  rows = ledger.rows(theme)
  assert rows and not [row for row in rows if not row.passes]
  claims = [row.claim for row in rows]
  assert len(set(claims)) == len(claims)
  assert {row.source for row in rows} <= {ledger.NLP, ledger.SYSTEMS}


def scaled(function, factor=1 + 1e-6):
  """The function with all it returns a little too large."""

  def wrong(*args, **kwargs):
    return jax.tree.map(lambda x: factor * x, function(*args, **kwargs))

  return wrong


def backwards(tokens_NT, noise_NT, own=pairs.interleave):
  return own(noise_NT, tokens_NT)


# A change: the theme that has to notice, and what is put in whose place.
CHANGES = {
  "cut": ("training", names, "int", lambda x: int(x) + 1),
  "bits": ("training", metrics, "bits", scaled(metrics.bits)),
  "floor": (
    "training",
    metrics,
    "notebook_average",
    scaled(metrics.notebook_average),
  ),
  "noise": ("attention", pairs, "interleave", backwards),
  "softmax": ("attention", attention.jax.nn, "softmax", scaled(jax.nn.softmax)),
  "half-life": (
    "gates",
    retention,
    "half_life",
    scaled(retention.half_life, 1.001),
  ),
  "sigmoid": ("gates", jax.nn, "sigmoid", scaled(jax.nn.sigmoid)),
  "tanh": ("unrolled", nn, "product", scaled(nn.product)),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", list(CHANGES))
def test_a_change_of_the_code_turns_a_row_red(change, monkeypatch):
  theme, module, name, wrong = CHANGES[change]
  monkeypatch.setattr(module, name, wrong, raising=False)
  jax.clear_caches()
  assert [row for row in ledger.rows(theme) if not row.passes]


@pytest.mark.slow
def test_the_curves_of_the_figure():
  with jax.enable_x64(True):
    curves = of_gates.figure()
  for curve, factor in zip(curves.values(), (0.9, 0.99, 1.1), strict=True):
    np.testing.assert_allclose(curve, factor ** np.arange(51), rtol=1e-12)


@pytest.mark.exhaustive
def test_the_command_shows_all_rows_and_draws(tmp_path):
  done = command("scripts/ledger.py", f"--figure={tmp_path}/figure2.png")
  found = record(done)
  lines = done.stdout.decode().splitlines()
  assert found == {"rows": len(lines) - 2, "failed": []}
  assert found["rows"] > 80 and all(line.endswith("ok") for line in lines[1:-1])
  assert (tmp_path / "figure2.png").exists()


RED = """
import runpy, sys
from rnnlab import ledger, metrics
metrics.bits = lambda nll: nll
ledger.themes = lambda: ["training"]
sys.argv = ["scripts/ledger.py"]
runpy.run_path("scripts/ledger.py", run_name="__main__")
"""


@pytest.mark.slow
def test_a_row_that_fails_is_the_exit_status():
  done = subprocess.run(
    [sys.executable, "-c", RED],
    cwd=ROOT,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
    capture_output=True,
    timeout=300,
  )
  assert done.returncode == 1
  out = done.stdout.decode().splitlines()
  (red,) = [line for line in out if line.endswith("FAILS")]
  assert "in bits" in red and "1.24766" in red and '"failed": ["4' in out[-1]
