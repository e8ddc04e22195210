"""Label every character of Python source with the role of its token.

  def area(r): return pi * r ** 2
  KKK ffff(p): KKKKKK ll * l ** n      K keyword, f function, p parameter, ...

Which of them a name is, often the characters after it decide: `area` is loaded,
called or stored by what follows. So it tells what a context buys.

A file is cut into chunks of `steps` characters, which are independent. A chunk
reads `margin` characters of its file on either side as well, which count in the
chunks that they are of: in an evaluation every character is counted once. The
cut takes away what lies further off than the margin from a chunk's first or
last character; with a margin of 0 and at worst, all that lies before or after.
"""

import functools
import itertools
import platform

import jax
import jax.numpy as jnp
import numpy as np

from rnnlab import settings
from rnnlab.analysis import context
from rnnlab.data import batching, python_source, roles
from rnnlab.data.vocabulary import UNKNOWN, Vocabulary, code_points
from rnnlab.metrics import Mean, cross_entropy
from rnnlab.models import tagger
from rnnlab.tasks import Task

# Places in a token that are told apart, and those that stand for all from then.
PLACES = (0, 1, 2, 3, 4, 8, 16, 32)


def make(
  *,
  model: dict,
  path: str = "",
  steps: int = 128,
  margin: int = 32,
  batch_size: int = 32,
  eval_batch_size: int = 128,
  seed: int = 0,
  symbols: list | None = None,
  data: bool = True,
) -> Task:
  """Builds the task from a file or folder of Python, or "" for the library.

  path: see `python_source.read`; files that do not parse are left out and
  counted, and the split is by file. steps, margin: of a chunk. seed: the order
  of training batches, 0 <= seed < 2**32. model: settings of `tagger.make`.
  symbols: a run's stored vocabulary. data: False reads none, which leaves
  `generate` (and needs symbols). Raises ValueError naming the setting.
  """
  batching.check_seed("task.seed", seed)
  sizes = {"steps": steps, "batch_size": batch_size}
  for name, size in (sizes | {"eval_batch_size": eval_batch_size}).items():
    batching.check_size(f"task.{name}", size)
  if margin < 0:
    raise ValueError(f"task.margin must be at least 0, not {margin}")
  of_data, eval_batches = {}, None
  if data:
    text = _load(path, symbols)
    vocab = text.vocab
    cut = functools.partial(_chunks, text, steps, margin)
    chunks = {split: cut(files) for split, files in text.files.items()}

    def batch(rows, size, extra):
      return _batch(text, rows, steps, margin, size, extra)

    train_batches, eval_batches = batching.feeds(
      chunks, batch, batch_size, eval_batch_size, seed
    )
    n = len(chunks["train"])
    of_data = {
      "facts": text.facts | {f"{s}_chunks": len(c) for s, c in chunks.items()},
      "texts": {s: range(len(part)) for s, part in chunks.items()},
      "per_epoch": batching.steps_per_epoch(n, batch_size),
      "train_batches": train_batches,
      "eval_batches": eval_batches,
    }
  else:
    vocab = Vocabulary(symbols)
  fixed = {"vocab_size": vocab.size, "labels": len(roles.LABELS)}
  model = tagger.make(**settings.bind(tagger.make, "model", model | fixed))
  loss, outcomes = _losses(model)

  def report(params, carry, batch):
    return carry, _sums(batch, *outcomes(params, batch))

  def recurrences(params, carry, batch):
    return model.recurrences(params, batch["tokens_BT"], batch["mask_BT"])

  def contexts(params):
    f = functools.partial(model.apply, params)
    draw = context.tokens(vocab.size)
    return [context.Claim("label", f, draw, model.context)]

  if data:
    of_data["details"] = _details(outcomes, eval_batches)
  return Task(
    vocab=vocab,
    init=model.init,
    carry=lambda params: (),
    loss=loss,
    report=report,
    generate=_generate(model, vocab),
    reads="source",
    unit="characters",
    recurrences=recurrences,
    contexts=contexts,
    **of_data,
  )


