"""Gates by name, every step of a run, and what is measured of both."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reversing
import tiny
from conftest import all_cells, assert_close, exhaustive_but, rows

from rnnlab import cells, layers, scan, stepping, wiring
from rnnlab.analysis import retention
from rnnlab.models import context_cells

H, D, B, T = 3, 2, 4, 5
X_BTD = np.random.default_rng(0).normal(size=(B, T, D))
MASK_BT = np.array(
  [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 1, 1], [0] * 5], bool
)
RESET_BT = np.array(
  [[0, 0, 1, 0, 0], [0, 1, 0, 0, 0], [1, 1, 0, 0, 1], [1] * 5], bool
)


def drawn(init):
  """Parameters with nothing left at zero; nothing is compiled for them."""
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda p: jnp.asarray(0.5 * rng.normal(size=p.shape), p.dtype),
    jax.eval_shape(init, jax.random.key(0)),
  )


def own(cell):
  return drawn(lambda key: cell.init(key, D))


def recurrence(settings, **fields):
  cell = cells.make(hidden=H, initial="learned", **settings)
  params = own(cell)
  read = layers.Recurrence("one", cell, params, X_BTD, **fields)
  return read._replace(carry=rows(cell, params, B))


def summary(*recurrences):
  sums = None
  for r in recurrences:
    arrays = r.params, r.x, r.carry, r.mask_BT, r.reset_BT

    @jax.jit
    def measure(params, x, carry, mask_BT, reset_BT, r=r):
      here = layers.Recurrence(r.name, r.cell, params, x, carry)
      return retention.measure(
        here._replace(mask_BT=mask_BT, reset_BT=reset_BT)
      )

    sums = retention.add(sums, measure(*arrays))
  return retention.summary(sums)


@pytest.mark.parametrize(
  "settings", exhaustive_but(["gru-before"], all_cells())
)
def test_a_trace_is_the_run_and_every_step_can_be_taken_again(settings, x64):
  r = recurrence(settings, mask_BT=MASK_BT, reset_BT=RESET_BT)
  flags = {"mask_BT": MASK_BT, "reset_BT": RESET_BT}

  @jax.jit
  def both(params):
    trace = r._replace(params=params).trace()
    step = jax.vmap(lambda e, u: stepping.step(r.cell, params, e, u)[1])
    again = jax.vmap(lambda e, a: r.cell.update(e, a, None)[1])
    return (
      trace,
      scan.unroll(r.cell, params, X_BTD, r.carry, **flags),
      step(trace.entries, trace.inputs),
      again(trace.entries, trace.activations),
    )

  trace, run, out_THB, again_THB = both(r.params)
  assert_close((trace.carry, trace.out), run)
  assert_close(again_THB, out_THB)
  real_BT1 = MASK_BT[..., None]
  out_BTH = jnp.moveaxis(out_THB, -1, 0)
  assert_close(jnp.where(real_BT1, out_BTH, 0), trace.out)
  # An entry is what stands there once the reset has fired.
  start = jax.tree.leaves(r.cell.carry(r.params, B))[0]
  assert_close(jax.tree.leaves(trace.entries)[0][1, :, 1], start[:, 1])


def test_a_trace_looks_tokens_up():
  cell = cells.make("gru", hidden=H)
  params = own(cell)
  table_VD = X_BTD[0].astype(np.float32)
  tokens_BT = np.array([[0, 4, 2, 1], [3, 3, 0, 4]])
  trace = jax.jit(lambda params, x: scan.trace(cell, params, x))
  found = trace(params, scan.Lookup(table_VD, tokens_BT))
  expected = trace(params, table_VD[tokens_BT])
  assert_close(found, expected, atol=1e-6)


@pytest.mark.parametrize("settings", all_cells())
def test_the_keep_gate_is_the_derivative_of_the_direct_path(settings, x64):
  r = recurrence(settings)

  @jax.jit
  def path(params):
    trace = r._replace(params=params).trace()
    entry, a = jax.tree.map(lambda x: x[2], (trace.entries, trace.activations))

    def blended(carry):
      # The pre-activations are held: what is left is the direct path.
      return jax.tree.leaves(r.cell.update(carry, a, None)[0])[-1]

    ones = jax.tree.map(jnp.ones_like, entry)
    gates = r.cell.gates(a) if r.cell.gates else {}
    return jax.jvp(blended, (entry,), (ones,))[1], gates

  path_HB, gates = path(r.params)
  keeps = [retention.keep_logits(*gate) for gate in gates.items()]
  keeps = [keep_HB for keep_HB in keeps if keep_HB is not None]
  if r.cell.gates is None:
    keeps = [jnp.full((H, B), -jnp.inf)]
  assert_close([path_HB], [jax.nn.sigmoid(keep_HB) for keep_HB in keeps])


@pytest.mark.parametrize("settings", all_cells("keep"))
def test_a_gate_reads_rows_of_its_own_as_they_stand(settings):
  cell = cells.make(hidden=H, **settings)
  params = own(cell)

  @jax.jit
  def reads():
    trace = scan.trace(cell, params, jnp.ones((1, 1, D)))
    a = jax.tree.map(lambda x: x[0], trace.activations)
    return jax.jacrev(cell.gates)(a)

  used = []
  for by_row in reads().values():
    leaves = [np.reshape(x, (H, -1)) for x in jax.tree.leaves(by_row)]
    used.append(np.concatenate(leaves, 1))
  assert len(used) == {"lstm": 3, "gru": 2, "ugrnn": 1}[settings["name"]]
  used = np.concatenate(used)
  assert set(np.unique(used)) == {0, 1}
  assert (used.sum(1) == 1).all() and used.sum(0).max() == 1


def test_cells_of_cells_name_the_gates_inside(x64):
  stack = [
    cells.make("gru", hidden=H),
    cells.make("rnn", hidden=2),
    cells.make("lstm", hidden=4),
  ]
  cell = layers.as_cell(stack)
  params = own(cell)

  @jax.jit
  def gates(params):
    def of(cell, params, x):
      return jax.vmap(cell.gates)(scan.trace(cell, params, x).activations)

    x_BTD = layers.unroll(stack[:2], params[:2], X_BTD)[1]
    above = of(stack[2], params[2], x_BTD)
    return of(cell, params, X_BTD), of(stack[0], params[0], X_BTD), above

  found, below, above = gates(params)
  below = {f"0/{name}": gate for name, gate in below.items()}
  assert_close(found, below | {f"2/{name}": g for name, g in above.items()})
  assert layers.as_cell([stack[1]]).gates is None
  assert context_cells.constant(stack[1]).gates is None


def test_measures_are_those_of_the_written_loop(x64):
  r = recurrence({"name": "lstm"}, mask_BT=MASK_BT, reset_BT=RESET_BT)
  p = jax.tree.map(np.asarray, r.params)
  keeps, opens = [], []
  for b in range(B):
    h, c = (np.asarray(leaf[b]) for leaf in r.carry)
    for t in range(T):
      if not MASK_BT[b, t]:
        continue
      if RESET_BT[b, t]:
        h, c = p["h0_H"], p["c0_H"]
      a = p["w_GD"] @ X_BTD[b, t] + p["u_GH"] @ h + p["b_G"]
      s = 1 / (1 + np.exp(-a))
      i, f, o = s[:H], s[H : 2 * H], s[3 * H :]
      c = f * c + i * np.tanh(a[2 * H : 3 * H])
      h = o * np.tanh(c)
      keeps.append(np.log(f))
      opens.append(f)
  found = summary(r)["keep"]
  assert found["steps"] == MASK_BT.sum() == len(keeps)
  half_life_H = math.log(0.5) / np.mean(keeps, 0)
  np.testing.assert_allclose(found["half_life_H"], half_life_H, rtol=1e-12)
  slope_H = np.mean([f * (1 - f) for f in opens], 0)
  np.testing.assert_allclose(found["slope_H"], slope_H, rtol=1e-12)


@pytest.mark.parametrize(
  "settings", exhaustive_but(["lstm"], all_cells("keep"))
)
def test_a_half_life_of_69_measures_69_on_zero_input(settings):
  keep = {"kind": "half_life", "steps": 69.0}
  cell = cells.make(hidden=8, keep=keep, recurrent="uniform", **settings)
  params = cell.init(jax.random.key(0), D)
  read = layers.Recurrence("one", cell, params, jnp.zeros((2, 30, D)))
  (found,) = [s for s in summary(read).values() if "half_life_H" in s]
  np.testing.assert_allclose(found["half_life_H"], 69, atol=1e-3)


def test_padding_and_the_cut_into_batches_change_nothing():
  r = recurrence({"name": "gru"}, mask_BT=MASK_BT)
  r = r._replace(x=jnp.where(MASK_BT[..., None], X_BTD, jnp.nan))
  cut = [
    r._replace(x=r.x[at], mask_BT=MASK_BT[at], carry=r.carry[at])
    for at in (slice(1), slice(1, 4))
  ]
  assert_close(summary(*cut), summary(r), atol=1e-5)
  nothing = r._replace(mask_BT=np.zeros((B, T), bool))
  with pytest.raises(ValueError, match="replace|reset.*no real step"):
    summary(nothing)


def test_saturated_gates_are_counted_as_float32_rounds_them():
  cell = cells.make("gru", hidden=5, reset="after")
  params = own(cell)
  z_H = [0.0, 5.0, 11.0, 20.0, -120.0]
  params = jax.tree.map(jnp.zeros_like, params)
  params["b_G"] = params["b_G"].at[5:10].set(jnp.array(z_H))
  read = layers.Recurrence("one", cell, params, jnp.zeros((1, 3, D)))
  found = summary(read)["replace"]
  # sigmoid(20) is 1 in float32, sigmoid(-120) is 0, and sigmoid(11) is neither.
  assert found["one"] == found["zero"] == pytest.approx(1 / 5)
  assert found["large"] == pytest.approx(3 / 5)
  slope_H = found["slope_H"]
  assert slope_H[0] == 0.25 and slope_H[3] == slope_H[4] == 0.0
  assert 0 < slope_H[2] < retention.math.exp(-retention.LARGE)
  # z replaces: wide open, the state is gone at once; shut, it stays for good.
  half_life_H = found["half_life_H"]
  assert half_life_H[0] == pytest.approx(1)
  assert half_life_H[3] == pytest.approx(math.log(2) / 20)
  assert half_life_H[4] > 1e30


def test_an_ungated_cell_has_nothing_to_retain():
  assert retention.measure(recurrence({"name": "rnn"})) == {}


def test_the_recurrences_of_a_language_model_are_its_layers(tmp_path):
  settings = tiny.config(tmp_path, **{"model.layers": 2})
  task = tiny.task(settings)
  params = drawn(task.init)
  (batch,) = task.eval_batches("validation", len(task.texts["validation"]))

  @jax.jit
  def both(params):
    (read,) = task.recurrences(params, (), batch)
    trace = read.trace()
    return trace.entries, read.loss(trace.out), task.report(params, (), batch)

  entries, loss_BT, (_, found) = both(params)
  total = np.where(batch["mask_BT"], loss_BT, 0).sum()
  np.testing.assert_allclose(total, found["nll"].total, rtol=1e-5)
  assert len(entries) == 2


WIRINGS = {
  "bahdanau": reversing.BAHDANAU,
  "feeding": reversing.FEEDING | {"cell": {"name": "gru", "reset": "before"}},
  "fixed": reversing.FIXED,
}


@pytest.mark.parametrize(
  "name",
  exhaustive_but(
    ["bahdanau"], [pytest.param(name, id=name) for name in WIRINGS]
  ),
)
def test_the_recurrences_of_an_encoder_decoder(name, tmp_path):
  model = WIRINGS[name]
  task = reversing.make(tmp_path, reversing.words(), model)
  batch = reversing.whole(task, extra=3)
  listed = []

  @jax.jit
  def run(params):
    listed[:] = found = task.recurrences(params, (), batch)
    stack = [r.cell for r in found if r.name.endswith("/forward")]
    x = scan.Lookup(params["embed_VD"], batch["source_BS"])
    real_BS = batch["source_real_BS"]
    ends, _ = wiring.unroll(stack, params["encoder"], x, mask_BT=real_BS)
    traces = {r.name: r.trace() for r in found}
    decoder = found[-1]
    trace = traces.pop("decoder")
    entry, a = jax.tree.map(lambda x: x[1], (trace.entries, trace.activations))
    _, path = jax.jvp(
      lambda carry: decoder.cell.update(carry, a, decoder.memory)[0],
      (entry,),
      (jax.tree.map(jnp.ones_like, entry),),
    )
    inside = path, decoder.cell.gates(a)
    return ends, {name: trace.carry for name, trace in traces.items()}, inside

  ends, carries, (path, gates) = run(drawn(task.init))
  # However it is turned, the last state is the one that the model uses.
  expected = {
    f"encoder/{layer}/{way}": end
    for layer, ways in enumerate(ends)
    for way, end in sorted(ways.items(), reverse=True)
  }
  assert [r.name for r in listed] == [*expected, "decoder"]
  assert_close(carries, expected, atol=1e-5)
  # The gates inside the decoder are found: they are what its direct path keeps.
  path = path[0] if name == "feeding" else path
  assert len(path) == model.get("layers", 1)
  for layer, kept in enumerate(path):
    keep_HB = (
      gates[f"{layer}/keep"]
      if f"{layer}/keep" in gates
      else -gates[f"{layer}/replace"]
    )
    kept_HB = jax.tree.leaves(kept)[-1]
    assert_close(kept_HB, jax.nn.sigmoid(keep_HB), atol=1e-6)
