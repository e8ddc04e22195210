"""How long a run is, what is due when, and what its loop remembers."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Plan:
  """`config.train`: how long a run is and when it reports, evaluates, saves.

  steps, epochs, seconds: what is set and ends first ends the run; seconds of
  wall clock, the final evaluation included. *_every: in steps. steps_per_call:
  at most so many updates in one compiled call. keep: so many latest
  checkpoints, besides the best. patience: end after so many evaluations in a
  row without a new best. max_skips: end with an error after so many updates in
  a row that were not finite. data_parallel: over how many devices each batch is
  spread, of all processes together; 0: over all there are. It changes no number
  beyond rounding. accumulate: batches in one update, which learns from all of
  them as from one large batch. evaluate: "raw" or, with opt.average, the
  "average" parameters, None for these where they are kept; it is what the
  commands read, too. monitor: every so many steps a row also says what the
  recurrences are like; a multiple of log_every, None for never.
  """

  steps: int | None = None
  epochs: int | None = None
  seconds: float | None = None
  steps_per_call: int = 16
  log_every: int = 100
  eval_every: int = 500
  save_every: int = 500
  keep: int = 1
  patience: int | None = None
  max_skips: int = 10
  data_parallel: int = 1
  accumulate: int = 1
  evaluate: str | None = None
  monitor: int | None = None

  def __post_init__(self):
    for name, value in dataclasses.asdict(self).items():
      all_devices = name == "data_parallel" and value == 0
      if name == "evaluate":
        if value not in (None, "raw", "average"):
          raise ValueError(
            f"train.evaluate is 'raw' or 'average', not {value!r}"
          )
      elif value is not None and not (value > 0 or all_devices):
        raise ValueError(f"train.{name} must be > 0, not {value}")
    if self.monitor and self.monitor % self.log_every:
      raise ValueError(
        f"train.monitor={self.monitor} has to be a multiple of "
        f"train.log_every={self.log_every}, since it fills rows of the log"
      )
    if self.steps is self.epochs is self.seconds is None:
      raise ValueError(
        "train.steps, train.epochs or train.seconds has to be set"
      )

  @property
  def updates_per_call(self) -> int:
    """K: the largest common divisor of the intervals up to steps_per_call."""
    common = math.gcd(self.log_every, self.eval_every, self.save_every)
    limit = min(self.steps_per_call, common)
    return max(k for k in range(1, limit + 1) if common % k == 0)

  def evaluated(self, average: float | None) -> str:
    """The field of the state that is evaluated; average: opt.average."""
    if self.evaluate == "average" and average is None:
      raise ValueError(
        "train.evaluate='average' needs opt.average, which is not set"
      )
    return "params" if average is None or self.evaluate == "raw" else "average"

  def end(self, per_epoch: int | None) -> int | None:
    """The number of updates that ends the run; None: only the clock does."""
    if self.epochs and per_epoch is None:
      raise ValueError(
        f"train.epochs={self.epochs}, but the training data have no end, and "
        "so no epochs; train.steps and train.seconds are there"
      )
    ends = [self.steps, self.epochs and self.epochs * per_epoch]
    return min((end for end in ends if end), default=None)


@dataclasses.dataclass
class History:
  """What the loop remembers between steps; saved with every checkpoint."""

  elapsed: float = 0.0  # seconds, over all processes of the run
  best: float | None = None  # the lowest val/<metric>, and its step
  best_step: int | None = None
  worse: int = 0  # evaluations in a row since
  validation: dict | None = None  # the last one: {"step", "val/..."}
  slowest: float = 0.0  # evaluation, in seconds
  logged: int = -1  # the step of the last row written
  window: dict = dataclasses.field(default_factory=dict)  # sums to be logged
  ended: dict | None = None  # the plan under which the run ended, and why
