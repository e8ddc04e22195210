"""Tasks of name reversal that are small enough to be run inside a test."""

import itertools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from rnnlab import optim, tasks, update

LECTURE = {
  "embed": 5,
  "hidden": 6,
  "attention": {"score": "dot", "query": "current", "project": True},
  "cell": {"name": "gru"},
}
BAHDANAU = LECTURE | {
  "direction": "both",
  "attention": {"score": "additive", "width": 4, "query": "previous"},
  "context": {"update": True},
}
FEEDING = LECTURE | {
  "attention": {"score": "bilinear"},
  "context": {"feed": True},
  "cell": {"name": "rnn"},
}
FIXED = LECTURE | {"attention": {}, "layers": 2, "cell": {"name": "lstm"}}
WIRINGS = {
  "lecture": LECTURE,
  "bahdanau": BAHDANAU,
  "feeding": FEEDING,
  "fixed": FIXED,
}


# Programs that run for milliseconds are worth no long compilation.
QUICK = {
  "xla_backend_optimization_level": 0,
  "xla_llvm_disable_expensive_passes": True,
}


def jit(function):
  return jax.jit(function, compiler_options=QUICK)


def words(n=24, letters="abcde", longest=6):
  """n different names of 1 to `longest` letters, in an arbitrary order."""
  rng, found = np.random.default_rng(0), {}
  while len(found) < n:
    name = rng.choice(list(letters), rng.integers(1, longest + 1))
    found["".join(name)] = None
  return list(found)


def make(folder, lines, model=LECTURE, **settings):
  """The task on a file of these lines."""
  path = pathlib.Path(folder) / "lines.txt"
  path.write_text("\n".join(lines), encoding="utf-8")
  settings = {"split": "shuffle", "batch_size": 8} | settings
  return tasks.make("name_reversal", model=model, path=str(path), **settings)


def draw(task, seed=0, scale=0.5):
  """Parameters with nothing left at zero."""
  leaves, tree = jax.tree.flatten(task.init(jax.random.key(seed)))
  rng = np.random.default_rng(seed)
  return tree.unflatten(
    leaf + jnp.asarray(scale * rng.normal(size=leaf.shape), leaf.dtype)
    for leaf in leaves
  )


def train(task, steps, lr=0.02):
  """Parameters after so many updates."""
  optimizer = optim.make(name="adam", lr=lr, clip=1.0, steps=steps)
  state = update.init_state(task, optimizer, jax.random.key(0))
  feed = list(itertools.islice(task.train_batches(0), steps))
  batches_K = jax.tree.map(lambda *rows: np.stack(rows), *feed)
  run = jit(update.make_train_steps(task, optimizer))
  state, _ = run(
    *(state, batches_K, np.int32(steps), np.float32(0)), optimizer.numbers
  )
  return state.params


def totals(task, params, split="train", size=None, extra=0):
  """The report of a split: {name: Mean}."""
  batches = task.eval_batches(split, size, extra)
  return update.evaluate(jit(task.report), params, (), batches)


def whole(task, split="train", extra=0):
  """A split as one batch."""
  (batch,) = task.eval_batches(split, len(task.texts[split]), extra)
  return batch


def read(task, batch, side="target"):
  """The real tokens of a batch as texts, the stop left out."""
  ids_BT = batch["targets_BU" if side == "target" else "source_BS"]
  real_BT = batch[f"{side}_real_B{'U' if side == 'target' else 'S'}"]
  cut = 1 if side == "target" else 0
  rows = zip(ids_BT, real_BT.sum(1) - cut, strict=True)
  return [task.vocab.decode(ids_T[:n]) for ids_T, n in rows]
