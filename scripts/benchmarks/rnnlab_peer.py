"""rnnlab on the workloads: its models, its compiled updates, its generation."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import jax_peer, workloads
from rnnlab import interchange, optim
from rnnlab.metrics import Mean, cross_entropy
from rnnlab.models import lm, seq2seq
from rnnlab.tasks import Task
from rnnlab.update import init_state, make_train_steps

NAME = "rnnlab"


def build(work):
  if work.kind == "generate":
    return _generation(work)
  task, tree, shared = _task(work)
  batch = jax.device_put(workloads.data(work))
  if work.kind == "evaluate":
    return jax_peer.evaluation(
      lambda params, batch: task.report(params, (), batch)[1]["nll"],
      tree(workloads.weights(work)),
      batch,
      value=lambda mean: float(mean.total / mean.count),
    )
  optimizer = optim.make(name="adam", lr=workloads.LR)
  state = init_state(task, optimizer, jax.random.key(0))
  K = work.per_call
  batches_K = jax.tree.map(lambda a: jnp.stack([a] * K), batch)
  # The trainer's own call: the last number of an update, the share of time,
  # the optimiser's numbers.
  rest = np.int32(2**31 - 1), np.float32(0), optimizer.numbers
  steps = make_train_steps(task, optimizer)
  program = jax_peer.Program(steps, state, batches_K, *rest, donate=0)

  def run(n):
    nonlocal state
    for _ in range(-(-n // K)):
      state, updates = program.call(state, batches_K, *rest)
    jax.block_until_ready(updates)

  def result():
    def loss(params):
      mean, _ = task.loss(params, (), batch, jax.random.key(0))
      return mean.total / mean.count

    value, grads = jax.jit(jax.value_and_grad(loss))(
      tree(workloads.weights(work))
    )
    return float(value), shared(jax.device_get(grads))

  return workloads.Runner(result, program.prepare, run)


def _model(work):
  cell = {"name": work.cell} | (
    {"reset": "after"} if work.cell == "gru" else {}
  )
  sizes = dict(vocab_size=work.vocab, embed=work.embed, hidden=work.hidden)
  if work.source:
    return seq2seq.make(**sizes, cell=cell, attention={"score": "dot"})
  return lm.make(**sizes, layers=work.layers, cell=cell)


def _task(work):
  """The task, and the ways from and to PyTorch's arrays."""
  model = _model(work)

  def logits(params, batch):
    if work.source:
      encoded = model.encode(params, batch["source_BS"])
      inputs = batch["inputs_BT"]
      return model.decode(params, encoded, encoded.carry, inputs)[1]
    return model.apply(params, batch["inputs_BT"], chunk=work.chunk)[1]

  def loss(params, carry, batch, key):
    nll = Mean.of(cross_entropy(logits(params, batch), batch["targets_BT"]))
    return nll, (carry, {"nll": nll})

  def tree(arrays):
    params = jax.eval_shape(model.init, jax.random.key(0))
    params = params | {
      "embed_VD": arrays["embed"],
      "out": {"w_VH": arrays["out.weight"], "b_V": arrays["out.bias"]},
    }
    if work.source:
      params["encoder"] = ({"forward": _cell(work, arrays, "encoder")},)
      params["decoder"] = (_cell(work, arrays, "decoder"),)
    else:
      params["cells"] = tuple(
        _cell(work, arrays, f"layer{i}") for i in range(work.layers)
      )
    return jax.tree.map(jnp.asarray, params)

  def shared(grads):
    if work.source:
      cells = {
        "encoder": grads["encoder"][0]["forward"],
        "decoder": grads["decoder"][0],
      }
    else:
      cells = {f"layer{i}": own for i, own in enumerate(grads["cells"])}
    found = {"embed": grads["embed_VD"], "out.weight": grads["out"]["w_VH"]}
    for name, own in cells.items():
      arrays = interchange.to_packed(work.cell, own, *_convention(work))
      # The gradient of the one bias is that of either of the two.
      del arrays["bias_hh"]
      found |= {f"{name}.{key}": array for key, array in arrays.items()}
    return found

  def report(params, carry, batch):
    return loss(params, carry, batch, None)[1]

  task = Task(
    vocab=None,
    init=lambda key: tree(workloads.weights(work)),
    carry=lambda params: (),
    loss=loss,
    report=report,
    generate=None,
  )
  return task, tree, shared


def _convention(work):
  reset = "after" if work.cell == "gru" else None
  return interchange.PYTORCH[work.cell], reset


def _cell(work, arrays, name):
  return interchange.from_packed(
    work.cell, workloads.layer(arrays, name), *_convention(work)
  )


def _generation(work):
  model, (task, tree, _) = _model(work), _task(work)
  params = tree(workloads.weights(work))
  first_B1 = jnp.asarray(workloads.data(work)["inputs_BT"][:, :1])

  def generate(params, key):
    cursor, _ = model.read(params, first_B1, jnp.ones(work.batch, jnp.int32))
    how = dict(limit=work.steps, stop=-1, pad=0)
    return model.generate(params, key, cursor, **how).tokens_BU

  def loss():
    mean = task.report(params, (), workloads.data(work))[1]["nll"]
    return mean.total / mean.count

  return jax_peer.generation(generate, params, loss)
