"""What every command shares: flags, clear errors, one JSON line at the end."""

import logging
import os
import platform
import re
import sys
import time
import traceback
from pathlib import Path

import jax
from absl import app, flags

from rnnlab import backend, parallel, strict_json

# What ends in one line: wrong input, files, and requests too large to hold.
FAULTS = (ValueError, OSError, MemoryError, jax.errors.JaxRuntimeError)


def run(main, processes: bool = False) -> None:
  """Runs `main() -> dict` as a command and prints the dict as the last line.

  processes: whether main takes its turns with others where the environment says
  that several were launched; the first then prints for all. Refused otherwise.
  What a user can get wrong (ValueError, OSError, a bad flag) ends as one line
  on stderr and the exit status 1; --verbosity=1 adds the traceback. A dict with
  something under "failed" is printed and ends with the status 1 too.
  """

  def guarded(argv):
    if len(argv) > 1:
      _fail(f"unexpected argument {argv[1]!r}; settings are --name=value")
    # A terminal that cannot show a letter gets its code point, not a crash.
    sys.stdout.reconfigure(errors="backslashreplace")
    sys.stderr.reconfigure(errors="backslashreplace")
    _cache_compilations()
    backend.keep_memory()
    try:
      if processes:
        parallel.connect()
      elif parallel.launched() is not None:
        raise ValueError(
          f"{Path(sys.argv[0]).name} runs in one process, and the environment "
          f"({parallel.JAX[1]}, or Slurm's) says that several were launched"
        )
      if not parallel.first():
        sys.stdout = open(os.devnull, "w")
      record = main()
    except FAULTS as error:
      if flags.FLAGS.verbosity > 0:
        traceback.print_exc()
      _fail(error)
    print(strict_json.plain_json(record), flush=True)
    return 1 if record.get("failed") else 0

  # At INFO jax tells which accelerators it did not find, and matplotlib that it
  # has listed the fonts.
  for library in ("jax", "matplotlib"):
    logging.getLogger(library).setLevel(logging.WARNING)
  app.run(guarded, flags_parser=_parse)


def say(*lines) -> None:
  """Prints notes for a person, on stderr; of several processes, once."""
  for line in lines if parallel.first() else ():
    print(line, file=sys.stderr, flush=True)


def table(rows) -> None:
  """Prints a dict, or rows of cells, in columns on stdout."""
  rows = rows.items() if isinstance(rows, dict) else rows
  rows = [
    [f"{cell:.4f}" if type(cell) is float else _shown(cell) for cell in row]
    for row in rows
  ]
  widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
  for row in rows:
    cells = (c.ljust(w) for c, w in zip(row, widths, strict=True))
    print("  ".join(cells).rstrip())


def _shown(cell):
  """A cell without the control characters that would steer a terminal."""
  return "".join(
    c if c.isprintable() else c.encode("unicode_escape").decode()
    for c in str(cell)
  )


def _parse(argv):
  try:
    return flags.FLAGS(argv)
  except (AttributeError, KeyError) as error:
    # ml_collections names the field alone, and perhaps what was meant.
    name = re.search(r"\w+|$", str(error)).group()
    hint = re.search(r"Did you mean.*\?|$", str(error)).group()
    given = [arg for arg in argv if name in arg] or [error]
    _fail(f"no such setting: {', '.join(map(str, given))}. {hint}".rstrip())
  except (flags.Error, OSError, TypeError, ValueError) as error:
    if "--verbosity=1" in argv:
      traceback.print_exc()
    # An error inside a config file comes with a traceback; its end tells most.
    _fail(str(error).strip().splitlines()[-1].strip())


def _fail(error):
  text = " ".join(map(str.strip, str(error).splitlines()))
  if not parallel.connected():
    print(f"error: {text}", file=sys.stderr, flush=True)
    sys.exit(1)
  who = f"process {jax.process_index()} of {jax.process_count()}"
  print(f"error: {who}: {text}", file=sys.stderr, flush=True)
  # sys.exit would wait for the others, who may wait for this one. The first
  # goes last: without it the others are ended before they can say why.
  time.sleep(2 if parallel.first() else 0)
  os._exit(1)


def _cache_compilations():
  """Keeps compiled programs on disk, so that the second start is quick."""
  if jax.config.jax_compilation_cache_dir is None:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    # A host's own: compiled code may use instructions another one lacks.
    path = Path(home) / "rnnlab" / platform.node()
    jax.config.update("jax_compilation_cache_dir", str(path))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
