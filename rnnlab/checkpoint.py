"""Checkpoints: whole or not there, checked when read, never lost to a newer.

A checkpoint is one directory named after its step:
  state/       the arrays, written by orbax under their paths in the tree
  record.json  step, facts, the path, dtype and shape of every leaf, and
               checksums: of each file, of the whole state, of this record
It is written as tmp-<step> and renamed when whole. Retention renames to
gone-<step> before it deletes. So whatever bears a number was whole once.
"""

import contextlib
import hashlib
import itertools
import logging
import operator
import os
import shutil
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from rnnlab import rundir, strict_json


class Restored(NamedTuple):
  """What `restore` found, and what it had to pass over, with the reason."""

  step: int
  state: Any
  facts: dict
  skipped: list[str]


class _Damaged(Exception):
  """This checkpoint cannot be trusted; another may."""


def save(
  directory: str | os.PathLike,
  step: int,
  state: Any,
  facts: dict,
  keep: int,
  protect: Collection[int] = (),
) -> None:
  """Writes checkpoint `step`; then drops all but what is to be kept.

  state is a pytree of arrays, typed keys and Python numbers, copied before the
  call returns, so that its buffers may be donated. facts is for values of the
  host, as `strict_json.dumps` takes them. The newest `keep` steps and those in
  `protect` stay. A step saved before must have the same state; it gets the new
  facts. A damaged one in its place is set aside. OSError where the checkpoint
  could not be written whole; the earlier ones stay as they were.
  """
  step = operator.index(step)
  if step < 0:
    raise ValueError(f"step={step}: a checkpoint needs a step of 0 or more")
  if keep < 1:
    raise ValueError(f"keep={keep}: at least 1 checkpoint has to be kept")
  root = Path(directory).absolute()
  specs, arrays = _describe(state)
  record = {"step": step, "facts": facts, "leaves": specs}
  record["state"] = _digest(specs, arrays)
  target, stage = root / str(step), root / f"tmp-{step}"
  known = _is_whole(target, record["state"])
  try:
    if known:
      _write_record(target, record)
    else:
      shutil.rmtree(stage, ignore_errors=True)
      stage.mkdir(parents=True)
      _write_arrays(stage / "state", arrays)
      _write_record(stage, record)
      if target.exists():
        _aside(root, step)
      stage.rename(target)
      rundir.sync_folder(root)
  except Exception as error:
    shutil.rmtree(stage, ignore_errors=True)
    raise OSError(
      f"checkpoint {step} could not be saved in {root} ({_brief(error)}); "
      "earlier ones are untouched"
    ) from error
  _retain(root, {step, *steps(root)[-keep:], *protect})


def steps(directory: str | os.PathLike) -> list[int]:
  """The steps of the checkpoints that look complete, ascending."""
  root = Path(directory).absolute()
  return [
    step
    for step in _numbered(root)
    if (root / str(step) / "record.json").is_file()
    and (root / str(step) / "state").is_dir()
  ]


def restore(
  directory: str | os.PathLike,
  like: Any,
  step: int | None = None,
  part: str = "",
) -> Restored | None:
  """The newest whole checkpoint, or that of `step`; None where none is.

  part: the path of a subtree (".params") that `like` describes and that alone
  is returned; the whole state by default.

  The state has the tree, dtypes, weak types, key types and, where they were
  chosen, shardings of `like`, a state or what jax.eval_shape says of it.
  Damaged or unfinished checkpoints are passed over and named in `skipped`.
  ValueError where all are damaged, and where a whole one holds another
  structure, shape or dtype than `like`, with path and both values.
  """
  root = Path(directory).absolute()
  candidates = _numbered(root)[::-1]
  if step is not None:
    if step not in candidates:
      raise ValueError(
        f"{root} holds no checkpoint {step}, only {candidates[::-1]}"
      )
    candidates = [step]
  skipped = [f"{path.name}: left unfinished" for path in _leftovers(root)]
  for candidate in candidates:
    try:
      record, arrays = _read(root / str(candidate))
    except _Damaged as error:
      skipped.append(f"{candidate}: {error}")
      continue
    where = root / str(candidate)
    state = _fit(where, record["leaves"], arrays, like, part)
    return Restored(candidate, state, record["facts"], skipped)
  if candidates:
    raise ValueError(
      f"no checkpoint in {root} is whole, nothing was changed: "
      + "; ".join(skipped)
    )
  return None


