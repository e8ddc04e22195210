"""Whole or not there, checked when read, never lost to a newer one."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct

from rnnlab import checkpoint


@struct.dataclass
class State:
  step: int
  params: dict
  opt_state: tuple
  carry: tuple
  key: jax.Array
  average: dict | None


class Pair(NamedTuple):
  c: jax.Array
  h: jax.Array


TX = optax.chain(
  optax.clip_by_global_norm(1.0),
  optax.adam(optax.linear_schedule(0.0, 1.0, 4)),
)


def make_state(seed=0, hidden=8):
  key = jax.random.key(seed)
  params = {
    "w_GD": jax.random.normal(key, (hidden, 3)),
    "b_G": jnp.zeros(hidden, jnp.bfloat16),
    "none_0": jnp.zeros((0, 3)),
    "naïve/ö": {"x.y": jnp.asarray(True)},
  }
  return State(
    step=seed,
    params=params,
    opt_state=TX.init(params),
    carry=(
      Pair(jnp.ones((2, 2)), jnp.full((2, 3), 2)),  # the second weakly typed
      jnp.asarray(0.5),
      np.arange(3.0),
      {},
      (),
    ),
    key=jax.random.split(key, 2),
    average=None,
  )


def kinds(tree):
  return jax.tree.map(
    lambda leaf: (
      type(leaf),
      str(getattr(leaf, "dtype", "")),
      np.shape(leaf),
      getattr(leaf, "weak_type", None),
    ),
    tree,
  )


def largest_file(directory, step):
  files = [p for p in (directory / str(step)).rglob("*") if p.is_file()]
  return max(files, key=lambda path: path.stat().st_size)


def test_restores_every_kind_of_leaf_as_it_was(tmp_path):
  state = make_state(5)
  facts = {"best": float("inf"), "at": (1, 2), "seconds": 1.0}
  checkpoint.save(tmp_path, 5, state, facts, keep=1)
  other = make_state(6)
  restored = checkpoint.restore(tmp_path, other)
  assert restored.step == 5 and restored.skipped == []
  assert restored.facts == facts
  assert type(restored.facts["at"]) is tuple
  assert kinds(restored.state) == kinds(state)
  assert jax.tree.structure(restored.state) == jax.tree.structure(state)
  assert checkpoint.fingerprint(restored.state) == checkpoint.fingerprint(state)
  assert checkpoint.fingerprint(other) != checkpoint.fingerprint(state)
  np.testing.assert_array_equal(
    jax.random.normal(restored.state.key[1], (3,)),
    jax.random.normal(state.key[1], (3,)),
  )


OTHER = {"threefry2x32": "rbg", "rbg": "threefry2x32"}


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_an_abstract_state_is_enough_to_restore(tmp_path, impl):
  def make():
    params = {"w": jnp.ones((2, 3))}
    return {
      "params": params,
      "opt": TX.init(params),
      "key": jax.random.key(3, impl=impl),
      "weak": jnp.full((3,), 2.0),
      "none": None,
    }

  state = make()
  checkpoint.save(tmp_path, 0, state, {}, keep=1)
  restored = checkpoint.restore(tmp_path, jax.eval_shape(make)).state
  assert kinds(restored) == kinds(state)
  with pytest.raises(ValueError, match=r"\['key'\]: saved key<"):
    checkpoint.restore(
      tmp_path, {**state, "key": jax.random.key(0, impl=OTHER[impl])}
    )


def test_a_restored_state_compiles_nothing_new(tmp_path):
  @jax.jit
  def step(state):
    grads = jax.tree.map(jnp.ones_like, state["params"])
    updates, opt = TX.update(grads, state["opt"])
    return {
      "params": optax.apply_updates(state["params"], updates),
      "opt": opt,
      "key": jax.random.split(state["key"])[0],
      "count": state["count"] + 1,
    }

  params = {"w": jnp.ones(3)}
  state = {
    "params": params,
    "opt": TX.init(params),
    "key": jax.random.key(0),
    "count": jnp.asarray(0),
  }
  state = step(step(state))
  compiled = step._cache_size()
  checkpoint.save(tmp_path, 2, state, {}, keep=1)
  resumed = step(checkpoint.restore(tmp_path, state).state)
  assert step._cache_size() == compiled
  assert checkpoint.fingerprint(resumed) == checkpoint.fingerprint(step(state))


def test_buffers_donated_after_a_save_keep_their_saved_values(tmp_path):
  step = jax.jit(lambda x: x + 1, donate_argnums=0)
  state = jnp.zeros(1000)
  for i in range(4):
    checkpoint.save(tmp_path, i, {"x": state}, {}, keep=9)
    state = step(state)
  for i in range(4):
    saved = checkpoint.restore(tmp_path, {"x": state}, step=i).state["x"]
    np.testing.assert_array_equal(saved, np.full(1000, i, np.float32))
    step(saved)  # may be donated in turn


def test_sharded_states_come_back_sharded(tmp_path):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
  spec = jax.sharding.PartitionSpec("data")
  place = jax.sharding.NamedSharding(mesh, spec)
  state = {"x": jax.device_put(jnp.arange(4), place)}
  checkpoint.save(tmp_path, 1, state, {}, keep=1)
  restored = checkpoint.restore(tmp_path, state).state
  assert restored["x"].sharding == place


@pytest.mark.parametrize(
  ("keep", "left"), [(1, [1, 5]), (2, [1, 4, 5]), (9, [1, 2, 3, 4, 5])]
)
def test_retention_keeps_the_best_and_the_latest(tmp_path, keep, left):
  for step in range(1, 6):
    state = {"x": jnp.full(3, step)}
    checkpoint.save(tmp_path, step, state, {}, keep=keep, protect=(1,))
  assert checkpoint.steps(tmp_path) == left
  assert sorted(os.listdir(tmp_path)) == [str(step) for step in left]
  for step in (1, 5):
    restored = checkpoint.restore(tmp_path, state, step=step)
    np.testing.assert_array_equal(restored.state["x"], np.full(3, step))
  assert checkpoint.restore(tmp_path, state).step == 5


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_is_refused(tmp_path, keep):
  with pytest.raises(ValueError, match=f"keep={keep}"):
    checkpoint.save(tmp_path, 1, {"x": jnp.ones(2)}, {}, keep=keep)


def test_none_there_is_none(tmp_path):
  like = {"x": jnp.ones(2)}
  assert checkpoint.restore(tmp_path / "absent", like) is None
  assert checkpoint.steps(tmp_path / "absent") == []
  (tmp_path / "tmp-3").mkdir()
  assert checkpoint.restore(tmp_path, like) is None


def damage_empty(path):
  for file in sorted(path.rglob("*"), reverse=True):
    file.rmdir() if file.is_dir() else file.unlink()


def damage_without_record(path):
  (path / "record.json").unlink()


def damage_zero_bytes(path):
  os.truncate(largest_file(path.parent, path.name), 0)


def damage_truncated(path):
  file = largest_file(path.parent, path.name)
  os.truncate(file, file.stat().st_size // 2)


def damage_record_truncated(path):
  os.truncate(path / "record.json", 50)


def damage_record_changed(path):
  record = path / "record.json"
  record.write_text(record.read_text().replace('"seconds": 3', '"seconds": 8'))


def damage_other_step(path):
  (path.parent / "1").rename(path.parent / "aside")
  damage_empty(path)
  path.rmdir()
  (path.parent / "aside").rename(path)


DAMAGES = [v for k, v in sorted(globals().items()) if k.startswith("damage_")]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_by_name(tmp_path, damage):
  state = make_state()
  for step in (1, 2, 3):
    checkpoint.save(tmp_path, step, state, {"seconds": step}, keep=9)
  damage(tmp_path / "3")
  (tmp_path / "tmp-4").mkdir()
  restored = checkpoint.restore(tmp_path, state)
  assert restored.step == 2
  assert [note.split(":")[0] for note in restored.skipped] == ["tmp-4", "3"]
  with pytest.raises(ValueError, match="3: "):
    checkpoint.restore(tmp_path, state, step=3)
  # The run comes to the damaged step again: it is kept aside, not deleted.
  checkpoint.save(tmp_path, 3, state, {"seconds": 3}, keep=9)
  assert checkpoint.restore(tmp_path, state).step == 3
  assert (tmp_path / "damaged-3").is_dir()


def test_all_damaged_is_refused_and_nothing_changed(tmp_path):
  state = {"x": jnp.arange(4)}
  for step in (1, 2):
    checkpoint.save(tmp_path, step, state, {}, keep=9)
    damage_record_truncated(tmp_path / str(step))
  with pytest.raises(ValueError, match=r"whole.* 2: .*; 1: "):
    checkpoint.restore(tmp_path, state)
  assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_a_flipped_bit_is_noticed_wherever_it_is(tmp_path):
  state = {"w": jax.random.normal(jax.random.key(0), (500,))}
  expected = checkpoint.fingerprint(state)
  for step in (1, 2):
    checkpoint.save(tmp_path, step, state, {"best": 1}, keep=9)
  large = largest_file(tmp_path, 2)
  files = [
    p for p in (tmp_path / "2").rglob("*") if p.stat().st_size and p.is_file()
  ]
  for i, path in enumerate([large] * 40 + files):
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) * (i % 40) // 40] ^= 1 << (i % 8)
    path.write_bytes(damaged)
    restored = checkpoint.restore(tmp_path, state)
    path.write_bytes(whole)
    assert checkpoint.fingerprint(restored.state) == expected
    assert restored.step == 1 and restored.facts == {"best": 1}
    assert path == tmp_path / "2" / "record.json" or (
      f"{path.name} does not match its checksum" in restored.skipped[0]
    )
  assert checkpoint.restore(tmp_path, state).step == 2


def test_what_orbax_reads_is_held_to_what_was_saved(tmp_path, monkeypatch):
  state = {"w": jnp.arange(3)}
  checkpoint.save(tmp_path, 1, state, {}, keep=1)
  monkeypatch.setattr(
    checkpoint.ocp.Checkpointer,
    "restore",
    lambda self, path: {"['w']": np.arange(3, dtype=np.int32)[::-1]},
  )
  with pytest.raises(ValueError, match="arrays do not match their checksum"):
    checkpoint.restore(tmp_path, state)


def test_what_comes_after_is_set_aside_and_kept(tmp_path):
  state = {"x": jnp.ones(2)}
  checkpoint.save(tmp_path, 1, state, {}, keep=9)
  for suffix in ("", ".1"):
    for step in (2, 3):
      checkpoint.save(tmp_path, step, state, {}, keep=9)
    assert checkpoint.set_aside(tmp_path, 1) == [
      tmp_path / f"damaged-{step}{suffix}" for step in (2, 3)
    ]
    assert checkpoint.steps(tmp_path) == [1]
  assert len(os.listdir(tmp_path)) == 5


def test_saving_a_step_again(tmp_path):
  state = {"x": jnp.ones(2)}
  checkpoint.save(tmp_path, 1, state, {"best": 1}, keep=1)
  checkpoint.save(tmp_path, 1, state, {"best": 2}, keep=1)
  assert checkpoint.restore(tmp_path, state).facts == {"best": 2}
  with pytest.raises(ValueError, match="1 holds another state already"):
    checkpoint.save(tmp_path, 1, {"x": jnp.zeros(2)}, {}, keep=1)
  np.testing.assert_array_equal(
    checkpoint.restore(tmp_path, state).state["x"], np.ones(2)
  )


@pytest.mark.parametrize(
  ("like", "message"),
  [
    (
      {"a": jnp.ones((16, 3)), "b": ()},
      r"\['a'\]: saved float32\[8, 3\], wanted float32\[16, 3\]",
    ),
    (
      {"a": jnp.ones((8, 3), jnp.bfloat16), "b": ()},
      r"\['a'\]: saved float32\[8, 3\], wanted bfloat16\[8, 3\]",
    ),
    (
      {"a": jnp.ones((8, 3)), "b": (), "c": jnp.ones(2)},
      r"\['c'\]: saved nothing, wanted float32\[2\]",
    ),
    ({"b": ()}, r"\['a'\]: saved float32\[8, 3\], wanted nothing"),
    (
      {"a": jnp.ones((8, 3)), "b": None},
      r"\['b'\]: saved tuple, wanted NoneType",
    ),
    (
      Pair(jnp.ones((8, 3)), ()),
      r"\.c: saved nothing.*\['a'\]: saved float32",
    ),
  ],
)
def test_another_structure_is_refused_with_both(tmp_path, like, message):
  checkpoint.save(tmp_path, 1, {"a": jnp.ones((8, 3)), "b": ()}, {}, keep=1)
  with pytest.raises(ValueError, match=message):
    checkpoint.restore(tmp_path, like)


def test_a_step_that_is_not_there_is_named(tmp_path):
  state = {"x": jnp.ones(2)}
  checkpoint.save(tmp_path, 4, state, {}, keep=1)
  with pytest.raises(ValueError, match=r"no checkpoint 3, only \[4\]"):
    checkpoint.restore(tmp_path, state, step=3)


def test_what_an_array_cannot_hold_is_refused(tmp_path):
  for leaf in ("text", 0.1):
    with pytest.raises(ValueError, match=r"\['x'\]"):
      checkpoint.save(tmp_path, 1, {"x": leaf}, {}, keep=1)
  assert os.listdir(tmp_path) == []


def test_relative_spaced_accented_and_moved(tmp_path, monkeypatch):
  state = {"x": jnp.arange(3)}
  monkeypatch.chdir(tmp_path)
  checkpoint.save("./a run/zoë/", 1, state, {}, keep=1)
  assert checkpoint.steps("a run/zoë") == [1]
  (tmp_path / "a run").rename(tmp_path / "moved")
  monkeypatch.chdir(tmp_path / "moved")
  assert checkpoint.restore("zoë", state).step == 1
  checkpoint.save("zoë", 2, state, {}, keep=2)
  assert checkpoint.steps(tmp_path / "moved" / "zoë") == [1, 2]


def test_a_place_that_cannot_be_written(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(OSError, match="checkpoint 1 could not be saved in"):
    checkpoint.save(tmp_path / "file", 1, {"x": jnp.ones(2)}, {}, keep=1)


def test_a_save_cut_short_by_the_disk_is_an_error(tmp_path, caplog):
  state = {"x": jax.random.normal(jax.random.key(0), (100_000,))}
  checkpoint.save(tmp_path, 1, state, {}, keep=1)
  limit = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))
  try:
    with pytest.raises(OSError) as error:
      checkpoint.save(tmp_path, 2, state, {}, keep=1)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
  message = str(error.value)
  assert "checkpoint 2 could not be saved" in message and "\n" not in message
  assert caplog.records == []  # said once, not by orbax too
  assert os.listdir(tmp_path) == ["1"]
  assert checkpoint.restore(tmp_path, state).step == 1


def halve(path):
  """What a deletion that is ended leaves."""
  for file in Path(path).glob("state/*"):
    if file.is_file():
      file.unlink()


class Killed(BaseException):
  """Stands for the end of the process: no handler of errors sees it."""


def test_ended_at_any_rename_or_deletion(tmp_path, monkeypatch):
  # Ends the save at its nth rename or deletion, for every n there is.
  rmtree = shutil.rmtree
  state = {"x": jnp.arange(3)}
  for n in range(20):
    root = tmp_path / str(n)
    checkpoint.save(root, 1, state, {}, keep=1)
    checkpoint.save(root, 2, state, {}, keep=1)
    (root / "gone-2").mkdir()  # an earlier deletion that was ended
    (root / "gone-2" / "left").touch()
    left = n

    def counted(call):
      def wrapped(*args, **kwargs):
        nonlocal left
        left -= 1
        if left < 0:
          if call is rmtree:
            halve(args[0])
          raise Killed
        return call(*args, **kwargs)

      return wrapped

    with monkeypatch.context() as patch:
      for module, name in [
        (checkpoint.Path, "rename"),
        (checkpoint.rundir.os, "replace"),
        (checkpoint.shutil, "rmtree"),
      ]:
        patch.setattr(module, name, counted(getattr(module, name)))
      try:
        checkpoint.save(root, 3, state, {}, keep=1)
      except Killed:
        pass
    whole = checkpoint.restore(root, state)
    assert whole.step in (2, 3)
    for step in checkpoint.steps(root):
      checkpoint.restore(root, state, step=step)
    checkpoint.save(root, 4, state, {}, keep=1)
    assert os.listdir(root) == ["4"]
    if left >= 0:
      break
  assert 3 < n < 19


WRITER = """
import sys
import numpy as np
from rnnlab import checkpoint
for step in range(1, 10_000):
  state = {"x": np.full(50_000, step, np.float32)}
  checkpoint.save(sys.argv[1], step, state, {"step": step}, keep=2)
  print(step, flush=True)
"""


@pytest.mark.parametrize("delay", [0.01, 0.13, 0.29])
def test_kill_9_leaves_a_whole_checkpoint(tmp_path, delay):
  writer = subprocess.Popen(
    [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE
  )
  with writer:
    for _ in range(3):
      told = int(writer.stdout.readline())
    time.sleep(delay)
    writer.send_signal(signal.SIGKILL)
    told = max([told, *map(int, writer.stdout.read().split())])
  restored = checkpoint.restore(tmp_path, {"x": np.zeros(50_000, np.float32)})
  assert restored.step >= told
  assert restored.facts == {"step": restored.step}
  assert (restored.state["x"] == restored.step).all()
  assert not [note for note in restored.skipped if note[0].isdecimal()]
