"""What was worked out once, in the user's cache: files, whole or not there.

All of it can be worked out again, so it may be deleted at any time.
"""

import contextlib
import os
import pathlib
import tempfile


def folder(kind: str) -> pathlib.Path:
  """Where files of one kind are kept; it need not be there yet."""
  home = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(home) / "rnnlab" / kind


@contextlib.contextmanager
def write(path: pathlib.Path):
  """A binary file that is put at `path` once all is written, so that no reader
  finds half of it; nothing is left where that fails."""
  path.parent.mkdir(parents=True, exist_ok=True)
  part = tempfile.NamedTemporaryFile(dir=path.parent, delete=False)
  try:
    with part as file:
      yield file
      file.flush()
      os.fsync(file.fileno())
    os.replace(part.name, path)
  except BaseException:
    pathlib.Path(part.name).unlink(missing_ok=True)
    raise
