"""PyTorch's layers in files: read, computed alike, and written back.

PyTorch's documented equations stand here in numpy, so no torch is needed.
"""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import assert_close

from rnnlab import interchange, strict_json, wiring
from rnnlab.interchange import safetensors
from rnnlab.interchange.pytorch_files import Layers, load, save

D, H, B, T = 2, 3, 2, 4
GATES = {"rnn": 1, "gru": 3, "lstm": 4}
CELLS = {
  "tanh": {"name": "rnn", "activation": "tanh"},
  "relu": {"name": "rnn", "activation": "relu"},
  "gru": {"name": "gru"},
  "lstm": {"name": "lstm"},
}
X_BTD = np.random.default_rng(0).normal(size=(B, T, D))


def state_dict(name, depth=2, both=True, bias=True, dtype=np.float64):
  """Arrays under the names and of the shapes that PyTorch's layer has."""
  rng, rows, arrays = np.random.default_rng(1), GATES[name] * H, {}
  for layer, way in itertools.product(
    range(depth), ["", "_reverse"][: 1 + both]
  ):
    shapes = {"weight_ih": (rows, (1 + both) * H if layer else D)}
    shapes |= {"weight_hh": (rows, H)}
    shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)} if bias else {}
    for kind, shape in shapes.items():
      drawn = rng.normal(size=shape, scale=0.5)
      arrays[f"{kind}_l{layer}{way}"] = drawn.astype(dtype)
  return arrays


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


def step(kind, h, c, x, own):
  """One step of PyTorch's equations on rows: h, c."""
  i = x @ own["weight_ih"].T + own.get("bias_ih", 0)
  s = h @ own["weight_hh"].T + own.get("bias_hh", 0)
  if kind == "tanh":
    return np.tanh(i + s), c
  if kind == "relu":
    return np.maximum(i + s, 0), c
  if kind == "gru":
    (ir, iz, i_n), (hr, hz, hn) = (np.split(a, 3, 1) for a in (i, s))
    z = sigmoid(iz + hz)
    return (1 - z) * np.tanh(i_n + sigmoid(ir + hr) * hn) + z * h, c
  i, f, g, o = np.split(i + s, 4, 1)
  c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
  return sigmoid(o) * np.tanh(c), c


def pytorch(kind, arrays, x_BTD):
  """The outputs of PyTorch's layer: out[b, t], both directions side by side."""
  both = any(name.endswith("_reverse") for name in arrays)
  depth = 1 + max(int(re.search(r"_l(\d+)", name)[1]) for name in arrays)
  for layer in range(depth):
    sides = []
    for way in ["", "_reverse"][: 1 + both]:
      suffix = f"_l{layer}{way}"
      own = {
        name.removesuffix(suffix): a
        for name, a in arrays.items()
        if name.endswith(suffix)
      }
      h, c, out = np.zeros((B, H)), np.zeros((B, H)), np.zeros((B, T, H))
      for t in range(T)[:: -1 if way else 1]:
        h, c = step(kind, h, c, x_BTD[:, t], own)
        out[:, t] = h
      sides.append(out)
    x_BTD = np.concatenate(sides, 2)
  return x_BTD


def ours(read):
  stack = read.stack()
  run = jax.jit(lambda p, x: wiring.unroll(stack, p, x)[1])
  return run(read.params, X_BTD)


