"""Reverse a name through noise: an encoder-decoder with masked attention.

configs/name_reversal.py             the lecture's wiring
configs/name_reversal.py:notebook    the same, by a lecture's notebook's recipe
configs/name_reversal.py:bahdanau    attention from the previous state
configs/name_reversal.py:luong       input feeding
configs/name_reversal.py:fixed       no attention: one context for all steps

Two of them have a sweep of their own, under a name of its own: `:masks` is the
notebook's recipe, `:context` the model without attention.
"""

import itertools

from ml_collections import config_dict


def get_config(arg=None):
  """The settings; None leaves a setting to the code's own default."""
  unset = config_dict.placeholder
  config = config_dict.create(
    seed=0,  # initialisation and dropout
    task=dict(
      name="name_reversal",
      path="",  # names, a line each, or pairs with a tab; "": embedded names
      split="hash",  # or "shuffle", by split_seed
      split_seed=123,
      unique=False,  # True drops repeated lines before the split
      max_length=unset(int),  # drops longer texts, and counts them
      noise="fresh",  # new noise letters each epoch, or "fixed"
      batch_size=32,
      eval_batch_size=256,
      buckets=1,  # shapes that batches may have
      loss_mask=True,
      source_mask=True,
      length_handling=True,
      seed=0,  # the order of the batches, and the noise
    ),
    model=dict(
      embed=32,
      hidden=32,
      layers=1,
      direction="forward",  # of the encoder; or "backward", "both"
      decoder_hidden=unset(int),
      dropout=0.0,
      attention=dict(
        score="dot",
        width=unset(int),
        query="current",
        project=True,
      ),
      context=dict(init=True, update=False, output=True, feed=False),
      cell=dict(
        name="gru",  # a file of rnnlab/cells
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
    ),
    opt=dict(
      name="adam",
      lr=4e-3,
      schedule="cosine",
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
      steps=unset(int),
      epochs=20,
      seconds=unset(float),
      steps_per_call=16,
      log_every=96,
      eval_every=960,
      save_every=960,
      keep=1,
      patience=unset(int),
      max_skips=10,
      accumulate=1,  # batches in one update
      evaluate=unset(str),  # "raw" or "average"; None: that, if it is kept
      monitor=unset(int),  # steps between looks at the recurrences
      data_parallel=1,  # devices that share each batch; 0: all there are
    ),
  )
  variants = {
    None: lambda config: None,
    "notebook": _notebook,
    "bahdanau": _bahdanau,
    "luong": _luong,
    "fixed": _fixed,
    "masks": _notebook,
    "context": _fixed,
  }
  if (arg or None) not in variants:
    raise ValueError(
      f"configs/name_reversal.py has no variant {arg!r}, only "
      f"{', '.join(filter(None, variants))}"
    )
  variants[arg or None](config)
  return config


def sweep(add, arg):
  """Lists the points of `scripts/sweep.py`, with three seeds a setting.

  masks: every mask on and off. context: one way alone for the encoder's last
  state to reach the decoder, and all three together.
  """
  if arg == "masks":
    names = "task.loss_mask", "task.source_mask", "task.length_handling"
    settings = itertools.product((True, False), repeat=3)
  elif arg == "context":
    names = "model.context.init", "model.context.update", "model.context.output"
    ways = range(3)
    settings = [[way == only for way in ways] for only in ways] + [[True] * 3]
  else:
    raise ValueError(
      f"configs/name_reversal.py has no sweep {arg!r}, only masks, context"
    )
  for values in settings:
    # Not task.seed, so that all runs are validated under the same noise.
    for seed in range(3):
      add(dict(zip(names, values, strict=True)) | {"seed": seed})


def _notebook(config):
  config.task.update(batch_size=8, noise="fixed")
  config.model.cell.update(recurrent="uniform", input="uniform")
  config.opt.update(lr=1e-3, unit="epoch", clip=None)
  config.train.update(epochs=10)


def _bahdanau(config):
  config.model.direction = "both"
  config.model.attention.update(
    score="additive", width=32, query="previous", project=False
  )
  config.model.context.update = True


def _luong(config):
  config.model.attention.update(score="bilinear", project=False)
  config.model.context.feed = True


def _fixed(config):
  config.model.attention.update(score=None, query=None, project=None)