def set_aside(directory: str | os.PathLike, after: int) -> list[Path]:
  """Renames what bears a later number than `after` to damaged-<step>.

  For a run that goes on from `after`, the newest whole one: it will save those
  steps again. Nothing is deleted.
  """
  root = Path(directory).absolute()
  return [_aside(root, step) for step in _numbered(root) if step > after]


def fingerprint(tree: Any) -> str:
  """sha256 over the path, dtype, shape and bytes of every leaf."""
  return _digest(*_describe(tree))


# Trees


def _leaves(tree):
  """([(path, leaf)], treedef), with None, () and {} as leaves of their own."""

  def bare(node):
    return node is None or (isinstance(node, tuple | list | dict) and not node)

  leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=bare)
  leaves = [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]
  if len(dict(leaves)) < len(leaves):
    raise ValueError(f"two leaves share a path: {[p for p, _ in leaves]}")
  return leaves, treedef


def _spec(path, leaf):
  """What has to agree between a saved leaf and the one it is restored to."""
  if leaf is None or isinstance(leaf, tuple | list | dict):
    return {"path": path, "dtype": type(leaf).__name__, "shape": None}
  if isinstance(leaf, bool | int | float | complex):
    leaf = jnp.asarray(leaf)
  if not hasattr(leaf, "dtype"):
    raise ValueError(f"{path} is a {type(leaf).__name__}, not an array")
  return {"path": path, "dtype": str(leaf.dtype), "shape": list(leaf.shape)}


def _describe(tree):
  """(specs of all leaves, {path: numpy array} of those that have bytes)."""
  specs, arrays = [], {}
  for path, leaf in _leaves(tree)[0]:
    spec = _spec(path, leaf)
    specs.append(spec)
    if spec["shape"] is None:
      continue
    if jnp.issubdtype(getattr(leaf, "dtype", np.int32), jax.dtypes.prng_key):
      spec["key"] = str(jax.random.key_impl(leaf))
      arrays[path] = np.asarray(jax.random.key_data(leaf))
    elif isinstance(leaf, bool | int | float | complex):
      arrays[path] = np.asarray(jnp.asarray(leaf))
      if arrays[path].item() != leaf:
        raise ValueError(
          f"{path}={leaf!r} would become {arrays[path]}; keep numbers of the "
          "host among the facts"
        )
    else:
      arrays[path] = np.asarray(leaf)
  return specs, arrays


def _digest(specs, arrays):
  digest = hashlib.sha256()
  for spec in specs:
    digest.update(strict_json.dumps(spec).encode())
    if spec["shape"] is not None:
      digest.update(arrays[spec["path"]].tobytes())
  return digest.hexdigest()


def _fit(where, specs, arrays, like, part):
  """The saved arrays under the path `part` as the leaves of `like`."""
  saved = {
    spec["path"]: spec for spec in specs if spec["path"].startswith(part)
  }
  leaves, treedef = _leaves(like)
  leaves = [(part + path, leaf) for path, leaf in leaves]
  wanted = {path: _spec(path, leaf) for path, leaf in leaves}
  differing = [
    f"{path}: saved {_words(saved.get(path))}, "
    f"wanted {_words(wanted.get(path))}"
    for path in wanted | saved
    if _words(saved.get(path)) != _words(wanted.get(path))
  ]
  if differing:
    more = len(differing) - 5
    raise ValueError(
      f"{where} holds another state than this run needs: "
      + "; ".join(differing[:5])
      + (f"; and {more} more" if more > 0 else "")
    )
  return treedef.unflatten(
    leaf
    if saved[path]["shape"] is None
    else _as(leaf, arrays[path], saved[path].get("key"))
    for path, leaf in leaves
  )


def _words(spec):
  if spec is None:
    return "nothing"
  if spec["shape"] is None:
    return spec["dtype"]
  return f"{spec['dtype']}{spec['shape']}"


def _as(leaf, array, key_impl):
  if isinstance(leaf, bool | int | float | complex):
    return type(leaf)(array.item())
  if isinstance(leaf, np.ndarray | np.generic):
    return array if isinstance(leaf, np.ndarray) else array[()]
  # A copy, since jax may otherwise use, and donate, the memory of numpy.
  value = jnp.array(array)
  if key_impl:
    value = jax.random.wrap_key_data(value, impl=key_impl)
  elif getattr(leaf, "weak_type", False):
    weak = jnp.asarray(array.dtype.type(0).item())
    value = jnp.broadcast_to(weak, array.shape).at[...].set(value)
  if getattr(leaf, "committed", True) and getattr(leaf, "sharding", None):
    value = jax.device_put(value, leaf.sharding)
  return value


