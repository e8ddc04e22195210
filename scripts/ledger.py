r"""Computes every worked number of two lectures' notes again, and compares.

Examples:
  python scripts/ledger.py
  python scripts/ledger.py --figure=figure2.png
"""

import numpy as np
from absl import flags

from rnnlab import cli, figures, ledger
from rnnlab.ledger import gates

FIGURE = flags.DEFINE_string(
  "figure", None, "A file for the sensitivity products over 50 steps."
)


def main():
  if FIGURE.value:
    figures.require()
  rows = ledger.rows()
  cli.table([HEADER, *map(_shown, rows)])
  if FIGURE.value:
    cli.say(f"wrote {figures.products(gates.figure(), FIGURE.value)}")
  failed = [row.claim for row in rows if not row.passes]
  return {"rows": len(rows), "failed": failed}


HEADER = ["claim", "source", "claimed", "computed", "tolerance", ""]


def _shown(row):
  return [
    row.claim,
    row.source,
    _number(row.expected),
    _number(row.computed),
    "=" if isinstance(row.expected, str) else _number(row.tolerance),
    "ok" if row.passes else "FAILS",
  ]


def _number(value):
  if isinstance(value, str):
    return value
  numbers = [f"{number:.9g}" for number in np.ravel(value)]
  return " ".join(numbers[:3] + ["…"] * (len(numbers) > 3))


if __name__ == "__main__":
  cli.run(main)
