"""What the instruments measure, one figure each."""

import numpy as np

from rnnlab.figures import canvas
from rnnlab.figures.canvas import COLOURS, MARKERS

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
  figure, grid = canvas.figure(2, len(groups), (10, 3.1 * len(groups)))
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
    canvas.plain_ticks(left.yaxis)
    left.set_ylabel("half-life, direct path (steps)")
    left.legend()
    right.set_ylabel("mean slope (at most 1/4)")
    right.set_ylim(0, 0.26)
    right.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    for axes in (left, right):
      axes.set_title(group)
      axes.set_xlabel("units, sorted (%)")
      axes.grid(alpha=0.3, which="both")
  return canvas.save(figure, path)


def _sorted(axes, x_H, **drawn):
  """Units by their value; infinite ones leave a gap at the end."""
  x_H = np.sort(x_H)
  share_H = 100 * (np.arange(len(x_H)) + 0.5) / len(x_H)
  x_H = np.where(np.isfinite(x_H), x_H, np.nan)
  axes.plot(share_H, x_H, linewidth=2, **drawn)


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
  log10, 10, 50 and 90 % over rows}}. The band is from 10 to 90 %. The bound may
  leave the picture at the top: all others would be one line beside it.
  """
  figure, grid = canvas.figure(1, len(curves), (9, 3.4 * len(curves)))
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
    others = np.concatenate(
      [own[c] for c in CURVES if c in own and c != "bound"]
    )
    others = others[np.isfinite(others)]
    if len(others):
      room = 0.25 * max(np.ptp(others), 1)
      axes.set_ylim(others.min() - room / 4, others.max() + room)
    axes.set_title(name)
    axes.set_xlabel("distance to the last step (steps)")
    axes.set_ylabel("factor on a change of state (no unit)")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(_ten_to)
    axes.grid(alpha=0.3)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
  return canvas.save(figure, path)


def _ten_to(exponent, position=None):
  return f"$10^{{{exponent:g}}}$"


def products(curves, path):
  """Products of a constant factor over steps; returns the path written.

  curves: {the factor as text: the product over 0, 1, 2 .. steps}.
  """
  figure, grid = canvas.figure(1, 1, (6.4, 4))
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
  return canvas.save(figure, path)


def fixed_points(found, shown, path):
  """Slow points among visited states, and eigenvalues; returns the path.

  found: {recurrence: analysis.fixed_points.Points}; of each the `shown` slowest
  points. One row a recurrence: the states along their two leading principal
  components, and the complex plane with the unit circle.
  """
  figure, grid = canvas.figure(2, len(found), (9.5, 4.2 * len(found)))
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
      drawn = {
        "color": COLOURS[p % len(COLOURS)],
        "marker": MARKERS[p % 8],
      }
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
  return canvas.save(figure, path)


def truncation(before, now, step, path):
  """What is lost by going K steps back; returns the path written.

  before, now: {recurrence: analysis.truncation.Truncated}. One row a
  recurrence: the cosine with the full gradient, then norm and bias.
  """
  figure, grid = canvas.figure(2, len(now), (10, 3.1 * len(now)))
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
        canvas.plain_ticks(axes.xaxis)
      axes.grid(alpha=0.3)
  return canvas.save(figure, path)


def context(found, path):
  """Which inputs reach each output, and which may; returns the path.

  found: {name: (analysis.context.Claim, analysis.context.Found)}. One map each,
  outputs down and inputs across.
  """
  from matplotlib.colors import ListedColormap
  from matplotlib.patches import Patch

  figure, grid = canvas.figure(len(found), 1, (max(6, 4.8 * len(found)), 6.2))
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
  return canvas.save(figure, path)


# What an output does with an input, by what it may.
CONTEXT = (
  ("#e8e8e8", "not allowed, not read"),
  (COLOURS[0], "allowed and read"),
  (COLOURS[5], "allowed, not read"),
  (COLOURS[1], "read, not allowed: a leak"),
)


def memory(curves, rows, path):
  """Bytes against the number of steps; returns the path written.

  curves: {cell: {"predicted": {scan: [(steps, bytes)]}, "compiled": the same,
  with "generating"}}. Lines are predicted, marks compiled. rows: of the batch.
  """
  figure, grid = canvas.figure(len(curves), 1, (5.6 * len(curves) + 1.5, 4.4))
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
    canvas.plain_ticks(axes.yaxis)
    axes.set_title(f"{name}, {rows} rows (lines predicted, marks compiled)")
    axes.set_xlabel("steps T")
    axes.set_ylabel("memory besides arguments (MiB)")
    axes.grid(alpha=0.3)
  axes.legend(loc="center left", bbox_to_anchor=(1, 0.5))
  return canvas.save(figure, path)


SCANS = {
  "plain": (COLOURS[0], "-", "o", "training, plain"),
  "per step": (COLOURS[4], "-.", "^", "training, a chunk a step"),
  "chunks": (COLOURS[2], "--", "s", "training, chunks"),
  "generating": (COLOURS[1], ":", "D", "generating"),
}
