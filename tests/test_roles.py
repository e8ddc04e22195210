"""The role of every character of Python source, and how sources are read."""

import codecs
import pathlib
import sys

import numpy as np
import pytest

from rnnlab.data import python_source, roles

LETTERS = dict(zip(roles.LABELS, "lsatApfcikn'#o ", strict=True))
PROGRAMS = r"""
x = f(y).z  # so
s o tolooa  ####

x += 0x1F if a.b.c() else not 1.5e3
s oo nnnn kk loaotoo kkkk kkk nnnnn

@dec(1)
otttono
async def f(a, *b, c: int = 2, **d) -> str: return lambda e: e
kkkkk kkk fopo opo po lll o no oopo oo lllo kkkkkk kkkkkk po l

class A(B, metaclass=M): x.y = a.b(k=v)[0]
kkkkk colo AAAAAAAAAoloo loa o lotoAoloono

import a.b as c, d
kkkkkk ioi kk so i
from ..e import (f as g, h)
kkkk ooi kkkkkk oi kk so io
from z import *
kkkk i kkkkkk o

for i, j in x: del i, y[j]
kkk so s kk lo kkk so lolo
with f() as a, (g) as (b, *c): (d := 1)
kkkk too kk so olo kk oso osoo os oo no

try: pass
kkko kkkk
except ((A)) as e: raise
kkkkkk ooloo kk so kkkkk

def f():
kkk fooo
  global b, c
  kkkkkk so s
  def g(): nonlocal d
  kkk fooo kkkkkkkk s

a = 1 + \
s o n o
    r"b" 'c'; True
    '''' '''o kkkk

match = [case for case in _]
sssss o ollll kkk ssss kk lo

match (p):
kkkkk oloo
  case A(x=1, y=(b, *c)) | {"k": d, **e} as g if h: pass
  kkkk loaono aooso osoo o o'''o so ooso kk s kk lo kkkk
  case (_): pass
  kkkk okoo kkkk
  case [*_, m.n]: pass
  kkkk ooko loaoo kkkk

é = 'ü'.ñ(à)
s o '''otolo
"""
OF_3_12 = r"""
print(f'a{b!r:>{c}}{{d}}' f"{e.g()=}")
ttttto'''olooo'oloo'''''' ''olotoooo'o

rf'\N{{a}}{b}'; é = f'ü{ñ}' + à
''''''''''olo'o s o '''olo' o l

type X[T: int, *Ts, **P] = dict[T, P]
kkkk sopo lllo oppo oopo o llllolo lo
def f[T](x: T) -> T: pass
kkk fopoopo lo oo lo kkkk
class C[U]: type = 1
kkkkk copoo ssss o n
"""


def programs(text):
  found = []
  for block in text.strip("\n").split("\n\n"):
    rows = block.split("\n")
    source = "\n".join(rows[::2]) + "\n"
    found.append(pytest.param(source, "\n".join(rows[1::2]), id=rows[0][:12]))
  return found


def shown(text):
  found = (LETTERS[roles.LABELS[n]] for n in roles.label(text)[0])
  letters = "".join(
    "\n" if c == "\n" else a for c, a in zip(text, found, strict=True)
  )
  return "\n".join(line.rstrip() for line in letters.split("\n")[:-1])


@pytest.mark.parametrize("text, expected", programs(PROGRAMS))
def test_roles(text, expected):
  assert shown(text) == expected


@pytest.mark.skipif(sys.version_info < (3, 12), reason="grammar of 3.12")
@pytest.mark.parametrize("text, expected", programs(OF_3_12))
def test_roles_in_f_strings_and_of_types(text, expected):
  assert shown(text) == expected


def test_before_3_12_an_f_string_is_one_string():
  if sys.version_info < (3, 12):
    assert shown("f'a{b}'.c\n") == "'''''''oa"


def test_places_in_tokens_and_blanks():
  text = "def  name(a):\n  'x y'\n"
  places = roles.label(text)[1]
  assert places.tolist() == [
    *range(3), 0, 1, *range(4), 0, 0, 0, 0, *range(3), *range(5), 0
  ]  # fmt: skip
  long = f"'{'a' * 300}'\n"
  assert roles.label(long)[1].tolist()[250:304] == [
    *range(250, 255), *[255] * 47, 0
  ]  # fmt: skip
  assert [len(a) for a in roles.label("")] == [0, 0]