class _Text:
  """All files one after another, as arrays over characters."""

  def __init__(self, vocab, files, starts, arrays, facts):
    self.vocab, self.files, self.facts = vocab, files, facts
    self.starts = starts  # of file i, and behind the last the end
    self.tokens_N, self.labels_N, self.places_N = arrays


# A sweep asks for one text many times.
@functools.lru_cache(maxsize=1)
def _read(path):
  sources = python_source.read(path)
  labelled = python_source.label(sources.texts, sources.sha256)
  names = [sources.names[i] for i in labelled.kept]
  texts = [sources.texts[i] for i in labelled.kept]
  return sources, labelled, python_source.split(names), texts


def _load(path, symbols):
  sources, labelled, files, texts = _read(path)
  train = "".join(texts[i] for i in files["train"])
  if not train:
    raise ValueError(
      f"{sources.source}: {len(sources.names)} files, {labelled.unparsed} of "
      "which do not parse, leave no character to train on"
    )
  vocab = Vocabulary.of_points(np.unique(code_points(train)))
  if symbols is not None and tuple(symbols) != vocab.symbols:
    raise ValueError(
      f"{sources.source}: its training files have other characters than the "
      f"run's vocabulary: {vocab.size - 1}, not {len(symbols) - 1}"
    )
  sizes = [*map(len, texts)]
  starts = np.cumsum([0, *sizes])
  tokens_N = vocab.ids("".join(texts))
  facts = {
    "sha256": sources.sha256,
    "python": platform.python_version(),
    "unreadable": sources.unreadable,
    "unparsed": labelled.unparsed,
    "unlabelled": labelled.unlabelled,
  }
  for split, part in files.items():
    facts |= {f"{split}_files": len(part), split: sum(sizes[i] for i in part)}
  facts["unknown"] = int(np.sum(tokens_N == vocab.id(UNKNOWN)))
  arrays = tokens_N, *map(np.concatenate, (labelled.labels, labelled.places))
  return _Text(vocab, files, starts, arrays, facts)


def _chunks(text, steps, margin, files):
  """Where chunks start, and the start and end of their files: [chunks, 3]."""
  found = [np.zeros((0, 3), np.int64)]
  for i in files:
    begin, end = text.starts[i : i + 2]
    starts = np.arange(begin, end, steps)
    found.append(
      np.stack([starts, *np.full((2, len(starts)), [[begin], [end]])], 1)
    )
  return np.concatenate(found)


def _batch(text, rows, steps, margin, size, extra):
  """Chunks as a batch of `size` rows.

  mask_BT: where a character is; counted_BT: where it is one of the chunk's own.
  """
  start_B1, begin_B1, end_B1 = (column[:, None] for column in rows.T)
  step_1T = np.arange(-margin, steps + margin + extra)[None]
  at_BT = start_B1 + step_1T
  mask_BT = (at_BT >= begin_B1) & (at_BT < end_B1) & (step_1T < steps + margin)
  counted_BT = mask_BT & (step_1T >= 0) & (step_1T < steps)
  at_BT = np.where(mask_BT, at_BT, 0)
  arrays = {
    "tokens_BT": np.where(mask_BT, text.tokens_N[at_BT], 0),
    "labels_BT": np.where(mask_BT, text.labels_N[at_BT], 0).astype(np.int32),
    "places_BT": np.where(mask_BT, text.places_N[at_BT], 0),
    "mask_BT": mask_BT,
    "counted_BT": counted_BT,
  }
  missing = ((0, size - len(rows)), (0, 0))
  return {name: np.pad(array, missing) for name, array in arrays.items()}


