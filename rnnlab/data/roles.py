"""What every character of Python source is there for, exactly.

`tokenize` says where tokens are, `ast` what the names among them do: the same
name is loaded here, stored there, called or declared elsewhere. What the
grammar alone decides (keywords that are names in another place, such as
`match`) is decided by it.

Before Python 3.12 an f-string is one token, all of it a string; from 3.12 on
its expressions have the roles that they have outside.
"""

import ast
import bisect
import io
import keyword
import token
import tokenize
import warnings

import numpy as np

# A label's number is its place here. What names do comes first.
NAMES = ("load", "store", "attribute", "call", "argument", "parameter")
NAMES += ("function", "class", "import")
LABELS = (*NAMES, "keyword", "number", "string", "comment", "operator")
LABELS += ("whitespace",)
IDS = {name: i for i, name in enumerate(LABELS)}
# Of a character's place in its token; further in is this.
FURTHEST = 255


# What makes a text one that does not parse.
BROKEN = (SyntaxError, ValueError, RecursionError, MemoryError)


class Unlabelled(ValueError):
  """A character whose role is not known; where, and what stands there."""


def label(text: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns label_T and place_T of the characters of a program, both uint8.

  label: the number in LABELS. place: how many characters of the same token
  stand before it, FURTHEST at most; between tokens, of the same blank.

  load: a name that is read. store: one that is bound or deleted, in any way:
  assignment, loop, with, except, global, a pattern, the name after `as`.
  attribute: after a dot, or the name of one in a class pattern. call: the name
  or attribute that is called. argument: the name in `f(name=...)`. parameter:
  of a function, a lambda or a type. function, class: in their definition.
  import: in an import statement. keyword: soft ones where they are keywords.
  string: with prefix and quotes; of an f-string all but what is in braces.
  operator: brackets and delimiters too, and an f-string's `!r`. whitespace:
  newlines and line continuations too.

  Lines end in "\\n" alone. Raises SyntaxError (or ValueError, RecursionError)
  for what does not parse, Unlabelled for a role that is not known.
  """
  with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that an escape or an `is` looks wrong
    tree = ast.parse(text)
  tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
  place = _Places(text)
  roles = _Roles(place, tokens)
  roles.visit(tree)
  label_T = np.full(len(text), IDS["whitespace"], np.uint8)
  starts, inside, before = [], 0, None
  for i, tok in enumerate(tokens):
    begin, end = place.of(tok.start), place.of(tok.end)
    kind = token.tok_name[tok.type]
    inside += kind.endswith("STRING_START") - kind.endswith("STRING_END")
    name = _ROLE_OF.get(kind)
    if kind == "NAME":
      name = roles.of(begin, end, tok, before)
    elif kind.endswith(("STRING_START", "STRING_MIDDLE", "STRING_END")):
      name = "string"
    if kind.endswith("STRING_MIDDLE"):
      end = _doubled(text, begin, end, tokens[i + 1], place)
    before = tok
    if name is None or begin == end:
      continue
    label_T[begin:end] = IDS[name]
    starts.append((begin, end))
  return label_T, _places_in(text, starts)


_ROLE_OF = {
  "NUMBER": "number",
  "STRING": "string",
  "COMMENT": "comment",
  "OP": "operator",
}


def _doubled(text, begin, end, following, place):
  """The end of an f-string's literal part, `{{` and `}}` counted whole.

  Its token has one brace of two, so the positions after it leave one out.
  """
  limit = place.of(following.start)
  while end < limit and text[end] in "{}" and text[end - 1] == text[end]:
    end += 1
  return end


def _places_in(text, starts):
  """The place of every character in its token, or in its blank."""
  first_T = np.zeros(len(text), bool)
  first_T[:1] = True
  covered = 0
  for begin, end in starts:
    if text[covered:begin].strip(" \t\f\n\\"):
      at = (
        covered
        + len(text[covered:begin])
        - len(text[covered:begin].lstrip(" \t\f\n\\"))
      )
      raise Unlabelled(f"character {at + 1}: {text[at]!r} belongs to no token")
    if covered < begin:
      first_T[covered] = True
    first_T[begin] = True
    covered = end
  if covered < len(text):
    first_T[covered] = True
  step_T = np.arange(len(text))
  begun_T = np.maximum.accumulate(np.where(first_T, step_T, 0))
  return np.minimum(step_T - begun_T, FURTHEST).astype(np.uint8)


class _Places:
  """Offsets in a text, from the lines and columns of tokens and of nodes."""

  def __init__(self, text):
    self.lines = io.StringIO(text).readlines()
    self.starts = [0]
    for line in self.lines:
      self.starts.append(self.starts[-1] + len(line))

  def of(self, position):
    """Of a token's (line from 1, column in characters)."""
    line, column = position
    return min(
      self.starts[min(line, len(self.starts)) - 1] + column, self.starts[-1]
    )

  def begin(self, node):
    return self._of_bytes(node.lineno, node.col_offset)

  def end(self, node):
    return self._of_bytes(node.end_lineno, node.end_col_offset)

  def _of_bytes(self, line, column):
    text = self.lines[line - 1]
    if not text.isascii():
      column = len(text.encode()[:column].decode())
    return self.starts[line - 1] + column


class _Roles(ast.NodeVisitor):
  """The roles of names, by where they begin or where they end."""

  def __init__(self, place, tokens):
    self.place = place
    self.begins, self.ends = {}, {}
    self.keywords = set()  # where soft ones begin
    self.tokens = [t for t in tokens if t.type in (token.NAME, token.OP)]
    self.at = [place.of(t.start) for t in self.tokens]

  def of(self, begin, end, tok, before):
    """The role of a name token."""
    if begin in self.keywords or keyword.iskeyword(tok.string):
      return "keyword"
    if before is not None and before.type == token.NAME:
      if before.string in ("def", "class"):
        return "function" if before.string == "def" else "class"
    role = self.begins.get(begin) or self.ends.get(end)
    if role:
      return role
    if before is not None and before.string == "!":
      return "operator"  # of an f-string's conversion
    raise Unlabelled(
      f"line {tok.start[0]}, column {tok.start[1] + 1}: the name "
      f"{tok.string!r} has no role"
    )

  def within(self, node):
    """The names and operators of a node, from its first to its last."""
    first = bisect.bisect_left(self.at, self.place.begin(node))
    last = bisect.bisect_left(self.at, self.place.end(node))
    return range(first, last)

  def name_after(self, offset, word=None):
    """The place of the first name from there on, or of that after `word`."""
    i = bisect.bisect_left(self.at, offset)
    while self.tokens[i].string != word if word else not self._is_name(i):
      i += 1
    return self.at[i + 1 if word else i]

  def _is_name(self, i):
    return self.tokens[i].type == token.NAME

  def visit_Name(self, node):
    role = "load" if isinstance(node.ctx, ast.Load) else "store"
    self.begins.setdefault(self.place.begin(node), role)

  def visit_Attribute(self, node):
    self.ends.setdefault(self.place.end(node), "attribute")
    self.generic_visit(node)

  def visit_Call(self, node):
    if isinstance(node.func, ast.Name):
      self.begins[self.place.begin(node.func)] = "call"
    elif isinstance(node.func, ast.Attribute):
      self.ends[self.place.end(node.func)] = "call"
    self.generic_visit(node)

  def visit_keyword(self, node):
    if node.arg is not None:
      self.begins[self.place.begin(node)] = "argument"
    self.generic_visit(node)

  def visit_arg(self, node):
    self.begins[self.place.begin(node)] = "parameter"
    self.generic_visit(node)

  def visit_Import(self, node):
    for i in self.within(node):
      if self._is_name(i):
        self.begins[self.at[i]] = "import"
    for alias in node.names:
      if alias.asname is not None:
        start = self.place.begin(alias)
        self.begins[self.name_after(start, "as")] = "store"

  visit_ImportFrom = visit_Import

  def visit_Global(self, node):
    for i in self.within(node):
      if self._is_name(i):
        self.begins[self.at[i]] = "store"

  visit_Nonlocal = visit_Global

  def visit_ExceptHandler(self, node):
    if node.name is not None:
      after = self.place.end(node.type)
      self.begins[self.name_after(after, "as")] = "store"
    self.generic_visit(node)

  def visit_Match(self, node):
    self.keywords.add(self.place.begin(node))
    for case in node.cases:
      i = bisect.bisect_left(self.at, self.place.begin(case.pattern)) - 1
      while not self._is_name(i):  # a bracket around the whole pattern
        i -= 1
      self.keywords.add(self.at[i])
    self.generic_visit(node)

  def visit_MatchAs(self, node):
    if node.name is not None:
      self.ends[self.place.end(node)] = "store"
    else:
      self.keywords.add(self.place.begin(node))  # the wildcard, _
    self.generic_visit(node)

  def visit_MatchStar(self, node):
    at = self.name_after(self.place.begin(node))
    if node.name is not None:
      self.begins[at] = "store"
    else:
      self.keywords.add(at)

  def visit_MatchMapping(self, node):
    if node.rest is not None:
      names = [i for i in self.within(node) if self._is_name(i)]
      self.begins[self.at[names[-1]]] = "store"
    self.generic_visit(node)

  def visit_MatchClass(self, node):
    # Nothing else in a pattern has an equals sign.
    for i in self.within(node):
      if self._is_name(i) and self.tokens[i + 1].string == "=":
        self.begins[self.at[i]] = "attribute"
    self.generic_visit(node)

  def visit_TypeAlias(self, node):
    self.keywords.add(self.place.begin(node))
    self.generic_visit(node)

  def visit_TypeVar(self, node):
    self.begins[self.name_after(self.place.begin(node))] = "parameter"
    self.generic_visit(node)

  visit_ParamSpec = visit_TypeVarTuple = visit_TypeVar
