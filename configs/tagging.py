"""Label every character of Python source with the role of its token.

configs/tagging.py             each label from what stands before it (`:causal`)
configs/tagging.py:lookahead4  and from the four characters after it
configs/tagging.py:concat      every layer reads both ways
configs/tagging.py:alternating a layer reads forward, one on top backward

All four have the same number of updates and about as many parameters. The sweep
`:contexts` is all of them, with three seeds each.
"""

from ml_collections import config_dict

# Of one direction: hidden widths that make the parameters about equal.
WIRINGS = {
  "causal": dict(direction="forward", lookahead=0, hidden=96),
  "lookahead4": dict(direction="forward", lookahead=4, hidden=78),
  "concat": dict(direction="both", lookahead=0, hidden=58),
  "alternating": dict(direction="alternating", lookahead=0, hidden=96),
}


def get_config(arg=None):
  """The settings; None leaves a setting to the code's own default."""
  if (arg or "causal") not in [*WIRINGS, "contexts"]:
    raise ValueError(
      f"configs/tagging.py has no variant {arg!r}, only {', '.join(WIRINGS)}"
    )
  wiring = WIRINGS.get(arg or "causal", WIRINGS["causal"])
  unset = config_dict.placeholder
  return config_dict.create(
    seed=0,  # initialisation and dropout
    task=dict(
      name="tagging",
      path="",  # a file or folder; "": the library of the running Python
      steps=128,  # characters of a chunk
      margin=32,  # that it reads on either side besides
      batch_size=32,
      eval_batch_size=128,
      seed=0,  # the order of the batches
    ),
    model=dict(
      embed=32,
      layers=2,
      dropout=0.0,
      chunk=unset(object),  # a checkpointed scan: steps, or "auto:512MiB"
      cell=dict(
        name="lstm",  # a file of rnnlab/cells
        recurrent=unset(str),
        scale=unset(float),  # a factor on the recurrent draw
        input=unset(str),
        bias=unset(bool),
        initial=unset(str),
        dtype=unset(str),
        activation=unset(str),  # rnn
        reset=unset(str),  # gru
        keep=dict(  # how the gates start
          kind=unset(str),
          value=unset(float),
          steps=unset(float),
          t_max=unset(float),
        ),
      ),
      **wiring,
    ),
    opt=dict(
      name="adam",
      lr=8e-3,
      schedule="cosine",
      warmup=30,
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
      steps=300,
      epochs=unset(int),
      seconds=unset(float),
      steps_per_call=10,
      log_every=20,
      eval_every=300,
      save_every=300,
      keep=1,
      patience=unset(int),
      max_skips=10,
      data_parallel=1,  # devices that share each batch; 0: all there are
      accumulate=1,  # batches in one update
      evaluate=unset(str),  # "raw" or "average"; None: that, if it is kept
      monitor=unset(int),  # steps between looks at the recurrences
    ),
  )


def sweep(add, arg):
  """Lists the points of `scripts/sweep.py`, with three seeds a setting."""
  if arg != "contexts":
    raise ValueError(f"configs/tagging.py has no sweep {arg!r}, only contexts")
  for wiring in WIRINGS.values():
    # Not task.seed, so that all runs see the same characters in one order.
    for seed in range(3):
      add({f"model.{k}": v for k, v in wiring.items()} | {"seed": seed})
