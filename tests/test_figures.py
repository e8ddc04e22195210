"""Figures: files without a display, without leaks, or without matplotlib."""

import gc
import math
import os
import subprocess
import sys

import numpy as np
import pytest

from rnnlab import figures, metrics
from rnnlab.analysis.fixed_points import Points

NAN = float("nan")


def sample(source="axdyaz", weights_US=None):
  """An answer of `generate`, with attention."""
  text = source[::2][::-1]
  if weights_US is None:
    rng = np.random.default_rng(0)
    weights_US = rng.dirichlet(np.ones(len(source)), len(text) + 1)
  return {
    "source": source,
    "text": text,
    "end": "stop",
    "attention_US": weights_US,
  }


def row(length, examples=3, exact=0.5):
  return {
    "source_length": length,
    "examples": examples,
    "exact_match": exact,
  }


@pytest.fixture
def drawn(monkeypatch):
  """A list that gets every figure as it is saved."""
  kept, save = [], figures.canvas.save

  def keeping(figure, path):
    kept.append(figure)
    return save(figure, path)

  monkeypatch.setattr(figures.canvas, "save", keeping)
  return kept


def is_png(path):
  return path.read_bytes().startswith(b"\x89PNG")


def test_an_attention_map_shows_all_letters_and_marks_the_noise(
  drawn, tmp_path
):
  samples = [sample("axdyaz"), sample("bxoy"), sample("qe"), sample("ab")]
  for noisy in (True, False):
    path = figures.attention_maps(samples, tmp_path / "new" / "a.png", noisy)
    assert is_png(path)
    figure = drawn.pop()
    maps = [axes for axes in figure.axes if axes.images]
    assert len(maps) == 4
    for axes, wanted in zip(maps, samples, strict=True):
      x, y = (
        [label.get_text() for label in labels]
        for labels in (axes.get_xticklabels(), axes.get_yticklabels())
      )
      assert x == [*wanted["source"]] and y == [*wanted["text"], "[S]"]
      (image,) = axes.images
      np.testing.assert_array_equal(image.get_array(), wanted["attention_US"])
      assert image.get_clim() == (0, 1)
      colours = [label.get_color() for label in axes.get_xticklabels()]
      if noisy:
        assert len(set(colours[::2])) == len(set(colours[1::2])) == 1
        assert colours[0] != colours[1] and "noise" in axes.get_xlabel()
      else:
        assert len(set(colours)) == 1 and axes.get_xlabel() == "source"
      assert axes.get_ylabel() == "output"


def test_exact_match_by_length_shows_the_numbers_of_examples(drawn, tmp_path):
  # Lengths with a gap, and counts of four digits.
  rows = [row(n * n, 200 * n, 1 - 1 / n) for n in range(1, 30)]
  assert is_png(figures.by_length(rows, tmp_path / "b.png"))
  (figure,) = drawn
  (axes,) = figure.axes
  labels = axes.get_xticklabels()
  assert [label.get_text() for label in labels] == [
    f"{n * n}\nn={200 * n}" for n in range(1, 30)
  ]
  boxes = [label.get_window_extent() for label in labels]
  assert all(a.x1 < b.x0 for a, b in zip(boxes, boxes[1:], strict=False))
  line, _, (bars,) = axes.containers[0]
  np.testing.assert_allclose(
    line.get_ydata(), [100 - 100 / n for n in range(1, 30)]
  )
  low, high = metrics.wilson(
    *np.array([[r["exact_match"], r["examples"]] for r in rows]).T
  )
  for segment, a, b in zip(bars.get_segments(), low, high, strict=True):
    np.testing.assert_allclose(segment[:, 1], [100 * a, 100 * b], atol=1e-9)
  assert axes.get_ylim()[0] <= 100 * low.min() < 100 < axes.get_ylim()[1]
  assert "length" in axes.get_xlabel() and "95 %" in axes.get_ylabel()


def test_wilsons_interval():
  # (p + z^2/2n -+ z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), by hand.
  low, high = metrics.wilson(np.array([0.0, 0.5, 1.0]), np.array([10, 10, 10]))
  np.testing.assert_allclose(low, [0, 0.236590, 0.722460], atol=1e-5)
  np.testing.assert_allclose(high, [0.277540, 0.763410, 1], atol=1e-5)
  low, high = metrics.wilson(0.3, 4_000_000)
  assert math.isclose(
    high - low, 2 * 1.96 * math.sqrt(0.21 / 4e6), rel_tol=1e-3
  )


