"""A character language model over one long text, read as a stream.

Row b of a batch goes on where row b of the batch before ended, so the state is
carried. What happens where two chunks of `steps` characters meet is one of:

  truncation="detach"  the value of the state crosses, the graph does not
  truncation="reset"   neither crosses: every chunk starts fresh
  truncation="full"    both cross, inside a window of `chunks` chunks: a batch
                       is [batch_size, chunks * steps], an update a window;
                       between windows the value alone crosses

The state is fresh where an epoch, an evaluation or a document starts. What is
learned from is the sum over a batch of all characters that were predicted.
"""

import itertools
import math

import jax
import jax.numpy as jnp

from rnnlab import settings
from rnnlab.analysis import context
from rnnlab.data import batching, streams, text
from rnnlab.data.vocabulary import CODE_POINTS, UNKNOWN, Vocabulary
from rnnlab.metrics import Mean, cross_entropy
from rnnlab.models import lm
from rnnlab.tasks import Task, check_limit
from rnnlab.wiring import CAUSAL

TRUNCATIONS = "detach", "reset", "full"
# Steps in one call of an evaluation, at least: they cost no memory to speak of.
EVAL_STEPS = 1024


def make(
  *,
  model: dict,
  path: str = "",
  held_out: float = 0.1,
  steps: int = 128,
  truncation: str = "detach",
  chunks: int = 1,
  shuffle: bool = False,
  batch_size: int = 32,
  eval_batch_size: int | None = None,
  seed: int = 0,
  symbols: list | None = None,
  data: bool = True,
) -> Task:
  """Builds the task from a UTF-8 file, or "" for the standard library.

  path, held_out: see `text.load`. steps: of a chunk. chunks: in a window of
  truncation="full", and of no other. shuffle: windows in an order drawn from
  (seed, epoch), 0 <= seed < 2**32; only with truncation="reset", since what is
  shuffled cannot be carried on. eval_batch_size: rows of an evaluation, by
  default as many as the longest document keeps busy; a document is in one row,
  from its start to its end, so no number depends on it. model: settings of
  `lm.make`. symbols: a run's stored vocabulary. data: False reads none, which
  leaves `generate` (and needs symbols). Raises ValueError naming the setting,
  or the file and byte.

  A character that training lacks is read as UNKNOWN. Predicting it costs what
  Laplace's rule says: 1 / (n + 1) for any new character after n, shared
  equally by all that Unicode has room for; the known ones share the rest.
  """
  batching.check_seed("task.seed", seed)
  sizes = {"batch_size": batch_size, "steps": steps, "chunks": chunks}
  _check(sizes | {"eval_batch_size": eval_batch_size}, truncation, shuffle)
  steps *= chunks
  of_data, new_character = {}, 0.0
  if data:
    read = text.load(path, held_out, symbols)
    vocab = read.vocab
    how = {"carried": truncation != "reset", "seed": seed if shuffle else None}
    of_data = _of_data(read, batch_size, eval_batch_size, steps, how)
    new_character = math.log(len(read.tokens["train"]) + 1)
  else:
    vocab = Vocabulary(symbols)
  unknown = vocab.id(UNKNOWN)
  fixed = {"vocab_size": vocab.size, "never": (unknown,)}
  model = lm.make(**settings.bind(lm.make, "model", model | fixed))
  room = CODE_POINTS - text.SURROGATES - (vocab.size - 1)
  loss, report = _losses(model, unknown, new_character, math.log(room))

  def recurrences(params, carry, batch):
    flags = {"mask_BT": batch.get("real_BT"), "reset_BT": batch["reset_BT"]}
    tokens_BT, targets_BT = batch["inputs_BT"], batch["targets_BT"]
    carry = _of_rows(carry, tokens_BT)
    return [model.recurrence(params, tokens_BT, targets_BT, carry, **flags)]

  def contexts(params):
    def f(x_BTV):
      return model.apply(params, x_BTV)[1]

    return [context.Claim("next", f, context.tokens(vocab.size), CAUSAL)]

  return Task(
    vocab=vocab,
    init=model.init,
    carry=lambda params: model.carry(params, batch_size),
    loss=loss,
    report=report,
    generate=_generate(model, vocab, unknown),
    writes="python" if not path or path.endswith(".py") else "text",
    unit="characters",
    recurrences=recurrences,
    contexts=contexts,
    **of_data,
  )


