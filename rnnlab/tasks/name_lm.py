"""A character language model over a list of names.

`[S]` starts and stops a name: "ada" is read as [S] a d a and predicted as
a d a [S], so a name of n letters has n + 1 factors. Names are independent:
every one starts from the initial carry.
"""

import numpy as np

from rnnlab import settings
from rnnlab.analysis import context
from rnnlab.data import batching, names
from rnnlab.data.vocabulary import PAD, START_STOP, Vocabulary
from rnnlab.metrics import Mean, cross_entropy
from rnnlab.models import lm
from rnnlab.tasks import Task, check_limit
from rnnlab.wiring import CAUSAL


def make(
  *,
  model: dict,
  path: str = "",
  split: str = "hash",
  split_seed: int = 123,
  unique: bool = False,
  max_length: int | None = None,
  batch_size: int = 64,
  eval_batch_size: int = 256,
  seed: int = 0,
  symbols: list | None = None,
  data: bool = True,
) -> Task:
  """Builds the task from a list of names (a file, or "" for the embedded one).

  split, split_seed: the rule of `names.split`. unique: drop repeated names
  before the split. max_length: drop longer names, in evaluation too, and count
  them. seed: the order of training batches, 0 <= seed < 2**32. model: settings
  of `lm.make`. symbols: a run's stored vocabulary, in which the names must be
  written; None takes the characters of the whole list. data: False reads none,
  which leaves `generate` (and needs symbols). Raises ValueError naming the
  setting, or the file, line and character.
  """
  batching.check_seed("task.seed", seed)
  batching.check_size("task.batch_size", batch_size)
  batching.check_size("task.eval_batch_size", eval_batch_size)
  of_data = {}
  if data:
    splits = names.load(path, split, split_seed, unique, max_length)
    listed, train = splits.listed, splits.texts["train"]
    vocab = Vocabulary(symbols or Vocabulary.of(listed.texts).symbols)
    encoded = [
      vocab.encode(text, listed.where(i)) for i, text in enumerate(listed.texts)
    ]
    train_batches, eval_batches = _batches(
      encoded, splits.indices, vocab, batch_size, eval_batch_size, seed
    )
    of_data = {
      "facts": splits.facts,
      "texts": splits.texts,
      "sequences": lambda split: [
        np.append(encoded[i], vocab.id(START_STOP))
        for i in splits.indices[split]
      ],
      "per_epoch": batching.steps_per_epoch(len(train), batch_size),
      "train_batches": train_batches,
      "eval_batches": eval_batches,
    }
  else:
    vocab = Vocabulary(symbols)
  fixed = {"vocab_size": vocab.size, "never": (vocab.id(PAD),)}
  model = lm.make(**settings.bind(lm.make, "model", model | fixed))
  loss, report = _losses(model)

  def recurrences(params, carry, batch):
    tokens_BT, targets_BT = batch["inputs_BT"], batch["targets_BT"]
    mask_BT = batch["mask_BT"]
    return [model.recurrence(params, tokens_BT, targets_BT, mask_BT=mask_BT)]

  def contexts(params):
    def f(x_BTV):
      return model.apply(params, x_BTV)[1]

    return [context.Claim("next", f, context.tokens(vocab.size), CAUSAL)]

  return Task(
    vocab=vocab,
    init=model.init,
    carry=lambda params: (),
    loss=loss,
    report=report,
    generate=_generate(model, vocab),
    writes="name",
    recurrences=recurrences,
    contexts=contexts,
    **of_data,
  )


def shift(tokens_BT, mask_BT, pad):
  """Sequences [S] x_1 .. x_n [S] to inputs, targets and the targets' mask.

  targets[t] is the token after inputs[t]; no position holds its own target.
  """
  mask_BT = mask_BT[:, 1:]
  return {
    "inputs_BT": np.where(mask_BT, tokens_BT[:, :-1], pad),
    "targets_BT": tokens_BT[:, 1:],
    "mask_BT": mask_BT,
  }


def _batches(encoded, parts, vocab, batch_size, eval_batch_size, seed):
  pad, stop = vocab.id(PAD), vocab.id(START_STOP)
  whole = [np.concatenate([[stop], ids, [stop]]) for ids in encoded]
  longest = max(map(len, whole))
  table = batching.padded(whole, longest, pad, len(whole), vocab.size)
  parts = {s: np.asarray(part, np.int64) for s, part in parts.items()}

  def batch(rows, size, extra):
    tokens_BT, mask_BT = batching.rows(*table, rows, pad, size)
    if extra:
      wider = ((0, 0), (0, extra))
      tokens_BT = np.pad(tokens_BT, wider, constant_values=pad)
      mask_BT = np.pad(mask_BT, wider)
    return shift(tokens_BT, mask_BT, pad)

  return batching.feeds(parts, batch, batch_size, eval_batch_size, seed)


def _losses(model):
  def loss(params, carry, batch, key):
    # The mask is on the right, so it keeps padding out of the loss alone; the
    # scan's mask keeps it out of everything else.
    mask_BT = batch["mask_BT"]
    _, logits_BTV = model.apply(
      params, batch["inputs_BT"], mask_BT=mask_BT, key=key
    )
    nll = Mean.of(cross_entropy(logits_BTV, batch["targets_BT"]), mask_BT)
    return nll, (carry, {"nll": nll})

  def report(params, carry, batch):
    return loss(params, carry, batch, None)[1]

  return loss, report


def _generate(model, vocab):
  pad, stop = vocab.id(PAD), vocab.id(START_STOP)

  go_on = lm.continuing(model, stop=stop, pad=pad)

  def generate(
    params,
    key,
    prompts,
    *,
    limit: int = 64,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
  ):
    """Goes on from every prompt: its text, log-probability and end, by row.

    limit: letters and stop symbol at most, after the prompt. temperature, top_k
    and top_p: see `sampling.probabilities`. The text includes the prompt, and
    logprob counts it too, in nats at temperature 1. end: "stop", "limit" or
    "failed".
    """
    check_limit(limit)
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    ids = [
      np.concatenate([[stop], vocab.encode(text, f"prompt {text!r}")])
      for text in prompts
    ]
    tokens_BT, mask_BT = batching.padded(
      ids, max(map(len, ids)), pad, len(ids), vocab.size
    )
    length_B = mask_BT.sum(1, dtype=np.int32)
    found = go_on(params, key, tokens_BT, length_B, limit=limit, **how)
    return [
      {"text": prompt + vocab.decode(ids), "logprob": logprob, "end": end}
      for prompt, (ids, logprob, end) in zip(prompts, found, strict=True)
    ]

  return generate
