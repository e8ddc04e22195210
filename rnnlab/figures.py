"""Pictures, written to files. The only place for matplotlib, imported late.

Everything else works without it; a figure then says what to install.
"""

from pathlib import Path

import numpy as np

from rnnlab import metrics


def require():
  """Raises ValueError that says what to install where matplotlib is missing."""
  try:
    import matplotlib.figure  # noqa: F401
  except ModuleNotFoundError:
    raise ValueError(
      "a figure needs matplotlib: pip install 'rnnlab[plots]'"
    ) from None


def _figure(columns, rows, size):
  require()
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  # Without pyplot there is no display to ask for and nothing to leak.
  figure = Figure(figsize=size, layout="constrained", dpi=150)
  FigureCanvasAgg(figure)
  return figure, figure.subplots(rows, columns, squeeze=False)


def _save(figure, path):
  path = Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path)
  return path


def attention_maps(samples, path, noisy):
  """One map a sample: what every output symbol attended to.

  samples: dicts with `source`, `text`, `end` and `attention_US`. noisy: every
  second source letter is noise, and is marked. Returns the path written.
  Raises ValueError for no samples.
  """
  if not samples:
    raise ValueError("attention maps need at least one sample, there are 0")
  columns = min(3, len(samples))
  rows = -(-len(samples) // columns)
  longest = max(len(s["source"]) for s in samples)
  size = columns * max(3.2, 0.26 * longest + 1), rows * 3.4
  figure, grid = _figure(columns, rows, size)
  for axes in grid.flat[len(samples) :]:
    axes.set_axis_off()
  image = None
  for sample, axes in zip(samples, grid.flat, strict=False):
    weights_US = np.asarray(sample["attention_US"])
    outputs = [*sample["text"], "[S]"][: len(weights_US)]
    image = axes.imshow(weights_US, cmap="viridis", vmin=0, vmax=1)
    axes.set_xticks(range(len(sample["source"])), sample["source"])
    axes.set_yticks(range(len(outputs)), outputs)
    axes.set_xlabel("source (noise letters in orange)" if noisy else "source")
    axes.set_ylabel("output")
    if noisy:
      for label in axes.get_xticklabels()[1::2]:
        label.set_color("#d55e00")
        label.set_fontstyle("italic")
  figure.colorbar(image, ax=grid, label="attention weight", shrink=0.8)
  return _save(figure, path)


def by_length(rows, path):
  """Exact match and examples against the source's length; returns the path.

  rows: dicts with `source_length`, `examples`, `exact_match`. The bars are 95 %
  intervals (Wilson), wide where examples are few. Raises ValueError for none.
  """
  if not rows:
    raise ValueError("a figure by length needs at least one row, there are 0")
  share = np.array([row["exact_match"] for row in rows])
  n = np.array([row["examples"] for row in rows])
  low, high = metrics.wilson(share, n)
  figure, grid = _figure(1, 1, (max(6, 0.6 * len(rows) + 1), 3.8))
  axes = grid[0, 0]
  # One place a length, however far they lie apart: every label can be read.
  places = range(len(rows))
  axes.errorbar(
    places,
    100 * share,
    yerr=100 * np.maximum(np.stack([share - low, high - share]), 0),
    marker="o",
    capsize=3,
    color="#0072b2",
  )
  labels = [f"{row['source_length']}\nn={row['examples']}" for row in rows]
  axes.set_xticks(places, labels)
  axes.set_xlabel("source length (symbols), and examples of it")
  axes.set_ylabel("exact match (%), 95 % interval")
  axes.set_ylim(np.nanmin([95, *(100 * low - 2)]), 100.5)
  axes.grid(alpha=0.3)
  return _save(figure, path)


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
  figure, grid = _figure(2, 1, (11, tall))
  left, right = grid[0]
  for i, setting in enumerate(settings):
    drawn = {"color": COLOURS[i % 6], "linestyle": STYLES[i // 6 % 4]}
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
  return _save(figure, path)


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
    drawn = {"color": COLOURS[i % 6], "marker": MARKERS[i // 6 % 8]}
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


# Okabe and Ito's colours, which the colour-blind can tell apart.
COLOURS = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
BARE = "name", "kind"  # what such settings are called goes without saying
STYLES = "-", "--", ":", "-."
# Of the gates that one cell may have together.
OF_GATE = {"keep": 0, "replace": 0, "input": 1, "reset": 1, "output": 2}


def retention(before, now, step, path):
  """Half-lives and slopes of all gates at the start and now; returns the path.

  before, now: {"<recurrence>/<gate>": a gate of `retention.summary`}. One row a
  recurrence: units sorted by half-life, and by slope for every gate.
  """
  groups = {}
  for name in now:
    groups.setdefault(name.rpartition("/")[0], []).append(name)
  figure, grid = _figure(2, len(groups), (10, 3.1 * len(groups)))
  for (group, names), (left, right) in zip(groups.items(), grid, strict=True):
    for name in names:
      gate = name.rpartition("/")[2]
      for found, style, when in (
        (before[name], ":", "initialised"),
        (now[name], "-", f"step {step}"),
      ):
        drawn = {"linestyle": style, "color": COLOURS[OF_GATE[gate]]}
        label = f"{gate}, {when}"
        _sorted(right, found["slope_H"], label=label, **drawn)
        if "half_life_H" in found:
          _sorted(left, found["half_life_H"], label=when, **drawn)
    left.set_yscale("log")
    _plain_ticks(left.yaxis)
    left.set_ylabel("half-life, direct path (steps)")
    left.legend()
    right.set_ylabel("mean slope (at most 1/4)")
    right.set_ylim(0, 0.26)
    right.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    for axes in (left, right):
      axes.set_title(group)
      axes.set_xlabel("units, sorted (%)")
      axes.grid(alpha=0.3, which="both")
  return _save(figure, path)


def _sorted(axes, x_H, **drawn):
  """Units by their value; infinite ones leave a gap at the end."""
  x_H = np.sort(x_H)
  share_H = 100 * (np.arange(len(x_H)) + 0.5) / len(x_H)
  x_H = np.where(np.isfinite(x_H), x_H, np.nan)
  axes.plot(share_H, x_H, linewidth=2, **drawn)


def _plain_ticks(axis):
  """Labels of a logarithmic axis as numbers: 0.5, 1, 2, 5, 10."""
  from matplotlib.ticker import LogLocator

  low, high = sorted(axis.get_view_interval())
  fine = (1, 2, 5) if high < 300 * low else (1,)
  axis.set_major_locator(LogLocator(subs=fine))
  axis.set_major_formatter("{x:g}")
  axis.set_minor_formatter("")


CURVES = {
  "product": ("norm of the product, 10-90 %", COLOURS[0], "o-"),
  "bound": ("product of the norms (bound)", "black", "--"),
  "radius": ("spectral radius to the distance", COLOURS[4], ":"),
  "direct path": ("direct path, best unit", COLOURS[2], "-."),
  "gradient": ("gradient, relative", COLOURS[1], "-"),
}


def sensitivity(curves, path):
  """Norms against the distance, on a logarithmic axis; returns the path.

  curves: {recurrence: {"distance": D of them, name of CURVES: D triples of
  log10, 10, 50 and 90 % over rows}}. The band is from 10 to 90 %.
  """
  figure, grid = _figure(1, len(curves), (9, 3.4 * len(curves)))
  from matplotlib.ticker import MaxNLocator

  for (name, own), axes in zip(curves.items(), grid[:, 0], strict=True):
    for curve, (label, colour, style) in CURVES.items():
      if curve not in own:
        continue
      low, middle, high = np.where(
        np.isfinite(own[curve]), np.array(own[curve]), np.nan
      ).T
      drawn = {"color": colour, "label": label, "markersize": 4}
      axes.plot(own["distance"], middle, style, linewidth=2, **drawn)
      if curve == "product":
        axes.fill_between(own["distance"], low, high, color=colour, alpha=0.2)
    axes.set_title(name)
    axes.set_xlabel("distance to the last step (steps)")
    axes.set_ylabel("factor on a change of state (no unit)")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(_ten_to)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
  return _save(figure, path)


def _ten_to(exponent, position=None):
  return f"$10^{{{exponent:g}}}$"


def products(curves, path):
  """Products of a constant factor over steps; returns the path written.

  curves: {the factor as text: the product over 0, 1, 2 .. steps}.
  """
  figure, grid = _figure(1, 1, (6.4, 4))
  axes = grid[0, 0]
  styles = "--", "-", "-.", ":"
  for i, (name, curve) in enumerate(curves.items()):
    drawn = {"color": COLOURS[i], "linestyle": styles[i % len(styles)]}
    axes.plot(range(len(curve)), curve, linewidth=2, **drawn)
    # Named and numbered where it ends.
    axes.annotate(
      f"{name}: {curve[-1]:.4g}",
      (len(curve) - 1, curve[-1]),
      xytext=(6, 0),
      textcoords="offset points",
      verticalalignment="center",
      color=COLOURS[i],
    )
  axes.set_yscale("log")
  axes.set_xlim(0, 1.4 * max(len(curve) - 1 for curve in curves.values()))
  axes.set_xlabel("steps")
  axes.set_ylabel("product of the factor (no unit)")
  axes.grid(alpha=0.3)
  return _save(figure, path)


def fixed_points(found, shown, path):
  """Slow points among visited states, and eigenvalues; returns the path.

  found: {recurrence: analysis.fixed_points.Points}; of each the `shown` slowest
  points. One row a recurrence: the states along their two leading principal
  components, and the complex plane with the unit circle.
  """
  figure, grid = _figure(2, len(found), (9.5, 4.2 * len(found)))
  for (name, points), (left, right) in zip(found.items(), grid, strict=True):
    visited_MN = points.visited_MN
    middle_N = visited_MN.mean(0)
    axes_2N = np.linalg.svd(visited_MN - middle_N, full_matrices=False)[2][:2]
    if len(axes_2N) < 2:
      axes_2N = np.concatenate([axes_2N, np.zeros_like(axes_2N)])
    left.plot(
      *((visited_MN - middle_N) @ axes_2N.T).T, ".", color="0.7", markersize=3
    )
    circle = np.exp(1j * np.linspace(0, 2 * np.pi, 200))
    right.plot(circle.real, circle.imag, color="0.5", linewidth=1)
    for p, values_N in enumerate(points.eigenvalues_PN[:shown]):
      drawn = {"color": COLOURS[p % len(COLOURS)], "marker": MARKERS[p % 8]}
      at = (points.state_PN[p] - middle_N) @ axes_2N.T
      label = f"{p + 1}: speed {points.speed_P[p]:.0e}"
      left.plot(*at, linestyle="", markersize=9, label=label, **drawn)
      right.plot(
        values_N.real,
        values_N.imag,
        linestyle="",
        markersize=5,
        markerfacecolor="none",
        **drawn,
      )
    left.set_title(f"{name}: states (grey) and slow points")
    left.set_xlabel("first principal component (state)")
    left.set_ylabel("second (state)")
    left.legend(fontsize="small")
    right.set_title("eigenvalues of a step there")
    right.set_xlabel("real part (a step)")
    right.set_ylabel("imaginary part (a step)")
    right.set_aspect("equal", adjustable="datalim")
    for axes in (left, right):
      axes.grid(alpha=0.3)
  return _save(figure, path)


MARKERS = "osD^vPX*"


def truncation(before, now, step, path):
  """What is lost by going K steps back; returns the path written.

  before, now: {recurrence: analysis.truncation.Truncated}. One row a
  recurrence: the cosine with the full gradient, then norm and bias.
  """
  figure, grid = _figure(2, len(now), (10, 3.1 * len(now)))
  for name, (left, right) in zip(now, grid, strict=True):
    for found, style, when in (
      (before[name], ":", "initialised"),
      (now[name], "-", f"step {step}"),
    ):
      K = np.arange(1, len(found.cosine_K) + 1)
      drawn = {"linestyle": style, "linewidth": 2}
      left.plot(K, found.cosine_K, label=when, color=COLOURS[0], **drawn)
      for value, what, colour in (
        (found.norm_K, "norm", COLOURS[2]),
        (found.bias_K, "bias", COLOURS[1]),
      ):
        right.plot(K, value, label=f"{what}, {when}", color=colour, **drawn)
    left.set_ylabel("cosine with the full gradient")
    right.set_ylabel("of the full gradient's norm")
    left.legend()
    right.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    for axes in (left, right):
      axes.set_title(name)
      axes.set_xlabel("K, how far each loss goes back (steps)")
      if len(K) > 1:
        axes.set_xscale("log")
        _plain_ticks(axes.xaxis)
      axes.grid(alpha=0.3)
  return _save(figure, path)


def context(found, path):
  """Which inputs reach each output, and which may; returns the path.

  found: {name: (analysis.context.Claim, analysis.context.Found)}. One map each,
  outputs down and inputs across.
  """
  from matplotlib.colors import ListedColormap
  from matplotlib.patches import Patch

  figure, grid = _figure(len(found), 1, (max(6, 4.8 * len(found)), 6.2))
  for (name, (claim, own)), axes in zip(found.items(), grid[0], strict=True):
    kinds_US = np.select(
      [own.reached_US & own.may_US, own.may_US, own.reached_US], [1, 2, 3], 0
    )
    shown = ListedColormap([colour for colour, _ in CONTEXT])
    axes.imshow(kinds_US, cmap=shown, vmin=0, vmax=3, interpolation="nearest")
    U, S = kinds_US.shape
    # What is forbidden and read is marked too: not by its colour alone.
    u, s = np.nonzero(kinds_US == 3)
    axes.plot(s, u, "x", color="white", markersize=4)
    for axis, n in ((axes.set_xticks, S), (axes.set_yticks, U)):
      axis(np.arange(0, n, max(1, n // 6)))
    axes.set_xticks(np.arange(S + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(U + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=0.5)
    axes.tick_params(which="minor", length=0)
    declared = getattr(claim.context, "__str__", lambda: "as listed")
    axes.set_title(f"{name}\ndeclared: {declared()}", fontsize="medium")
    axes.set_xlabel("input (step)")
    axes.set_ylabel("output (step)")
  keys = [Patch(facecolor=colour, label=label) for colour, label in CONTEXT]
  figure.legend(handles=keys, loc="outside lower center", ncols=2)
  return _save(figure, path)


# What an output does with an input, by what it may.
CONTEXT = (
  ("#e8e8e8", "not allowed, not read"),
  (COLOURS[0], "allowed and read"),
  (COLOURS[5], "allowed, not read"),
  (COLOURS[1], "read, not allowed: a leak"),
)


def by_label(labels, places, path):
  """Accuracy by label and by place in the token; returns the path written.

  labels, places: the tables of a tagger. Raises ValueError for no rows.
  """
  if not labels or not places:
    raise ValueError("a figure by label needs at least one row, there are 0")
  figure, (axes,) = _figure(2, 1, (10, 0.28 * len(labels) + 1.8))
  left, right = axes
  rows = range(len(labels))
  left.barh(rows, [100 * r["accuracy"] for r in labels], color=COLOURS[0])
  left.set_yticks(rows, [f"{r['label']}  n={r['characters']}" for r in labels])
  left.invert_yaxis()
  left.set_xlim(0, 100)
  left.set_xlabel("characters labelled right (%)")
  for field, name, style, colour in (
    ("accuracy", "all", "o-", COLOURS[0]),
    ("accuracy/identifiers", "identifiers", "s--", COLOURS[1]),
  ):
    share = [np.nan if r[field] is None else 100 * r[field] for r in places]
    right.plot(range(len(places)), share, style, color=colour, label=name)
  right.set_ylim(top=100.5)
  right.set_xticks(range(len(places)), [r["place"] for r in places])
  right.set_xlabel("characters of the token before it")
  right.set_ylabel("labelled right (%)")
  right.legend()
  for each in axes:
    each.grid(alpha=0.3)
  return _save(figure, path)


def memory(curves, rows, path):
  """Bytes against the number of steps; returns the path written.

  curves: {cell: {"predicted": {scan: [(steps, bytes)]}, "compiled": the same,
  with "generating"}}. Lines are predicted, marks compiled. rows: of the batch.
  """
  figure, grid = _figure(len(curves), 1, (5.6 * len(curves) + 1.5, 4.4))
  for (name, own), axes in zip(curves.items(), grid[0], strict=True):
    for scan, (colour, style, mark, label) in SCANS.items():
      drawn = {"color": colour, "label": label}
      found = np.array(own["compiled"][scan], float).T
      if scan in own["predicted"]:
        steps, said = np.array(own["predicted"][scan], float).T
        axes.plot(steps, said / 2**20, style, linewidth=2, **drawn)
        drawn.pop("label")
        axes.plot(found[0], found[1] / 2**20, mark, markersize=7, **drawn)
      else:
        axes.plot(found[0], found[1] / 2**20, mark + style, **drawn)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    _plain_ticks(axes.yaxis)
    axes.set_title(f"{name}, {rows} rows (lines predicted, marks compiled)")
    axes.set_xlabel("steps T")
    axes.set_ylabel("memory besides arguments (MiB)")
    axes.grid(alpha=0.3)
  axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
  return _save(figure, path)


SCANS = {
  "plain": (COLOURS[0], "-", "o", "training, plain"),
  "per step": (COLOURS[4], "-.", "^", "training, a chunk a step"),
  "chunks": (COLOURS[2], "--", "s", "training, chunks"),
  "generating": (COLOURS[1], ":", "D", "generating"),
}
