"""A character language model over one long text, its state carried along.

configs/text_lm.py         an LSTM on the standard library of this interpreter
configs/text_lm.py:short   for a million characters and three minutes
configs/text_lm.py:long    for a million characters and 25 minutes: regularised

--config.task.path=FILE is another text: its last tenth is held out.
"""

from ml_collections import config_dict


def get_config(arg=None):
  """The settings; None leaves a setting to the code's own default."""
  unset = config_dict.placeholder
  config = config_dict.create(
    seed=0,  # initialisation and dropout
    task=dict(
      name="text_lm",
      path="",  # a UTF-8 file; "" is the standard library
      held_out=0.1,  # the share that validates, never trained on
      steps=64,  # characters of a row in one chunk
      truncation="detach",  # or "reset", "full"
      chunks=1,  # of a window, with "full"
      shuffle=False,  # of windows, with "reset"
      batch_size=32,
      eval_batch_size=unset(int),  # None: as many rows as can be kept busy
      seed=0,  # the order of shuffled windows
    ),
    model=dict(
      embed=64,
      hidden=384,
      layers=1,
      tied=False,
      norm=False,  # layers' outputs: mean 0 and variance 1
      residual=False,  # a layer's output is added to what it read
      dropout=0.0,  # of every layer's output
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
      lr=3e-3,
      schedule="cosine",
      warmup=100,
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
      epochs=unset(int),
      seconds=900.0,
      steps_per_call=10,
      log_every=50,
      eval_every=4000,
      save_every=1000,
      keep=1,
      patience=unset(int),
      max_skips=10,
      accumulate=1,  # batches in one update
      evaluate=unset(str),  # "raw" or "average"; None: that, if it is kept
      monitor=unset(int),  # steps between looks at the recurrences
      data_parallel=1,  # devices that share each batch; 0: all there are
    ),
  )
  if arg == "short":
    config.task.batch_size = 16
    config.model.update(hidden=256, dropout=0.1)
    config.opt.lr = 4e-3
    config.train.seconds = 180.0
  elif arg == "long":
    config.model.update(dropout=0.4, weight_dropout=0.2)
    config.train.seconds = 1500.0
  elif arg:
    raise ValueError(f"configs/text_lm.py has no variant {arg!r}: short, long")
  return config
