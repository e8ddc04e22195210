"""Reverse a name through noise, or learn any transduction from pairs.

From a list of names: one random letter follows each letter of the source, and
the target is the name reversed and a stop symbol,

  sophia with u r x z w q:  suorpxhziwaq -> aihpos

From a file of two columns with a tab between: the source and its target, as
they stand. `[S]` starts and stops a target.

Three masks, which are three different boundaries, can be switched off one by
one: `loss_mask` (which predictions are supervised), `source_mask` (what can be
attended to), `length_handling` (whether the state that starts the decoder is
that after the last letter). Off, the boundary is the batch's longest row.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rnnlab import metrics, settings
from rnnlab.analysis import context
from rnnlab.data import batching, names, pairs
from rnnlab.data.vocabulary import PAD, START_STOP, Vocabulary
from rnnlab.metrics import Mean, cross_entropy
from rnnlab.models import decoding, seq2seq
from rnnlab.tasks import Task, check_limit
from rnnlab.wiring import CAUSAL, FULL


def make(
  *,
  model: dict,
  path: str = "",
  split: str = "hash",
  split_seed: int = 123,
  unique: bool = False,
  max_length: int | None = None,
  noise: str = "fresh",
  batch_size: int = 32,
  eval_batch_size: int = 256,
  buckets: int = 1,
  loss_mask: bool = True,
  source_mask: bool = True,
  length_handling: bool = True,
  seed: int = 0,
  symbols: list | None = None,
  data: bool = True,
) -> Task:
  """Builds the task from a list of names or a file of pairs.

  noise: "fresh" letters each epoch, or "fixed" ones; a function of (seed,
  epoch, example) either way, and always fixed in evaluation. buckets: how many
  shapes batches may have; more of them is less padding and as many
  compilations, and changes no number. seed: order and noise. model: settings
  of `seq2seq.make`. The rest as in `name_lm`. Raises ValueError naming the
  setting, or the file, line and character.
  """
  batching.check_seed("task.seed", seed)
  batching.check_size("task.batch_size", batch_size)
  batching.check_size("task.eval_batch_size", eval_batch_size)
  if noise not in ("fresh", "fixed"):
    raise ValueError(f"task.noise is 'fresh' or 'fixed', not {noise!r}")
  batcher = None
  if data:
    splits = names.load(path, split, split_seed, unique, max_length, _columns)
    listed, train = splits.listed, splits.indices["train"]
    made = pairs.of(listed)
    texts = made.sources + made.targets
    vocab = Vocabulary(symbols or Vocabulary.of(texts).symbols)
    batcher = pairs.Batcher(
      made, vocab, listed.where, seed, buckets, batch_size
    )
  else:
    vocab = Vocabulary(symbols)
  fixed = {"vocab_size": vocab.size}
  model = seq2seq.make(**settings.bind(seq2seq.make, "model", model | fixed))
  masks = {
    "loss": "real" if loss_mask else "there",
    "source": "real" if source_mask else "there",
    "length": "real" if length_handling else "there",
  }
  limit = batcher.target_width if data else None
  loss, outcomes, recurrences = _losses(model, vocab, masks, limit)
  noisy = data and made.noisy

  def report(params, carry, batch):
    return carry, _sums(outcomes(params, batch), noisy)

  def contexts(params):
    """Of the decoder: the source, and the targets before, as it reads both."""
    draw = context.tokens(vocab.size)
    source_BSV, target_BUV = map(draw, jax.random.split(jax.random.key(0)))

    def f(source_BSV, target_BUV):
      encoded = model.encode(params, source_BSV)
      return model.decode(params, encoded, encoded.carry, target_BUV)[1]

    def of_source(x_BSV):
      return f(x_BSV, target_BUV)

    def of_target(x_BUV):
      return f(source_BSV, x_BUV)

    return [
      context.Claim("decoder, of the source", of_source, draw, FULL),
      context.Claim("decoder, of the target", of_target, draw, CAUSAL),
    ]

  of_data = {}
  if data:
    eval_batches = batcher.once(splits.indices, eval_batch_size)
    of_data = {
      "facts": splits.facts | batcher.padding(train, batch_size),
      "texts": splits.texts,
      "per_epoch": batching.steps_per_epoch(len(train), batch_size),
      "train_batches": batcher.train(train, batch_size, noise == "fresh"),
      "eval_batches": eval_batches,
      "details": _details(outcomes, eval_batches),
    }
  return Task(
    vocab=vocab,
    init=model.init,
    carry=lambda params: (),
    loss=loss,
    report=report,
    generate=_generate(model, vocab, masks),
    recurrences=recurrences,
    contexts=contexts,
    reads="source",
    noisy=noisy,
    **of_data,
  )


def _columns(line):
  return line.split("\t")


def _losses(model, vocab, masks, limit):
  pad, stop = vocab.id(PAD), vocab.id(START_STOP)
  not_pad_V = np.arange(vocab.size) != pad

  def encode(params, batch, key=None):
    return model.encode(
      params,
      batch["source_BS"],
      steps_BS=batch[f"source_{masks['length']}_BS"],
      source_BS=batch[f"source_{masks['source']}_BS"],
      key=key,
    )

  def loss(params, carry, batch, key):
    key_e, key_d = jax.random.split(key)
    encoded = encode(params, batch, key_e)
    mask_BU = batch[f"target_{masks['loss']}_BU"]
    tokens_BU, targets_BU = batch["inputs_BU"], batch["targets_BU"]
    _, logits_BUV, _ = model.decode(
      params, encoded, encoded.carry, tokens_BU, mask_BU=mask_BU, key=key_d
    )
    if masks["loss"] == "real":
      logits_BUV = _only(logits_BUV, not_pad_V)
    # Where padding is supervised, it is one more class to predict.
    nll = Mean.of(cross_entropy(logits_BUV, targets_BU), mask_BU)
    return nll, (carry, {"nll": nll})

  def outcomes(params, batch):
    """What comes of every example: a dict of arrays with B rows."""
    encoded = encode(params, batch)
    real_BU, targets_BU = batch["target_real_BU"], batch["targets_BU"]
    _, logits_BUV, attended = model.decode(
      params, encoded, encoded.carry, batch["inputs_BU"], mask_BU=real_BU
    )
    forced_BU = cross_entropy(_only(logits_BUV, not_pad_V), targets_BU)
    # All that is decided at the limit's width is free of the batch's shape.
    forced_BU, real_BU = _fit(forced_BU, limit), _fit(real_BU, limit)
    targets_BU = _fit(targets_BU, limit)
    free = decoding.greedy(
      _stepper(model, params, encoded, not_pad_V),
      encoded.carry,
      jnp.full(len(targets_BU), stop),
      limit=limit,
      stop=stop,
      pad=pad,
      allowed_V=not_pad_V,
      targets_BU=targets_BU,
    )
    tokens_B = real_BU.sum(1)
    edits_B = metrics.edit_distance(
      targets_BU, jnp.maximum(tokens_B - 1, 0), free.tokens_BU, free.length_B
    )
    out = {
      "example_B": real_BU[:, 0],
      "source_length_B": batch["source_real_BS"].sum(1),
      "tokens_B": tokens_B,
      "exact_B": (edits_B == 0) & free.ended_B,
      "edits_B": edits_B,
      "stopped_B": free.ended_B,
      "real_BU": real_BU,
      "nll_BU": jnp.where(real_BU, forced_BU, 0),
      "free_running_nll_BU": jnp.where(real_BU, free.nll_BU, 0),
    }
    if attended is not None:
      out["mass_B3"] = _mass(attended.weights_BUS, batch)
    return out

  def recurrences(params, carry, batch):
    return model.recurrences(
      params,
      encode(params, batch),
      batch["source_BS"],
      batch["inputs_BU"],
      steps_BS=batch[f"source_{masks['length']}_BS"],
      mask_BU=batch["target_real_BU"],
    )

  return loss, outcomes, recurrences


def _only(logits, allowed_V):
  allowed = jnp.broadcast_to(jnp.asarray(allowed_V), logits.shape)
  return jnp.where(allowed, logits, jnp.finfo(logits.dtype).min)


def _fit(x_BU, width):
  """Cut or filled up with 0 to a width; what lies past a row is not read."""
  missing = max(width - x_BU.shape[1], 0)
  return jnp.pad(x_BU, ((0, 0), (0, missing)))[:, :width]


def _stepper(model, params, encoded, allowed_V):
  """The decoder as a step that `decoding` feeds with its own choices."""

  def step(carry, token_B):
    carry, logits_BUV, attended = model.decode(
      params, encoded, carry, token_B[:, None]
    )
    weights_BS = () if attended is None else attended.weights_BUS[:, 0]
    return carry, _only(logits_BUV[:, 0], allowed_V), weights_BS

  return step


def _mass(weights_BUS, batch):
  """Attention on even and odd source positions and on padding: mass_B3.

  Summed over the target's real positions. In a noisy name the odd positions
  are noise.
  """
  real_BS = batch["source_real_BS"]
  even_BS = jnp.broadcast_to(
    (jnp.arange(real_BS.shape[1]) % 2 == 0)[None], real_BS.shape
  )
  real_BU1 = batch["target_real_BU"][..., None]
  total_BS = jnp.where(real_BU1, weights_BUS, 0).sum(1)
  kinds = real_BS & even_BS, real_BS & ~even_BS, ~real_BS
  return jnp.stack([jnp.where(k, total_BS, 0).sum(1) for k in kinds], axis=1)


def _sums(out, noisy):
  """The metrics of a batch, from what came of its rows."""
  example_B, real_BU = out["example_B"], out["real_BU"]
  edits_B = jnp.where(example_B, out["edits_B"], 0)
  characters_B = jnp.where(example_B, out["tokens_B"] - 1, 0)
  sums = {
    "nll": Mean.of(out["nll_BU"], real_BU),
    "free_running_nll": Mean.of(out["free_running_nll_BU"], real_BU),
    "exact_match": Mean.of(out["exact_B"], example_B),
    "cer": Mean(edits_B.sum().astype(jnp.float32), characters_B.sum()),
    "stopped": Mean.of(out["stopped_B"], example_B),
  }
  if "mass_B3" in out and noisy:
    for k, name in enumerate(("names", "noise", "padding")):
      total = jnp.where(example_B, out["mass_B3"][:, k], 0).sum()
      sums[f"attention/{name}"] = Mean(total, sums["nll"].count)
  return sums


def _details(outcomes, eval_batches):
  outcomes = jax.jit(outcomes)

  def details(params, split, size=None, extra=0, first=None):
    """Tables for a report: {"by_length": rows, "by_position": rows}.

    by_length: by source length; by_position: nll at every target position,
    teacher-forced and free-running.
    """
    batches = eval_batches(split, size, extra, first)
    outs = [jax.device_get(outcomes(params, batch)) for batch in batches]
    out = {name: np.concatenate([o[name] for o in outs]) for name in outs[0]}
    out = {name: rows[out["example_B"]] for name, rows in out.items()}
    nll, free, real = (
      out[n].astype(np.float64)
      for n in ("nll_BU", "free_running_nll_BU", "real_BU")
    )
    by_length = []
    for length in np.unique(out["source_length_B"]).tolist():
      at = out["source_length_B"] == length
      tokens = int(out["tokens_B"][at].sum())
      by_length.append(
        {
          "source_length": length,
          "examples": int(at.sum()),
          "exact_match": float(out["exact_B"][at].mean()),
          "cer": float(out["edits_B"][at].sum() / (tokens - at.sum())),
          "nll": float(nll[at].sum() / tokens),
          "free_running_nll": float(free[at].sum() / tokens),
        }
      )
    by_position = [
      {
        "position": u + 1,
        "tokens": int(real[:, u].sum()),
        "nll": float(nll[:, u].sum() / real[:, u].sum()),
        "free_running_nll": float(free[:, u].sum() / real[:, u].sum()),
      }
      for u in range(real.shape[1])
      if real[:, u].any()
    ]
    return {"by_length": by_length, "by_position": by_position}

  return details


HOW = ("limit", "beam", "alpha")


class Answers(NamedTuple):
  """One answer a row, found greedily or by a beam."""

  tokens_BU: Any
  length_B: Any
  ended_B: Any
  logprob_B: Any
  weights_BUS: Any  # (): nothing attends, or a beam was asked for


def _generate(model, vocab, masks):
  pad, stop = vocab.id(PAD), vocab.id(START_STOP)
  not_pad_V = np.arange(vocab.size) != pad

  @functools.partial(jax.jit, static_argnames=HOW)
  def run(params, tokens_BS, real_BS, *, limit, beam, alpha):
    there_BS = jnp.ones_like(real_BS)
    encoded = model.encode(
      params,
      tokens_BS,
      steps_BS=real_BS if masks["length"] == "real" else there_BS,
      source_BS=real_BS if masks["source"] == "real" else there_BS,
    )
    how = {"limit": limit, "stop": stop, "pad": pad, "allowed_V": not_pad_V}
    start_B = jnp.full(len(tokens_BS), stop)
    if beam == 1:
      step = _stepper(model, params, encoded, not_pad_V)
      found = decoding.greedy(step, encoded.carry, start_B, **how)
      return Answers(*found[:5])
    wide = jax.tree.map(lambda x: jnp.repeat(x, beam, axis=0), encoded)
    step = _stepper(model, params, wide, not_pad_V)
    found = decoding.beam(
      step, encoded.carry, start_B, width=beam, alpha=alpha, **how
    )
    best = jax.tree.map(lambda x_BN: x_BN[:, 0], found)
    return Answers(
      best.tokens_BNU, best.length_BN, best.ended_BN, best.logprob_BN, ()
    )

  def generate(
    params,
    key,
    prompts,
    *,
    limit: int = 64,
    beam: int = 1,
    alpha: float = 0.0,
  ):
    """The likeliest target of every source: a list of dicts, by row.

    limit: symbols at most, the stop included. beam: hypotheses kept (1 is
    greedy). alpha: their log-probability is divided by length^alpha, the stop
    counted. key is not used: nothing is drawn. Greedy results hold
    "attention_US" too, an array. Raises ValueError for an empty source, or the
    character that is unknown.
    """
    del key
    if beam < 1 or (beam == 1 and alpha):
      raise ValueError(
        f"beam must be at least 1, and alpha needs a beam of 2 or more, not "
        f"beam={beam} with alpha={alpha}"
      )
    check_limit(limit)
    if not prompts or not all(prompts):
      raise ValueError(f"sources: at least one, and none empty, not {prompts}")
    ids = [vocab.encode(text, f"source {text!r}") for text in prompts]
    tokens_BS, real_BS = batching.padded(
      ids, max(map(len, ids)), pad, len(ids), vocab.size
    )
    found = jax.device_get(
      run(params, tokens_BS, real_BS, limit=limit, beam=beam, alpha=alpha)
    )
    samples = []
    for b, source in enumerate(prompts):
      length = int(found.length_B[b])
      sample = {
        "source": source,
        "text": vocab.decode(found.tokens_BU[b, :length]),
        "logprob": float(found.logprob_B[b]),
        "end": "stop" if found.ended_B[b] else "limit",
      }
      if len(found.weights_BUS):
        weights_US = found.weights_BUS[b, : length + 1]
        sample["attention_US"] = weights_US[:, : len(source)]
      samples.append(sample)
    return samples

  return generate
