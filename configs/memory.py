"""Tasks that need a long memory: where the start of the gates decides.

configs/memory.py          copying: recall symbols after a lag
configs/memory.py:adding   adding: the sum of two marked numbers, a regression

Both have a sweep of gate initialisations, `:copying` and `:adding`.
"""

import itertools

from ml_collections import config_dict

LAG = 100


def get_config(arg=None):
  """The settings; None leaves a setting to the code's own default."""
  variants = {None: _copying, "copying": _copying, "adding": _adding}
  if (arg or None) not in variants:
    raise ValueError(
      f"configs/memory.py has no variant {arg!r}, only copying, adding"
    )
  task, cell = variants[arg or None]()
  unset = config_dict.placeholder
  return config_dict.create(
    seed=0,  # initialisation
    task=dict(
      **task,
      batch_size=32,
      eval_batch_size=256,
      validation=512,  # so many examples; those of training have no end
      test=512,
      seed=0,  # of all examples
    ),
    model=dict(
      hidden=64,
      embed=unset(int),  # None: a symbol is a one-hot vector
      layers=1,
      chunk=unset(object),  # a checkpointed scan: steps, or "auto:512MiB"
      cell=dict(
        name=cell,  # a file of rnnlab/cells
        recurrent=unset(str),
        scale=unset(float),  # a factor on the recurrent draw
        input=unset(str),
        bias=unset(bool),
        initial=unset(str),
        dtype=unset(str),
        activation=unset(str),  # rnn
        reset=unset(str),  # gru
        keep=dict(  # how the gates start
          kind="uniform",  # some units for every time scale
          value=unset(float),
          steps=unset(float),
          t_max=unset(float),
        ),
      ),
    ),
    opt=dict(
      name="adam",
      lr=3e-3,
      schedule="constant",
      warmup=0,
      unit="update",
      end=unset(float),
      clip=1.0,
      weight_decay=unset(float),
      momentum=unset(float),
      b1=unset(float),
      b2=unset(float),
      eps=unset(float),
      average=unset(float),  # the decay of an average of the parameters
    ),
    train=dict(
      steps=1500,
      seconds=unset(float),
      steps_per_call=20,
      log_every=20,
      eval_every=100,
      save_every=500,
      keep=1,
      patience=unset(int),
      max_skips=10,
      accumulate=1,  # batches in one update
      evaluate=unset(str),  # "raw" or "average"; None: that, if it is kept
      monitor=unset(int),  # steps between looks at the recurrences
      data_parallel=1,  # devices that share each batch; 0: all there are
    ),
  )


def sweep(add, arg):
  """Lists the points of `scripts/sweep.py`, with three seeds a setting.

  How the gates of three cells start: by keep logits of 0 and of 1, and matched
  to the lag in two ways. Since they have to match, the lag is set too.
  """
  lags = {"copying": "task.lag", "adding": "task.length"}
  if arg not in lags:
    raise ValueError(
      f"configs/memory.py has no sweep {arg!r}, only {', '.join(lags)}"
    )
  cells = ("lstm", None), ("gru", "before"), ("gru", "after")
  starts = ("constant", "value", 0.0), ("constant", "value", 1.0)
  starts += ("half_life", "steps", float(LAG)), ("chrono", "t_max", float(LAG))
  for (name, reset), (kind, field, value) in itertools.product(cells, starts):
    cell = {"model.cell.name": name}
    cell |= {"model.cell.reset": reset} if reset else {}
    keep = {"model.cell.keep.kind": kind, f"model.cell.keep.{field}": value}
    # Not task.seed, so that all runs see the same examples.
    for seed in range(3):
      add({lags[arg]: LAG} | cell | keep | {"seed": seed})


def _copying():
  return dict(
    name="copying",
    items=1,  # symbols to recall
    lag=LAG,  # blanks in between
    symbols=8,
    loss="recall",  # or "all" steps, blanks included
  ), "lstm"


def _adding():
  return dict(name="adding", length=LAG), "gru"