@pytest.mark.parametrize("module", [roles.ast, codecs])
def test_real_modules_have_roles_throughout(module):
  text = python_source.decode(pathlib.Path(module.__file__).read_bytes())
  label_T, place_T = roles.label(text)
  assert label_T.dtype == place_T.dtype == np.uint8
  assert len(label_T) == len(place_T) == len(text)
  # Within a token, or a blank, the role is one.
  inside = place_T > 0
  assert (label_T[1:] == label_T[:-1])[inside[1:]].all()
  blank = label_T == roles.IDS["whitespace"]
  assert {c for c, b in zip(text, blank, strict=True) if b} <= set(" \n\t\f\\")
  for name in ("load", "store", "call", "function", "string", "comment"):
    assert (label_T == roles.IDS[name]).any()


def test_what_does_not_parse_is_counted(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  texts = ["x = 1\n", "x = = 1\n", "", "def f(:\n", "\0", "y\n"]
  found = python_source.label(texts, "d1")
  assert found.kept == [0, 2, 5] and found.unparsed == 3
  assert [len(a) for a in found.labels] == [6, 0, 2] and found.unlabelled == 0
  (path,) = tmp_path.rglob("*.npz")
  # A second time they are read; what is damaged is made again.
  monkeypatch.setattr(roles, "label", None)
  again = python_source.label(texts, "d1")
  assert again.kept == found.kept
  assert all(map(np.array_equal, again.labels, found.labels))
  monkeypatch.undo()
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  path.write_bytes(path.read_bytes()[:50])
  assert python_source.label(texts, "d1").kept == found.kept
  assert python_source.label(["x\n"], "d2").kept == [0]
  # Nowhere to write: no cache, and no error.
  monkeypatch.setenv("XDG_CACHE_HOME", str(path))
  assert python_source.label(["x\n"], "d3").kept == [0]


def test_a_name_without_a_role_is_named(monkeypatch):
  monkeypatch.setattr(roles._Roles, "visit_Name", lambda self, node: None)
  with pytest.raises(roles.Unlabelled, match="line 2, column 3: the name 'yy'"):
    roles.label("1\n1+yy\n")


def test_a_folder_is_read_in_order_and_decoded_as_python_does(tmp_path):
  files = {
    "b.py": b"x = 1\r\ny\rz\n",
    "a/c.py": codecs.BOM_UTF8 + "é\n".encode(),
    "a.py": "# coding: latin-1\né\n".encode("latin-1"),
    "bad.py": b"\xff\n",
    "odd.py": b"# coding: no-such\n",
    "note.txt": b"no",
  }
  for name, data in files.items():
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(data)
  found = python_source.read(str(tmp_path))
  assert found.names == ["a.py", "a/c.py", "b.py"] and found.unreadable == 2
  assert found.texts == ["# coding: latin-1\né\n", "é\n", "x = 1\ny\nz\n"]
  assert python_source.read(str(tmp_path)).sha256 == found.sha256
  (tmp_path / "b.py").rename(tmp_path / "d.py")
  assert python_source.read(str(tmp_path)).sha256 != found.sha256
  alone = python_source.read(str(tmp_path / "note.txt"))
  assert alone.names == ["note.txt"] and alone.texts == ["no"]
  with pytest.raises(ValueError, match="nothing: no Python file that can be"):
    python_source.read(str(tmp_path / "nothing"))


def test_the_library_is_that_of_the_interpreter():
  names = python_source.read().names
  assert names == sorted(names) and {"ast.py", "codecs.py"} <= set(names)


def test_the_split_goes_by_name():
  names = [f"m{i}.py" for i in range(200)]
  parts = python_source.split(names)
  assert sorted(sum(parts.values(), [])) == list(range(200))
  assert 5 < len(parts["validation"]) < 40 and 5 < len(parts["test"]) < 40
  fewer = python_source.split(names[50:])
  for split, part in parts.items():
    kept = [names[i] for i in part if i >= 50]
    assert [names[50:][i] for i in fewer[split]] == kept
  single = {"train": [0], "validation": [], "test": []}
  assert python_source.split(["m0.py"]) == single
