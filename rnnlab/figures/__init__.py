"""Pictures, written to files. The only place for matplotlib, imported late.

Everything else works without it; a figure then says what to install.
"""

from rnnlab.figures.canvas import require
from rnnlab.figures.instruments import (
  context,
  fixed_points,
  memory,
  products,
  retention,
  sensitivity,
  truncation,
)
from rnnlab.figures.results import attention_maps, by_label, by_length
from rnnlab.figures.sweeps import sweep

__all__ = [
  "attention_maps",
  "by_label",
  "by_length",
  "context",
  "fixed_points",
  "memory",
  "products",
  "require",
  "retention",
  "sensitivity",
  "sweep",
  "truncation",
]
