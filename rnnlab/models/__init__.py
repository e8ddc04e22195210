"""Models as functions of their parameters, one a file."""


def check_sizes(**sizes):
  """Raises ValueError by name for a size below 1; None is not set."""
  for name, size in sizes.items():
    if size is not None and size < 1:
      raise ValueError(f"model.{name} must be at least 1, not {size}")


def check_rates(**rates):
  """Raises ValueError by name for a dropout that is no share below 1."""
  for name, rate in rates.items():
    if not 0 <= rate < 1:
      raise ValueError(f"model.{name} must be in [0, 1), not {rate}")
