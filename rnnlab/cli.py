"""What every command shares: flags, clear errors, one JSON line at the end."""

import os
import platform
import sys
from pathlib import Path

import jax
from absl import app, flags, logging

from rnnlab import rundir


def run(main) -> None:
  """Runs `main() -> dict` as a command and prints the dict as the last line.

  What a user can get wrong (ValueError, OSError, a bad flag) ends as one line
  on stderr and the exit status 1; --verbosity=1 adds the traceback.
  """

  def guarded(argv):
    if len(argv) > 1:
      _fail(f"unexpected argument {argv[1]!r}; settings are --name=value")
    # A terminal that cannot show a letter gets its code point, not a crash.
    sys.stdout.reconfigure(errors="backslashreplace")
    sys.stderr.reconfigure(errors="backslashreplace")
    _cache_compilations()
    try:
      record = main()
    except (ValueError, OSError) as error:
      logging.debug("traceback", exc_info=True)
      _fail(error)
    print(rundir.plain_json(record), flush=True)

  # jax tells at INFO which accelerators it did not find.
  flags.FLAGS.set_default("verbosity", logging.WARNING)
  app.run(guarded, flags_parser=_parse)


def _parse(argv):
  try:
    return app.parse_flags_with_usage(argv)
  except (AttributeError, KeyError) as error:
    # ml_collections names the field alone.
    given = [arg for arg in argv if str(error).strip("\"'") in arg]
    _fail(f"no such setting: {', '.join(given) or error}")
  except (OSError, TypeError, ValueError) as error:
    _fail(error)


def _fail(error):
  print(f"error: {error}", file=sys.stderr, flush=True)
  sys.exit(1)


def _cache_compilations():
  """Keeps compiled programs on disk, so that the second start is quick."""
  if jax.config.jax_compilation_cache_dir is None:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    # A host's own: compiled code may use instructions another one lacks.
    path = Path(home) / "rnnlab" / platform.node()
    jax.config.update("jax_compilation_cache_dir", str(path))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
