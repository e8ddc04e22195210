"""Training choices, and what a printed loss is an average of."""

import math

import numpy as np

from rnnlab import metrics, optim
from rnnlab.data import names
from rnnlab.ledger import NLP, Row


def rows():
  yield from _schedule()
  yield from _averages()


def _schedule():
  per_epoch = 100
  optimizer = optim.make(
    name="adam",
    lr=1e-3,
    schedule="cosine",
    unit="epoch",
    steps=10 * per_epoch,
    steps_per_epoch=per_epoch,
  )
  # The last update of every epoch: the rate has stayed what it was.
  ends = np.arange(1, 11) * per_epoch - 1
  rates = optimizer.rate(optimizer.numbers, ends).tolist()
  wanted = 1e-3, 9.7553e-4, 9.0451e-4, 7.9389e-4, 6.5451e-4
  wanted += 5e-4, 3.4549e-4, 2.0611e-4, 9.5492e-5, 2.4472e-5
  said = "1e-3 along a cosine, stepped once an epoch, ten epochs"
  yield Row(said, NLP, wanted, rates, 5e-9)


def _averages():
  sizes = names.split([""] * 32033, "shuffle", 123)
  said = "32,033 names cut at .8 and .9"
  yield Row(said, NLP, (25626, 3203, 3204), [*map(len, sizes.values())], 0)
  # Batches that all have the mean 2, the last one short.
  claimed = metrics.notebook_average([2.0] * 401, 3203, 8)
  said = "401 batch means of 2 over len // 8 = 400 of 3,203 names"
  yield Row(said, NLP, 2.005, claimed)
  batches = [metrics.Mean.of(np.full(4, math.log(2)))]
  batches += [metrics.Mean.of(np.full(1, 5 * math.log(2)))]
  nll = sum(batches[1:], batches[0]).value()
  said = "4 tokens at ln 2 and, in a batch of its own, 1 at 5 ln 2: in bits"
  yield Row(said, NLP, 1.8, metrics.bits(nll))