def written(tmp_path, arrays, metadata=None):
  """A file as another program would have written it."""
  path = tmp_path / "given.safetensors"
  safetensors.write(path, arrays, metadata or {"format": "pt"})
  return path


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", CELLS)
def test_layers_in_a_file_compute_what_pytorch_does(kind, tmp_path):
  arrays = state_dict(CELLS[kind]["name"])
  read = load(written(tmp_path, arrays), CELLS[kind])
  expected = pytorch(kind, arrays, X_BTD)
  np.testing.assert_allclose(ours(read), expected, atol=1e-12)
  # What is written is a layer of PyTorch's with the same outputs, though the
  # biases stand in other places.
  save(tmp_path / "back.safetensors", read)
  back, metadata = safetensors.read(tmp_path / "back.safetensors")
  assert {k: a.shape for k, a in back.items()} == {
    k: a.shape for k, a in arrays.items()
  }
  np.testing.assert_allclose(pytorch(kind, back, X_BTD), expected, atol=1e-12)
  assert metadata["format"] == "pt"


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("depth, both", [(1, False), (3, False), (1, True)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_file_of_ours_says_all(kind, depth, both, bias, tmp_path):
  arrays = state_dict(CELLS[kind]["name"], depth, both, bias, np.float32)
  read = load(written(tmp_path, arrays), CELLS[kind])
  assert read.cell["hidden"] == H and read.cell["bias"] == bias
  path = tmp_path / "back.safetensors"
  save(path, read)
  again = load(path)
  assert again.cell == read.cell
  assert_close(again.params, read.params, atol=0)
  back, _ = safetensors.read(path)
  assert {k: (a.shape, a.dtype) for k, a in back.items()} == {
    k: (a.shape, a.dtype) for k, a in arrays.items()
  }
  weights = {k: a for k, a in arrays.items() if k.startswith("weight")}
  assert_close({k: back[k] for k in weights}, weights, atol=0)


@pytest.mark.parametrize("kind", CELLS)
def test_fresh_parameters_come_back(kind, tmp_path):
  given = layers_of(CELLS[kind], dtype="bfloat16")
  path = tmp_path / "x.safetensors"
  save(path, given)
  assert_close(load(path).params, jax.tree.map(np.asarray, given.params), 0)
  # A setting that changes no parameter is the caller's.
  read = load(path, {"dtype": "float16", "reset": None})
  assert read.cell["dtype"] == "float16"


def test_a_convention_in_the_file_is_followed(tmp_path):
  arrays = state_dict("gru", dtype=np.float32)
  plain = load(written(tmp_path, arrays), {"name": "gru"})
  other = interchange.Convention("zcr", "replaces", "after")
  moved = {}
  for name, a in arrays.items():
    r, z, c = np.split(a, 3)
    moved[name] = np.concatenate([-z, c, r])
  about = {"cell": {"name": "gru"}, "convention": other._asdict()}
  metadata = {"rnnlab": strict_json.dumps(about)}
  read = load(written(tmp_path, moved, metadata))
  assert read.cell == plain.cell
  assert_close(read.params, plain.params, atol=0)
  before = other._replace(reset="before")
  metadata["rnnlab"] = strict_json.dumps(
    about | {"convention": before._asdict()}
  )
  read = load(written(tmp_path, moved, metadata))
  assert read.cell["reset"] == "before"
  with pytest.raises(ValueError, match="cell.*reset='before', not 'after'"):
    load(written(tmp_path, moved, metadata), {"reset": "after"})


def test_a_prefix_finds_the_layer_of_a_model(tmp_path):
  arrays = state_dict("gru", dtype=np.float32)
  model = {f"encoder.{name}": a for name, a in arrays.items()}
  model["steps"] = np.array(3)
  path = written(tmp_path, model)
  read = load(path, {"name": "gru"}, prefix="encoder.")
  alone = load(written(tmp_path, arrays), {"name": "gru"})
  assert_close(read.params, alone.params, atol=0)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_narrow_floats_widen_exactly(name, tmp_path):
  narrow = {
    k: np.asarray(jnp.asarray(a, name))
    for k, a in state_dict("lstm", dtype=np.float32).items()
  }
  wide = {k: a.astype(np.float32) for k, a in narrow.items()}
  read = load(written(tmp_path, narrow), {"name": "lstm"})
  expected = load(written(tmp_path, wide), {"name": "lstm"})
  assert {str(a.dtype) for a in jax.tree.leaves(read.params)} == {"float32"}
  assert_close(read.params, expected.params, atol=0)


GRU = state_dict("gru", dtype=np.float32)


@pytest.mark.parametrize(
  "change, cell, words",
  [
    ({}, None, "says nothing of its cell.*'gru'"),
    ({}, {"name": "ugrnn"}, "one of.*'gru'.*'ugrnn'"),
    ({}, {"name": "rnn"}, "activation"),
    ({}, {"name": "lstm"}, "layer 0, forward: 9 rows.*4 gates"),
    ({}, {"name": "gru", "reset": "before"}, "reset='after', not 'before'"),
    ({}, {"name": "gru", "hidden": 4}, "hidden=3, not 4"),
    ({}, {"name": "gru", "bias": False}, "bias=True, not False"),
    ({}, {"name": "gru", "width": 4}, "model.cell.width"),
    ({"bias_hh_l1_reverse": None}, {"name": "gru"}, "no bias_hh_l1_reverse"),
    ({"weight_hr_l0": np.float32([1])}, {"name": "gru"}, "for weight_hr_l0"),
    ({"weight_ih_l3": np.float32([1])}, {"name": "gru"}, "no bias_hh_l2"),
    ({"bias_ih_l0": np.int32([1])}, {"name": "gru"}, "bias_ih_l0 is of int32"),
    ({"bias_ih_l0": np.zeros(9)}, {"name": "gru"}, "bias_ih_l0.*float64"),
    (
      {"bias_ih_l1": np.zeros(6, np.float32)},
      {"name": "gru"},
      "layer 1, forward: .*bias_ih.*6",
    ),
    (
      {"weight_hh_l1": GRU["weight_hh_l1"][:, :2]},
      {"name": "gru"},
      r"weight_hh_l1 has the shape \(9, 2\), not 3 columns",
    ),
    (
      {"weight_ih_l1": GRU["weight_ih_l1"][:, :3]},
      {"name": "gru"},
      r"weight_ih_l1 has the shape \(9, 3\), not 6 columns",
    ),
    (
      {"weight_hh_l0": GRU["weight_hh_l0"][0]},
      {"name": "gru"},
      r"weight_hh_l0 has the shape \(3,\)",
    ),
  ],
)
def test_a_file_is_refused_by_name(change, cell, words, tmp_path):
  arrays = {k: a for k, a in (GRU | change).items() if a is not None}
  path = written(tmp_path, arrays)
  with pytest.raises(ValueError, match=f"given.safetensors.*{words}"):
    load(path, cell)


@pytest.mark.parametrize(
  "about",
  ["", "[]", '{"cell": {"name": "gru"}}']
  + ['{"cell": {"name": 1}, "convention": {"order": "rzc"}}']
  + ['{"cell": {"name": "gru"}, "convention": {"gates": "rzc"}}'],
)
def test_damaged_metadata_are_refused(about, tmp_path):
  path = written(tmp_path, GRU, {"rnnlab": about})
  with pytest.raises(ValueError, match="given.*'rnnlab' are damaged"):
    load(path)


def layers_of(cell, **settings):
  """Two bidirectional layers as rnnlab would start them."""
  cell = {"hidden": H, **cell, **settings}
  stack = Layers(cell, (None, None)).stack()
  params = wiring.init(stack, jax.random.key(0), D, "both")
  return Layers(cell, params)


def one_way(params, layer, way):
  own = {way: params[layer][way]}
  return (*params[:layer], own, *params[layer + 1 :])


@pytest.mark.parametrize(
  "settings, change, words",
  [
    ({"name": "ugrnn"}, None, "PyTorch has layers of.*'ugrnn'"),
    ({"name": "gru", "reset": "before"}, None, "layer 0.*'after'.*'before'"),
    ({"name": "lstm", "initial": "learned"}, None, "layer 0.*c0_H"),
    (CELLS["gru"], lambda p: one_way(p, 1, "forward"), "layer 1.*'forward'"),
    (
      CELLS["gru"],
      lambda p: one_way(one_way(p, 0, "backward"), 1, "backward"),
      "layer 0 has.*'backward'",
    ),
    (CELLS["gru"], lambda p: p[::-1], "weight_ih_l1.*2.*not 6 columns"),
    (CELLS["gru"], lambda p: (), "no weight_ih_l0"),
  ],
)
def test_what_pytorch_cannot_be_is_refused_by_name(
  settings, change, words, tmp_path
):
  given = layers_of(settings)
  if change:
    given = given._replace(params=change(given.params))
  with pytest.raises(ValueError, match=words):
    save(tmp_path / "x.safetensors", given)
  assert not [*tmp_path.iterdir()]


def test_settings_and_parameters_have_to_fit(tmp_path):
  given = layers_of(CELLS["gru"])
  for setting, value in (("hidden", 5), ("bias", False)):
    odd = given._replace(cell=given.cell | {setting: value})
    with pytest.raises(ValueError, match=f"{setting}={value}"):
      save(tmp_path / "x.safetensors", odd)