def _check(sizes, truncation, shuffle):
  for name, size in sizes.items():
    if size is not None:
      batching.check_size(f"task.{name}", size)
  if truncation not in TRUNCATIONS:
    raise ValueError(
      f"task.truncation is one of {TRUNCATIONS}, not {truncation!r}"
    )
  if sizes["chunks"] > 1 and truncation != "full":
    raise ValueError(
      f"task.chunks={sizes['chunks']} is the window of task.truncation='full', "
      f"not of {truncation!r}"
    )
  if shuffle and truncation != "reset":
    raise ValueError(
      f"task.shuffle=True cannot be had with task.truncation={truncation!r}: "
      "a shuffled window does not continue the one before it"
    )


def _of_data(read, batch_size, eval_batch_size, steps, how):
  """The fields of a task that come from its text. steps: of a window."""
  tokens_N, starts = read.tokens["train"], read.starts["train"]
  n = len(tokens_N)

  def train_batches(start):
    for i in itertools.count(start):
      yield streams.train_batch(tokens_N, starts, batch_size, steps, i, **how)

  def eval_batches(split, size=None, extra=0, first=None):
    """extra: columns of padding. first: so many documents."""
    starts, tokens_N = read.starts[split], read.tokens[split]
    if first is not None and first < len(starts):
      starts, tokens_N = starts[:first], tokens_N[: starts[first]]
    size = size or eval_batch_size
    long = max(steps, EVAL_STEPS)
    return streams.eval_batches(tokens_N, starts, size, long, extra)

  documents = {split: read.documents(split) for split in text.SPLITS}
  return {
    "facts": read.facts | {"dropped": streams.dropped(n, batch_size, steps)},
    "texts": documents | {"test": ()},
    "sequences": read.sequences,
    "per_epoch": streams.windows(n, batch_size, steps),
    "train_batches": train_batches,
    "eval_batches": eval_batches,
  }


def _of_rows(carry, tokens_BT):
  """The carry, or None where it is one of other rows: an evaluation's first.

  All rows of a first batch are reset, so what it starts from is not read.
  """
  rows = len(jax.tree.leaves(carry)[0])
  return carry if rows == len(tokens_BT) else None


def _losses(model, unknown, new_character, one_of_many):
  def loss(params, carry, batch, key):
    tokens_BT, targets_BT = batch["inputs_BT"], batch["targets_BT"]
    carry, logits_BTV = model.apply(
      params,
      tokens_BT,
      _of_rows(carry, tokens_BT),
      mask_BT=batch.get("real_BT"),
      reset_BT=batch["reset_BT"],
      key=key,
    )
    # log(n + 1) for a new character leaves -log(1 - 1 / (n + 1)) for the known.
    new_BT = targets_BT == unknown
    known_BT = cross_entropy(logits_BTV, jnp.where(new_BT, 0, targets_BT))
    known_BT -= math.log(-math.expm1(-new_character)) if new_character else 0
    new = new_character + one_of_many
    nll_BT = jnp.where(new_BT, new, known_BT)
    nll = Mean.of(nll_BT, batch["mask_BT"])
    return nll, (carry, {"nll": nll})

  def report(params, carry, batch):
    return loss(params, carry, batch, None)[1]

  return loss, report


def _generate(model, vocab, unknown):
  # The unknown is never drawn, so nothing stops.
  go_on = lm.continuing(model, stop=unknown, pad=unknown)

  def generate(
    params,
    key,
    prompts,
    *,
    limit: int = 512,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
  ):
    """Goes on from every prompt: its text, log-probability and end, by row.

    limit: characters after the prompt. temperature, top_k and top_p: see
    `sampling.probabilities`. A prompt is read from a fresh state; "" starts
    after a line break (after the first symbol, where there is none), which
    the text leaves out. logprob: of all characters after the first one read,
    in nats at temperature 1. end: "limit" or "failed".
    """
    check_limit(limit)
    how = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    before = "\n" if "\n" in vocab.symbols else vocab.symbols[0]
    ids = [vocab.encode(p or before, f"prompt {p!r}") for p in prompts]
    tokens_BT, mask_BT = batching.padded(
      ids, max(map(len, ids)), unknown, len(ids), vocab.size
    )
    length_B = mask_BT.sum(1, dtype="int32")
    found = go_on(params, key, tokens_BT, length_B, limit=limit, **how)
    return [
      {"text": prompt + vocab.decode(ids), "logprob": logprob, "end": end}
      for prompt, (ids, logprob, end) in zip(prompts, found, strict=True)
    ]

  return generate