def _losses(model):
  def nll(params, batch, key=None):
    logits_BTV = model.apply(
      params, batch["tokens_BT"], mask_BT=batch["mask_BT"], key=key
    )
    return logits_BTV, cross_entropy(logits_BTV, batch["labels_BT"])

  def loss(params, carry, batch, key):
    nll_BT = nll(params, batch, key)[1]
    mean = Mean.of(nll_BT, batch["counted_BT"])
    return mean, (carry, {"nll": mean})

  def outcomes(params, batch):
    """nll_BT, and right_BT: where the likeliest label is the true one."""
    logits_BTV, nll_BT = nll(params, batch)
    return nll_BT, jnp.argmax(logits_BTV, axis=-1) == batch["labels_BT"]

  return loss, outcomes


def _sums(batch, nll_BT, right_BT):
  counted_BT = batch["counted_BT"]
  names_BT = counted_BT & (batch["labels_BT"] < len(roles.NAMES))
  return {
    "nll": Mean.of(nll_BT, counted_BT),
    "accuracy": Mean.of(right_BT, counted_BT),
    "accuracy/identifiers": Mean.of(right_BT, names_BT),
  }


def _details(outcomes, eval_batches):
  outcomes = jax.jit(outcomes)

  def details(params, split, size=None, extra=0, first=None):
    """Tables for a report: {"by_label": rows, "by_place": rows}.

    by_label: by the true label. by_place: by how many characters of its token
    stand before a character, of all and of identifiers.
    """
    sums = {}
    for batch in eval_batches(split, size, extra, first):
      counted = batch["counted_BT"]
      nll, right = (np.asarray(a)[counted] for a in outcomes(params, batch))
      labels, places = batch["labels_BT"][counted], batch["places_BT"][counted]
      names = labels < len(roles.NAMES)
      bins = np.searchsorted(PLACES, places, side="right") - 1
      by_label = labels, len(roles.LABELS), (None, right, nll)
      by_place = bins, len(PLACES), (None, right, names, names & right)
      for name, (at, n, values) in {
        "label": by_label,
        "place": by_place,
      }.items():
        more = np.stack([np.bincount(at, v, n) for v in values])
        sums[name] = sums.get(name, 0) + more
    rows = {"by_label": [], "by_place": []}
    for name, (n, right, nll) in zip(
      roles.LABELS, sums["label"].T, strict=True
    ):
      if n:
        rows["by_label"].append(
          {"label": name, "characters": int(n)}
          | {"accuracy": float(right / n), "nll": float(nll / n)}
        )
    ends = [*PLACES[1:], None]
    for place, end, (n, right, names, named) in zip(
      PLACES, ends, sums["place"].T, strict=True
    ):
      if n:
        last = "" if end == place + 1 else f"-{end - 1}" if end else "+"
        rows["by_place"].append(
          {"place": f"{place}{last}", "characters": int(n)}
          | {"accuracy": float(right / n), "identifiers": int(names)}
          | {"accuracy/identifiers": float(named / names) if names else None}
        )
    return rows

  return details


def _generate(model, vocab):
  run = jax.jit(model.apply)

  def generate(params, key, prompts):
    """The likeliest labels of every text: its runs of one label, in order.

    key is not used: nothing is drawn. Raises ValueError for an empty text.
    """
    del key
    if not prompts or not all(prompts):
      raise ValueError(f"sources: at least one, and none empty, not {prompts}")
    ids = [*map(vocab.ids, prompts)]
    longest = max(map(len, ids))
    tokens_BT, mask_BT = batching.padded(ids, longest, 0, len(ids), vocab.size)
    labels_BT = run(params, tokens_BT, mask_BT=mask_BT).argmax(-1)
    samples = []
    for text, labels_T in zip(prompts, np.asarray(labels_BT), strict=True):
      runs = itertools.groupby(
        zip(text, labels_T, strict=False), lambda p: p[1]
      )
      said = [(roles.LABELS[n], "".join(c for c, _ in own)) for n, own in runs]
      shown = [f"{part} {name}" for name, part in said if name != "whitespace"]
      samples.append({"source": text, "labels": " | ".join(shown)})
    return samples

  return generate
