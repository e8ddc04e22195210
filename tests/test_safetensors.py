"""Files of arrays: what was written comes back, what is damaged is named."""

import json

import ml_dtypes
import numpy as np
import pytest

from rnnlab.interchange import safetensors

ARRAYS = {
  "b": np.arange(6, dtype=np.float32).reshape(2, 3).T,
  "a": np.array(1.5, np.float64),
  "half": np.array([0.1, -2], np.float16),
  "brain": np.array([0.1, -2], ml_dtypes.bfloat16),
  "none": np.zeros((0, 3), np.int64),
  "flags": np.array([True, False]),
}


def file(tmp_path, header, data=b""):
  """A file as the format's description has it, by hand."""
  text = header if isinstance(header, bytes) else json.dumps(header).encode()
  path = tmp_path / "x.safetensors"
  path.write_bytes(len(text).to_bytes(8, "little") + text + data)
  return path


def entry(first, last, shape=(2,), dtype="F32"):
  return {"dtype": dtype, "shape": shape, "data_offsets": [first, last]}


def assert_same(found, expected):
  assert found.keys() == expected.keys()
  for name, array in expected.items():
    assert found[name].dtype == array.dtype
    np.testing.assert_array_equal(found[name], array)


def test_what_was_written_comes_back(tmp_path):
  path = tmp_path / "x.safetensors"
  safetensors.write(path, ARRAYS, {"whose": "ö"})
  found, metadata = safetensors.read(path)
  assert_same(found, ARRAYS)
  assert metadata == {"whose": "ö"}
  assert [p.name for p in tmp_path.iterdir()] == [path.name]
  length = int.from_bytes(path.read_bytes()[:8], "little")
  assert length % 8 == 0


def test_a_file_by_hand(tmp_path):
  header = {"y": entry(8, 12, (1,)), "x": entry(0, 8)}
  data = np.array([1, -2, 3], "<f4").tobytes()
  found, metadata = safetensors.read(file(tmp_path, header, data))
  assert_same(found, {"x": np.float32([1, -2]), "y": np.float32([3])})
  assert metadata == {}


def test_the_package_of_that_name_agrees(tmp_path):
  reason = "safetensors is no dependency, only an oracle where it is installed"
  package = pytest.importorskip("safetensors", reason=reason)
  theirs = pytest.importorskip("safetensors.numpy", reason=reason)
  path = tmp_path / "x.safetensors"
  arrays = {k: np.ascontiguousarray(a) for k, a in ARRAYS.items()}
  safetensors.write(path, arrays, {"whose": "ours"})
  with package.safe_open(path, "np") as opened:
    assert opened.metadata() == {"whose": "ours"}
    del arrays["brain"]  # which numpy has no word for
    assert_same({k: opened.get_tensor(k) for k in arrays}, arrays)
  theirs.save_file(arrays, path, {"whose": "theirs"})
  found, metadata = safetensors.read(path)
  assert_same(found, arrays)
  assert metadata == {"whose": "theirs"}


@pytest.mark.parametrize(
  "header, data, words",
  [
    (b"", b"", "Expecting value"),
    ([1], b"", "no object"),
    ({"x": entry(0, 8)}, bytes(4), "x of F32.*all end at 4"),
    ({"x": entry(0, 8)}, bytes(9), "9 bytes of data"),
    ({"x": entry(4, 12)}, bytes(12), "x of F32.*4 .. 12"),
    ({"x": entry(0, 8), "y": entry(4, 12)}, bytes(12), "y of F32"),
    ({"x": entry(0, 8, (3,))}, bytes(8), r"x of F32, shape \[3\]"),
    ({"x": entry(0, 8, (-1, -2))}, bytes(8), r"x of F32, shape \[-1, -2\]"),
    ({"x": entry(0, 8, dtype="F8_E4M3")}, bytes(8), "x is of 'F8_E4M3'"),
    ({"x": {"dtype": "F32"}}, b"", "data_offsets"),
    ({"x": 1}, b"", "subscriptable"),
    ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
    (b'{"x": 1, "x": 2}', b"", "'x'.*twice"),
  ],
)
def test_what_is_damaged_is_named(tmp_path, header, data, words):
  path = file(tmp_path, header, data)
  with pytest.raises(ValueError, match=f"{path.name} is no.*{words}"):
    safetensors.read(path)


@pytest.mark.parametrize("length", [0, 5, 40, -1])
def test_a_file_cut_short_is_refused(tmp_path, length):
  path = tmp_path / "x.safetensors"
  safetensors.write(path, ARRAYS, {})
  path.write_bytes(path.read_bytes()[:length])
  with pytest.raises(ValueError, match="x.safetensors is no whole"):
    safetensors.read(path)


def test_a_type_without_a_name_leaves_the_file_alone(tmp_path):
  path = file(tmp_path, {})
  with pytest.raises(ValueError, match="c is of complex64"):
    safetensors.write(path, {"c": np.zeros(1, np.complex64)}, {})
  assert safetensors.read(path) == ({}, {})
