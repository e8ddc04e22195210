"""How far a long job is, on stderr: a bar in a terminal, lines elsewhere."""

import sys
import threading
import time

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bar

# Between two plain lines, in seconds: a log file is read later and whole.
LINE_EVERY = 5.0


class Progress:
  """Shows `share` done, the time left and a line of figures. Use in a `with`.

  In a terminal the bar redraws in place. Elsewhere a line is printed at most
  every few seconds, and whenever `update(..., keep=True)` asks for it. shown:
  False prints nothing. Threads may share it.
  """

  def __init__(self, title: str, shown: bool = True):
    self._console, self._lock = Console(stderr=True), threading.RLock()
    self._shown, self._bar = shown, None
    if shown and self._console.is_terminal:
      columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[text]}"),
      )
      self._bar = Bar(*columns, console=self._console, transient=True)
      self._job = self._bar.add_task(title, total=1.0, text="")
    self._title = title
    self._start, self._first, self._last = time.monotonic(), None, 0.0

  def __enter__(self):
    if self._bar:
      self._bar.start()
    return self

  def __exit__(self, *error):
    if self._bar:
      self._bar.stop()

  def update(self, share: float, text: str, keep: bool = False) -> None:
    """share: done so far, 0 to 1. keep: the figures stay readable."""
    with self._lock:
      now = time.monotonic()
      if self._first is None:
        # What a resumed job had done before says nothing of this one's speed.
        self._first, self._start = share, now
      done = share - self._first
      if done > 0:
        text += f"  left {clock((now - self._start) / done * (1 - share))}"
      if self._bar:
        self._bar.update(self._job, completed=share, text=text)
      if keep or (not self._bar and now - self._last >= LINE_EVERY):
        self._last = now
        self.say(text)

  def say(self, text: str) -> None:
    """Prints a line above the bar."""
    with self._lock:
      if self._bar:
        self._bar.console.print(text, highlight=False, markup=False)
      elif self._shown:
        print(text, file=sys.stderr, flush=True)

  def parts(self, names) -> list["Part"]:
    """One progress for each of several jobs, shown together as this one."""
    shares = [0.0] * len(names)
    return [Part(self, shares, i, name) for i, name in enumerate(names)]


class Part:
  """The progress of one of several jobs, of equal length."""

  def __init__(self, whole, shares, i, name):
    self._whole, self._shares, self._i, self._name = whole, shares, i, name

  def update(self, share: float, text: str, keep: bool = False) -> None:
    """As `Progress.update`; the time left is that of all the jobs."""
    self._shares[self._i] = share
    n, done = len(self._shares), sum(share >= 1 for share in self._shares)
    text = f"{done} of {n} done  {self._name}: {text}"
    self._whole.update(sum(self._shares) / n, text, keep)

  def say(self, text: str) -> None:
    """As `Progress.say`."""
    self._whole.say(f"{self._name}: {text}")


def clock(seconds: float) -> str:
  """A duration as 0:42, 12:05 or 1:02:33."""
  minutes, seconds = divmod(int(seconds + 0.5), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f"{hours}:{minutes:02}:{seconds:02}"
  return f"{minutes}:{seconds:02}"
