"""What a sweep came to."""

import numpy as np

from rnnlab.figures import canvas
from rnnlab.figures.canvas import COLOURS, MARKERS, STYLES

BARE = "name", "kind"  # what such settings are called goes without saying


def sweep(settings, path):
  """Learning curves by setting and what each came to; returns the path.

  settings: of `sweep.curves`. Left: mean over the seeds, and a band from the
  lowest to the highest. Right: the best loss of every run, against the value
  where a single number is what varies, and else by setting, best first. Raises
  ValueError where no run is done.
  """
  settings = [setting for setting in settings if setting["runs"]]
  if not settings:
    raise ValueError("the figure of a sweep needs a run that is done")

  def rank(setting):
    return np.nan_to_num(np.mean(setting["final"]), nan=np.inf)

  settings = sorted(settings, key=rank)
  tall = max(3.8, 0.26 * len(settings) + 1)
  figure, grid = canvas.figure(2, 1, (11, tall))
  left, right = grid[0]
  for i, setting in enumerate(settings):
    drawn = {
      "color": COLOURS[i % 6],
      "linestyle": STYLES[i // 6 % 4],
    }
    steps = sorted({step for run in setting["runs"] for step, _ in run})
    loss_RE = np.array(
      [[dict(run).get(s, np.nan) for s in steps] for run in setting["runs"]],
      float,
    )
    loss_RE = np.where(np.isfinite(loss_RE), loss_RE, np.nan)
    known_E = np.isfinite(loss_RE).any(0)
    steps, loss_RE = np.array(steps)[known_E], loss_RE[:, known_E]
    left.plot(steps, np.nanmean(loss_RE, 0), linewidth=2, **drawn)
    low, high = np.nanmin(loss_RE, 0), np.nanmax(loss_RE, 0)
    left.fill_between(steps, low, high, color=drawn["color"], alpha=0.1)
  metric = settings[0]["metric"]
  if settings[0]["level"] is not None:
    for draw in (left.axhline, right.axhline if _is_axis(settings) else None):
      draw and draw(settings[0]["level"], color="0.4", linewidth=1)
    left.annotate(
      "without a memory",
      (0, settings[0]["level"]),
      xytext=(4, 3),
      textcoords="offset points",
      color="0.4",
    )
  left.set_xlabel("updates")
  left.set_ylabel(f"{metric}, mean and range over seeds")
  losses = [loss for setting in settings for loss in setting["final"]]
  losses = [loss for loss in losses if np.isfinite(loss)] or [1.0]
  if min(losses) > 0 and max(losses) > 30 * min(losses):
    left.set_yscale("log")
    (right.set_yscale if _is_axis(settings) else right.set_xscale)("log")
  _outcomes(right, settings, metric)
  for axes in (left, right):
    axes.grid(alpha=0.3)
  return canvas.save(figure, path)


def _is_axis(settings):
  """Whether one number is all that varies between the settings."""
  values = [[*setting["at"].values()] for setting in settings]
  return len(values) > 1 and all(
    len(v) == 1 and isinstance(v[0], int | float) and not isinstance(v[0], bool)
    for v in values
  )


def _outcomes(axes, settings, metric):
  if _is_axis(settings):
    (name,) = settings[0]["at"]
    x = [setting["at"][name] for setting in settings]
    if min(x) > 0 and max(x) > 30 * min(x):
      axes.set_xscale("log")
    for i, setting in enumerate(settings):
      drawn = {"color": COLOURS[i % 6], "linestyle": "", "marker": "o"}
      axes.plot([x[i]] * len(setting["final"]), setting["final"], **drawn)
    order = np.argsort(x)
    means = np.array([np.mean(setting["final"]) for setting in settings])
    axes.plot(np.array(x)[order], means[order], color="0.5", zorder=0)
    axes.set_xlabel(name)
    axes.set_ylabel(f"{metric} of each run, at its best")
    return
  for i, setting in enumerate(settings):
    drawn = {
      "color": COLOURS[i % 6],
      "marker": MARKERS[i // 6 % 8],
    }
    rows = [i] * len(setting["final"])
    axes.plot(setting["final"], rows, linestyle="", **drawn)
  labels = [_label(setting["at"], settings) for setting in settings]
  axes.set_yticks(range(len(settings)), labels)
  for i, tick in enumerate(axes.get_yticklabels()):
    tick.set_color(COLOURS[i % 6])
  axes.set_ylim(len(settings) - 0.5, -0.5)
  axes.yaxis.tick_right()
  axes.set_xlabel(f"{metric} of each run, at its best")


def _label(at, settings):
  """The values that tell a setting from the others, by their last name."""
  varied = [
    name for name in at if len({repr(s["at"][name]) for s in settings}) > 1
  ]
  said = []
  for name in varied:
    last = name.rpartition(".")[2]
    if at[name] is not None:
      said.append(f"{at[name]}" if last in BARE else f"{last} {at[name]}")
  return ", ".join(said) or "all the same"
