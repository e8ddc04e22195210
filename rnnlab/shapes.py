"""The axis legend, and a check that arrays agree on it.

An array's name ends in its axes, batch first: `x_BTD`, `mask_BT`. Inside the
time loop vectors are columns, so there the batch comes last: `h_HB`, `u_GB`.
"""

LEGEND = {
  "B": "batch",
  "T": "time",
  "S": "source position",
  "U": "target position",
  "D": "input width",
  "H": "hidden width",
  "G": "packed gates (a multiple of H)",
  "V": "vocabulary",
  "L": "layer",
  "A": "width in which query and key are compared",
  "N": "columns: batch, or time x batch",
}


def check(**arrays) -> dict[str, int]:
  """Checks that arrays agree on the size of every axis in their names.

  `check(x_BTD=x, mask_BT=mask)` returns `{"B": 3, "T": 5, "D": 8}`. An array
  that is None is passed over. Raises ValueError with both names and both
  shapes where the number of axes or a size differs.
  """
  sizes, seen = {}, {}
  for name, array in arrays.items():
    if array is None:
      continue
    axes, shape = name.rsplit("_", 1)[-1], tuple(array.shape)
    if len(axes) != len(shape):
      raise ValueError(
        f"{name} needs {len(axes)} axes ({_words(axes)}), but has the shape "
        f"{shape}"
      )
    for axis, size in zip(axes, shape, strict=True):
      if sizes.setdefault(axis, size) != size:
        raise ValueError(
          f"{name} has the shape {shape}, so {_words(axis)} is {size}, but it "
          f"is {sizes[axis]} in {seen[axis]}"
        )
      seen.setdefault(axis, f"{name} of shape {shape}")
  return sizes


def _words(axes):
  return ", ".join(LEGEND[axis] for axis in axes)