@pytest.mark.parametrize(
  "rows",
  [
    [row(6)],
    [row(6, 1, 1.0)],
    [row(6, 1, 0.0)],
    [row(6, exact=NAN)],
    [row(n, exact=NAN) for n in (2, 4, 6)],
    [row(2), row(4, exact=NAN), row(200)],
  ],
)
def test_little_and_missing_data_give_a_figure(rows, drawn, tmp_path):
  assert is_png(figures.by_length(rows, tmp_path / "b.png"))
  (axes,) = drawn[0].axes
  for share in (row["exact_match"] for row in rows):
    assert not 100 * share < axes.get_ylim()[0]


@pytest.mark.parametrize("source", ["ab", "$_^\\%#{}", "a$b$", "x " * 30])
def test_any_source_gives_a_map(source, tmp_path):
  nothing = np.full((len(source[::2]) + 1, len(source)), NAN)
  for weights_US in (None, nothing, 0 * nothing):
    samples = [sample(source, weights_US)]
    assert is_png(figures.attention_maps(samples, tmp_path / "a.png", True))


def gate(half_life=None, units=5):
  found = {"slope_H": np.linspace(0, 0.25, units)}
  if half_life is not None:
    found["half_life_H"] = np.full(units, half_life)
  return found


def test_retention_shows_every_recurrence_before_and_after(drawn, tmp_path):
  before = {"a/0/keep": gate(3.0), "a/0/input": gate(), "b/replace": gate(2.0)}
  now = before | {"a/0/keep": gate(math.inf), "b/replace": gate(NAN)}
  now["b/replace"]["half_life_H"][1:3] = 1e-3, 1e6
  assert is_png(figures.retention(before, now, 7, tmp_path / "r.png"))
  figure = drawn.pop()
  titles = [axes.get_title() for axes in figure.axes]
  assert titles == ["a/0", "a/0", "b", "b"]
  left, right, below, _ = figure.axes
  start, end = left.lines
  assert set(start.get_ydata()) == {3.0} and np.isnan(end.get_ydata()).all()
  assert [line.get_label() for line in left.lines] == ["initialised", "step 7"]
  labels = [line.get_label() for line in right.lines]
  assert labels[::2] == ["keep, initialised", "input, initialised"]
  assert "steps" in left.get_ylabel() and "%" in left.get_xlabel()
  assert list(below.lines[1].get_ydata()[:2]) == [1e-3, 1e6]
  ticks = [label.get_text() for label in below.get_yticklabels()]
  assert "100" in ticks and not any("{" in tick for tick in ticks)


def test_sensitivity_is_drawn_past_the_range_of_floats(drawn, tmp_path):
  bound = [[-500.0, -400.0, -300.0], [600.0, 700.0, 800.0]]
  gone = [[-math.inf] * 3, [NAN] * 3]
  curves = {
    "a": {"distance": [1, 900], "bound": bound, "product": gone},
    "b": {"distance": [1], "product": [[0.0, 1.0, 2.0]]},
  }
  assert is_png(figures.sensitivity(curves, tmp_path / "s.png"))
  figure = drawn.pop()
  first, second = figure.axes
  product, middle = first.lines
  assert list(middle.get_ydata()) == [-400, 700]
  assert np.isnan(product.get_ydata()).all()
  assert "steps" in first.get_xlabel() and "no unit" in first.get_ylabel()
  figure.canvas.draw()
  assert any("10^" in label.get_text() for label in first.get_yticklabels())
  assert [axes.get_title() for axes in figure.axes] == ["a", "b"]


def test_products_are_named_where_they_end(drawn, tmp_path):
  curves = {"0.9": 0.9 ** np.arange(51), "1.1": 1.1 ** np.arange(51)}
  assert is_png(figures.products(curves, tmp_path / "p.png"))
  (axes,) = drawn.pop().axes
  assert axes.get_yscale() == "log" and axes.get_xlabel() == "steps"
  texts = [text.get_text() for text in axes.texts]
  assert texts == ["0.9: 0.005154", "1.1: 117.4"]
  np.testing.assert_array_equal(axes.lines[0].get_ydata(), curves["0.9"])
  assert list(axes.lines[0].get_xdata()) == list(range(51))


@pytest.mark.parametrize("visited", [1, 9])
@pytest.mark.parametrize("width", [1, 4])
def test_slow_points_lie_among_the_states(visited, width, drawn, tmp_path):
  rng = np.random.default_rng(0)
  points = Points(
    rng.normal(size=(3, width)),
    np.array([1e-9, 1e-3, 0.5]),
    np.array([4, 1, 1]),
    rng.normal(size=(3, width)) + 1j,
    rng.normal(size=(visited, width)),
  )
  path = figures.fixed_points({"a": points}, 2, tmp_path / "f.png")
  assert is_png(path)
  left, right = drawn.pop().axes
  assert [line.get_label() for line in left.lines[1:]] == [
    "1: speed 1e-09",
    "2: speed 1e-03",
  ]
  assert len(left.lines[0].get_xdata()) == visited
  circle, *values = right.lines
  assert np.allclose(np.hypot(*circle.get_data()), 1) and len(values) == 2
  np.testing.assert_array_equal(values[1].get_ydata(), np.ones(width))


