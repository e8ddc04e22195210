"""A sheet to draw on, how it is saved, and colours for all."""

from pathlib import Path

# Okabe and Ito's colours, which the colour-blind can tell apart.
COLOURS = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"
STYLES = "-", "--", ":", "-."
MARKERS = "osD^vPX*"


def require():
  """Raises ValueError that says what to install where matplotlib is missing."""
  try:
    import matplotlib.figure  # noqa: F401
  except ModuleNotFoundError:
    raise ValueError(
      "a figure needs matplotlib: pip install 'rnnlab[plots]'"
    ) from None


def figure(columns, rows, size):
  """(a figure of size inches, its grid of axes)."""
  require()
  from matplotlib.backends.backend_agg import FigureCanvasAgg
  from matplotlib.figure import Figure

  # Without pyplot there is no display to ask for and nothing to leak.
  drawn = Figure(figsize=size, layout="constrained", dpi=150)
  FigureCanvasAgg(drawn)
  return drawn, drawn.subplots(rows, columns, squeeze=False)


def save(figure, path):
  """Writes it, into a folder that need not be there; returns the path."""
  path = Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path)
  return path


def plain_ticks(axis):
  """Labels of a logarithmic axis as numbers: 0.5, 1, 2, 5, 10."""
  from matplotlib.ticker import LogLocator

  low, high = sorted(axis.get_view_interval())
  fine = (1, 2, 5) if high < 300 * low else (1,)
  axis.set_major_locator(LogLocator(subs=fine))
  axis.set_major_formatter("{x:g}")
  axis.set_minor_formatter("")
