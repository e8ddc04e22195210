"""Several devices and processes: JAX's own mesh, sharding and collectives.

All state is whole on every device and the rows of a batch are spread over
them, along the one axis of a mesh. From that XLA derives what has to be summed
across devices: counts, losses and gradients, once an update, and nothing inside
the loops over time. So the numbers are those of one device, up to the order in
which sums are rounded.

Where there are several processes, all run the same program and must take the
same turns: what decides a turn (a clock, a signal, a file) goes through
`largest`, `same` or `together`. Without other processes these do nothing.
"""

import contextlib
import hashlib
import os
import signal
import socket
import sys

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "data"
# What a launcher sets for each process; jax itself reads the first alone.
JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
SLURM = (
  "SLURM_JOB_ID",
  "SLURM_STEP_NODELIST",
  "SLURM_NTASKS",
  "SLURM_PROCID",
  "SLURM_LOCALID",
)
# Once a process has ended alone, jax ends the others after so many seconds.
PATIENCE = 30
LONGEST = 1000  # bytes of a message from one process to the others


def launched() -> dict | None:
  """What the environment says of other processes; None where it names none.

  The arguments of jax.distributed.initialize: those of the JAX_ variables, or
  {} where jax finds all it needs in what Slurm's srun has set. ValueError for a
  variable that is missing or no number.
  """
  given = [os.environ.get(name) for name in JAX]
  if given == [None] * len(JAX):
    step = all(name in os.environ for name in SLURM)
    return {} if step and os.environ["SLURM_NTASKS"] != "1" else None
  for name, value in zip(JAX, given, strict=True):
    if not value:
      raise ValueError(f"{name} is not set, but {' or '.join(JAX)} is")
    if name != JAX[0] and not value.isdecimal():
      raise ValueError(f"{name} must be a number of processes, not {value!r}")
  address, count, index = given[0], int(given[1]), int(given[2])
  if not index < count:
    raise ValueError(f"{JAX[2]} must be below {JAX[1]}={count}, not {index}")
  if not address.rpartition(":")[2].isdecimal():
    raise ValueError(f"{JAX[0]} must be host:port, not {address!r}")
  if count == 1:
    return None
  return {
    "coordinator_address": address,
    "num_processes": count,
    "process_id": index,
  }


def connect() -> None:
  """Joins the processes that `launched` finds; before any jax computation."""
  found = launched()
  if found is None:
    return
  where = found.get("coordinator_address", "the address that Slurm gives")
  if found.get("process_id") == 0:
    # jaxlib crashes on a port that is taken, so we ask before it does.
    with socket.socket() as probe:
      probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
      try:
        probe.bind(("", int(where.rpartition(":")[2])))
      except (OSError, OverflowError) as error:
        raise ValueError(f"{JAX[0]}={where} cannot be used: {error}") from error
  # Said first: where the others do not come in time, jax ends this process.
  print(f"meeting the other processes at {where}", file=sys.stderr, flush=True)
  try:
    jax.distributed.initialize(**found, shutdown_timeout_seconds=PATIENCE)
  except RuntimeError as error:
    raise ValueError(f"cannot meet at {where}: {error}") from error
  # jax has begun to catch SIGTERM; until somebody handles it, it shall end us.
  signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def connected() -> bool:
  """Whether there are other processes; for asking, starts no backend."""
  return jax.distributed.is_initialized()


def first() -> bool:
  """Whether this is the process that writes and prints, number 0."""
  return not connected() or jax.process_index() == 0


