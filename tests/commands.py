"""The commands as a person types them, without a start of Python for each.

A server imports what the commands import, once, and forks a child a command:
the child has its own arguments, environment, files and end. What a command does
before it has imported anything needs a process of its own, not this.
"""

import atexit
import functools
import json
import os
import pathlib
import runpy
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[1]


def run(*args, cwd=ROOT, env=()) -> subprocess.CompletedProcess:
  """`python <args>`, as subprocess.run would capture it, in bytes."""
  with tempfile.TemporaryDirectory() as folder:
    out, err = (os.path.join(folder, name) for name in ("out", "err"))
    job = {"args": [*map(str, args)], "cwd": str(cwd), "env": dict(env)}
    server = _server()
    print(json.dumps(job | {"out": out, "err": err}), file=server.stdin)
    server.stdin.flush()
    status = int(server.stdout.readline())
    read = (pathlib.Path(path).read_bytes() for path in (out, err))
    return subprocess.CompletedProcess(job["args"], status, *read)


@functools.cache
def _server():
  server = subprocess.Popen(
    [sys.executable, __file__],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    text=True,
  )
  atexit.register(_end, server)
  return server


def _end(server):
  server.stdin.close()
  server.wait()
  server.stdout.close()


def _serve():
  # What the scripts import; none of it starts a backend of jax, which would
  # not survive the fork.
  from rnnlab import instruments, sweep, trained  # noqa: F401
  from rnnlab.tasks import name_lm, name_reversal  # noqa: F401

  for line in sys.stdin:
    child = os.fork()
    if not child:
      _become(**json.loads(line))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _become(args, cwd, env, out, err):
  """Runs the command in this process, and ends it."""
  for number, path in ((1, out), (2, err)):
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, number)
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  os.chdir(cwd)
  os.environ.update(env)
  import rnnlab

  rnnlab.PROCESS_START = time.monotonic()
  sys.argv = args
  sys.path[0] = str(pathlib.Path(args[0]).absolute().parent)
  status = 0
  try:
    runpy.run_path(args[0], run_name="__main__")
  except SystemExit as end:
    if isinstance(end.code, str):
      print(end.code, file=sys.stderr)
    status = int(bool(end.code)) if isinstance(end.code, str) else end.code or 0
  except BaseException:
    import traceback

    traceback.print_exc()
    status = 1
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


if __name__ == "__main__":
  _serve()
