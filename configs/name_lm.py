"""A character language model over a list of names.

configs/name_lm.py            an LSTM
configs/name_lm.py:notebook   a tanh RNN, the recipe of a lecture's notebook
"""

from ml_collections import config_dict


def get_config(arg=None):
  """The settings; None leaves a setting to the code's own default."""
  unset = config_dict.placeholder
  config = config_dict.create(
    seed=0,  # initialisation and dropout
    task=dict(
      name="name_lm",
      path="",  # a file with a name a line; "" is the embedded list
      split="hash",  # or "shuffle", by split_seed
      split_seed=123,
      unique=False,  # True drops repeated names before the split
      max_length=unset(int),  # drops longer ones, and counts them
      batch_size=64,
      eval_batch_size=256,
      seed=0,  # the order of the batches
    ),
    model=dict(
      embed=64,
      hidden=256,
      layers=1,
      tied=False,
      norm=False,  # layers' outputs: mean 0 and variance 1
      residual=False,  # a layer's output is added to what it read
      dropout=0.3,  # of every layer's output
      locked=False,  # one draw for all steps
      out_dropout=unset(float),  # of the top layer's, in its place
      embed_dropout=0.0,  # of symbols
      state_dropout=0.0,  # of what is read of the state, one draw a row
      weight_dropout=0.0,  # of recurrent weights
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
    ),
    opt=dict(
      name="adam",
      lr=4e-3,
      schedule="cosine",
      warmup=200,
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
      epochs=10,
      seconds=unset(float),
      steps_per_call=16,
      log_every=96,
      eval_every=480,
      save_every=480,
      keep=1,
      patience=unset(int),
      max_skips=10,
      accumulate=1,  # batches in one update
      evaluate=unset(str),  # "raw" or "average"; None: that, if it is kept
      monitor=unset(int),  # steps between looks at the recurrences
      data_parallel=1,  # devices that share each batch; 0: all there are
    ),
  )
  if arg == "notebook":
    _notebook(config)
  elif arg:
    raise ValueError(f"configs/name_lm.py has no variant {arg!r}: notebook")
  return config


def _notebook(config):
  config.task.batch_size = 16
  config.model.update(embed=96, hidden=96, dropout=0.0)
  config.model.cell.update(name="rnn", recurrent="uniform", input="uniform")
  config.opt.update(lr=1e-3, schedule="constant", warmup=0, clip=None)
