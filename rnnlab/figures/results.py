"""What a run's evaluation and samples show."""

import numpy as np

from rnnlab import metrics
from rnnlab.figures import canvas
from rnnlab.figures.canvas import COLOURS


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
  figure, grid = canvas.figure(columns, rows, size)
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
  return canvas.save(figure, path)


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
  figure, grid = canvas.figure(1, 1, (max(6, 0.6 * len(rows) + 1), 3.8))
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
  return canvas.save(figure, path)


def by_label(labels, places, path):
  """Accuracy by label and by place in the token; returns the path written.

  labels, places: the tables of a tagger. Raises ValueError for no rows.
  """
  if not labels or not places:
    raise ValueError("a figure by label needs at least one row, there are 0")
  figure, (axes,) = canvas.figure(2, 1, (10, 0.28 * len(labels) + 1.8))
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
  return canvas.save(figure, path)