# Directories


# Threads save one after another: orbax logs through one logger.
_ORBAX = threading.Lock()


@contextlib.contextmanager
def _checkpointer():
  # Synchronous: a save that fails is known at once, and nothing is pending
  # when the process ends. Silent: what orbax logs as an error it also raises.
  logger = logging.getLogger("absl")
  with _ORBAX:
    before, logger.disabled = logger.disabled, True
    try:
      # What is saved here is the caller's own, so where jax has connected
      # several processes orbax shall not wait for the others.
      alone = {
        "multiprocessing_options": ocp.options.MultiprocessingOptions(
          primary_host=jax.process_index(),
          active_processes={jax.process_index()},
          barrier_sync_key_prefix=f"process_{jax.process_index()}",
        )
      }
      handler = ocp.StandardCheckpointHandler(**alone)
      with ocp.Checkpointer(handler, **alone) as checkpointer:
        yield checkpointer
    finally:
      logger.disabled = before


def _write_arrays(path, arrays):
  # orbax refuses arrays without elements; the record alone can rebuild them.
  filled = {name: array for name, array in arrays.items() if array.size}
  with _checkpointer() as checkpointer:
    checkpointer.save(path, args=ocp.args.StandardSave(filled))


def _write_record(path, record):
  files = sorted(file for file in path.glob("state/**/*") if file.is_file())
  names = {file.relative_to(path).as_posix(): _sha256(file) for file in files}
  record = {**record, "files": names}
  record["record"] = _sha256(strict_json.dumps(record))
  rundir.write_whole(path / "record.json", strict_json.dumps(record))


def _read(path):
  """(record, {path: array}) of a whole checkpoint, or _Damaged and why."""
  try:
    record = strict_json.loads((path / "record.json").read_text("utf-8"))
    if record.pop("record") != _sha256(strict_json.dumps(record)):
      raise ValueError("record.json does not match its checksum")
    if record["step"] != int(path.name):
      raise ValueError(f"it was saved as step {record['step']}")
    # Before orbax sees them: on damaged files it fails loudly, or not at all.
    for name, checksum in record["files"].items():
      if _sha256(path / name) != checksum:
        raise ValueError(f"{name} does not match its checksum")
    with _checkpointer() as checkpointer:
      arrays = checkpointer.restore(path / "state")
    for spec in record["leaves"]:
      if spec["shape"] is not None and 0 in spec["shape"]:
        arrays[spec["path"]] = np.empty(spec["shape"], spec["dtype"])
    if record["state"] != _digest(record["leaves"], arrays):
      raise ValueError("the arrays do not match their checksum")
  except Exception as error:  # damage has every face that Python can make
    raise _Damaged(_brief(error)) from error
  return record, arrays


def _sha256(source):
  if isinstance(source, str):
    return hashlib.sha256(source.encode()).hexdigest()
  with open(source, "rb") as file:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _is_whole(path, state):
  """Whether `path` holds this state; ValueError where it holds another."""
  try:
    saved = _read(path)[0]["state"]
  except _Damaged:
    return False
  if saved != state:
    raise ValueError(
      f"{path} holds another state already (sha256 {saved[:12]}, to save is "
      f"{state[:12]}); nothing was overwritten"
    )
  return True


def _aside(root, step):
  for suffix in itertools.chain([""], (f".{i}" for i in itertools.count(1))):
    aside = root / f"damaged-{step}{suffix}"
    if not aside.exists():
      return (root / str(step)).rename(aside)


def _numbered(root):
  if not root.exists():
    return []
  names = [path.name for path in root.iterdir() if path.is_dir()]
  return sorted(int(n) for n in names if n.isdecimal() and str(int(n)) == n)


def _leftovers(root):
  """What a save or a deletion that was killed left behind."""
  return sorted([*root.glob("tmp-*"), *root.glob("gone-*")])


def _retain(root, kept):
  for step in steps(root):
    if step not in kept:
      gone = root / f"gone-{step}"
      shutil.rmtree(gone, ignore_errors=True)
      (root / str(step)).rename(gone)
  for path in _leftovers(root):
    shutil.rmtree(path, ignore_errors=True)


def _brief(error):
  lines = str(error).strip().splitlines() or [""]
  return f"{type(error).__name__}: {lines[0][:200]}"