def test_nothing_to_draw_is_said(tmp_path):
  with pytest.raises(ValueError, match="at least one row, there are 0"):
    figures.by_length([], tmp_path / "b.png")
  with pytest.raises(ValueError, match="at least one sample, there are 0"):
    figures.attention_maps([], tmp_path / "a.png", True)
  assert not list(tmp_path.iterdir())


# No display, no leak, no matplotlib

WITHOUT_A_DISPLAY = """
import sys
import numpy as np
from rnnlab import figures, metrics
row = {"source_length": 6, "examples": 3, "exact_match": 0.5}
figures.by_length([row], sys.argv[1])
assert "matplotlib.pyplot" not in sys.modules
assert "tkinter" not in sys.modules
"""


def test_no_display_is_asked_for(tmp_path):
  env = {k: v for k, v in os.environ.items() if k != "DISPLAY"}
  done = subprocess.run(
    [
      sys.executable,
      "-W",
      "error",
      "-c",
      WITHOUT_A_DISPLAY,
      tmp_path / "b.png",
    ],
    env=env | {"MPLBACKEND": "TkAgg"},
    capture_output=True,
    timeout=100,
  )
  assert done.returncode == 0, done.stderr.decode()
  assert is_png(tmp_path / "b.png")


@pytest.mark.slow
def test_twenty_figures_leave_nothing_behind(tmp_path):
  from matplotlib.figure import Figure

  def alive():
    gc.collect()
    return [thing for thing in gc.get_objects() if isinstance(thing, Figure)]

  before = alive()
  for _ in range(10):
    figures.by_length([row(6)], tmp_path / "b.png")
    figures.attention_maps([sample("ab")], tmp_path / "a.png", True)
  # Earlier tests may have left some; these are held, so they stay themselves.
  assert [f for f in alive() if not any(f is old for old in before)] == []
  pyplot = sys.modules.get("matplotlib.pyplot")
  assert pyplot is None or not pyplot.get_fignums()


def test_without_matplotlib_a_figure_says_what_to_install(
  monkeypatch, tmp_path
):
  for name in [m for m in sys.modules if m.split(".")[0] == "matplotlib"]:
    monkeypatch.setitem(sys.modules, name, None)
  monkeypatch.setitem(sys.modules, "matplotlib", None)
  words = r"needs matplotlib: pip install 'rnnlab\[plots\]'"
  with pytest.raises(ValueError, match=words):
    figures.by_length([row(6)], tmp_path / "b.png")
  with pytest.raises(ValueError, match=words):
    figures.attention_maps([sample()], tmp_path / "a.png", True)
  assert not list(tmp_path.iterdir())


def setting(at, *finals, level=2.0, n=3):
  runs = [[[i * 10, f * 2**-i] for i in range(n)] for f in finals]
  found = {"at": at, "runs": runs, "final": list(finals), "level": level}
  return found | {"metric": "val/nll"}


@pytest.mark.parametrize(
  "settings",
  [
    # By setting: one diverged, one with runs of two lengths, one without runs.
    [
      setting({"cell.name": "lstm", "keep.steps": None}, 1e-4, math.nan),
      setting({"cell.name": "gru", "keep.steps": 9.0}, 1.9, 2.0)
      | {"runs": [[[0, 2.0]], [[0, 2.0], [10, 1.0]]]},
      {"at": {"cell.name": "rnn", "keep.steps": None}, "runs": [], "final": []},
    ],
    # Against a number, over three decades.
    [setting({"opt.lr": lr}, 1.0, 0.5, level=None) for lr in (1e-4, 1e-2, 1.0)],
    [setting({}, 0.3)],
  ],
)
def test_a_sweep(settings, tmp_path):
  path = figures.sweep(settings, tmp_path / "new" / "sweep.png")
  assert is_png(path)


def test_a_sweep_without_a_run_has_no_figure(tmp_path):
  empty = {"at": {}, "runs": [], "final": []}
  with pytest.raises(ValueError, match="needs a run that is done"):
    figures.sweep([empty], tmp_path / "sweep.png")


def test_what_tells_the_settings_of_a_sweep_apart():
  lstm = {"at": {"cell.name": "lstm", "task.lag": 9, "keep.steps": None}}
  gru = {"at": {"cell.name": "gru", "task.lag": 9, "keep.steps": 5.0}}
  labels = [
    figures.sweeps._label(one["at"], [lstm, gru]) for one in (lstm, gru)
  ]
  assert labels == ["lstm", "gru, steps 5.0"]