def mesh(devices: int) -> Mesh:
  """A mesh over that many devices; 0: over all there are.

  Several processes have an equal share of it, one after the other, so the rows
  of a batch that a process holds lie together. ValueError where there are
  fewer devices, or they cannot be shared out.
  """
  processes = jax.process_count()
  groups = [
    [d for d in jax.devices() if d.process_index == p] for p in range(processes)
  ]
  most = processes * min(map(len, groups))
  count = devices or most
  if count > most:
    raise ValueError(f"data_parallel={devices}, but there are {most} devices")
  if count % processes:
    raise ValueError(
      f"data_parallel={devices} cannot be shared by {processes} processes: it "
      f"takes a multiple of {processes} up to {most}, or 0 for all"
    )
  chosen = [group[: count // processes] for group in groups]
  return Mesh(np.concatenate(chosen), (AXIS,))


def whole(mesh: Mesh) -> NamedSharding:
  """How what every device holds in full is placed."""
  return NamedSharding(mesh, PartitionSpec())


def replicate(mesh: Mesh, tree):
  """A tree of arrays of this process, in full on every device."""
  return jax.jit(lambda tree: tree, out_shardings=whole(mesh))(tree)


def split(mesh: Mesh, batch, axis: int = 0):
  """The numpy arrays of a batch with their rows spread over the mesh.

  Where the rows (`axis`) do not divide, some are added that are zeros
  throughout: their masks are False, so they are padding and change no sum. A
  process puts its own rows on its devices, and no others. What has no rows, a
  number, is whole on every device.
  """

  def filled(array):
    array = np.asarray(array)
    if array.ndim > axis and (missing := -array.shape[axis] % mesh.size):
      widths = [(0, missing * (a == axis)) for a in range(array.ndim)]
      array = np.pad(array, widths)
    return array

  def placed(array):
    spec = [*[None] * axis, AXIS] if array.ndim > axis else []
    return NamedSharding(mesh, PartitionSpec(*spec))

  def put(array, sharding):
    rows = array
    if array.ndim > axis:
      rows = np.split(array, jax.process_count(), axis)[jax.process_index()]
    return jax.make_array_from_process_local_data(sharding, rows, array.shape)

  batch = jax.tree.map(filled, batch)
  shardings = jax.tree.map(placed, batch)
  if not connected():
    return jax.device_put(batch, shardings)  # the same, in one transfer
  return jax.tree.map(put, batch, shardings)


def local(tree):
  """A tree that is whole on every device, as arrays of one device here."""
  return jax.tree.map(lambda array: array.addressable_data(0), tree)


def facts(mesh: Mesh) -> dict:
  """What the arithmetic runs on, for the record."""
  return {
    "backend": jax.default_backend(),
    "kind": mesh.devices.flat[0].device_kind,
    "devices": mesh.size,
    "processes": jax.process_count(),
    # "default" is the backend's: float32 on a CPU, less on some accelerators.
    "matmul_precision": jax.config.jax_default_matmul_precision or "default",
  }


# Agreement between processes


def largest(*numbers: float) -> tuple[float, ...]:
  """Each number as it is largest over all processes, in float32."""
  if not connected():
    return numbers
  gathered = multihost_utils.process_allgather(np.float32(numbers))
  return tuple(gathered.max(0).tolist())


def same(texts: dict[str, str]) -> None:
  """Raises ValueError in all processes, naming the texts that differ in some.

  The names have to be the same in all.
  """
  if not connected():
    return
  digests = [hashlib.sha256(text.encode()).digest() for text in texts.values()]
  digests = np.stack([np.frombuffer(d, np.uint8) for d in digests])
  gathered = multihost_utils.process_allgather(digests)
  for process, differs in enumerate((gathered != gathered[0]).any(2)):
    if differs.any():
      names = [name for name, d in zip(texts, differs, strict=True) if d]
      raise ValueError(
        f"process {process} differs from process 0 in: {', '.join(names)}"
      )


@contextlib.contextmanager
def together():
  """What a user can get wrong inside, in one process, is raised in all.

  For what one process does alone or may fail at alone, such as files: the
  others would wait for it in their next exchange, and not know why.
  """
  failed = None
  try:
    yield
  except (ValueError, OSError) as error:
    failed = error
  if connected():
    text = str(failed or "").encode()[:LONGEST].ljust(LONGEST, b"\0")
    texts = multihost_utils.process_allgather(np.frombuffer(text, np.uint8))
    for process, text in enumerate(texts):
      told = bytes(text).rstrip(b"\0").decode(errors="replace")
      if told and not failed:
        failed = ValueError(f"process {process}: {told}")
  if failed:
    raise failed
