"""Counts what a compiled program computes and sends, from its text.

XLA's own `cost_analysis` counts the body of a loop once, and is missing for
described GPUs. Here a loop counts as often as it runs.

Counted, per device and per run of the program:
- floating-point operations: two per multiply-add of every matrix product
  (`dot`, the `convolution` that a TPU makes of it, cuBLAS calls). Nothing else:
  no elementwise work.
- bytes of collectives: of each, the larger of what a device puts in and what it
  gets out. A ring moves about that much over each device's link, twice as much
  for an all-reduce.
- a conditional as its most expensive branch.
"""

from collections import Counter
from collections.abc import Callable, Sequence
import dataclasses
import math
import operator
import re
from typing import Any, NamedTuple

import numpy as np

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
)

# A loop's counter is followed for so many turns, then it counts as unknown.
_MAX_TURNS = 20_000
# `name = type op(operands), attributes`; a tuple's type has parentheses, in
# which TPU layouts have more.
_LINE = re.compile(
    r"\s*(?P<root>ROOT )?%?(?P<name>[\w.-]+) = "
    r"(?P<type>\((?:[^()]|\([^()]*\)|\((?:[^()]|\([^()]*\))*\))*\)|\S+)"
    r" (?P<op>[a-z][\w-]*)\((?P<rest>.*)$"
)
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_BITS = {"pred": 8, "token": 0, "opaque": 0}


class Shape(NamedTuple):
  """Of one array: `dtype` in XLA's words (`f32`), and dimensions."""

  dtype: str
  dims: tuple[int, ...]

  @property
  def n_bytes(self) -> int:
    """Without padding; sub-byte numbers are packed."""
    return -(-math.prod(self.dims) * _bits(self.dtype) // 8)


class Instruction(NamedTuple):
  """One line of a computation.

  Attributes:
    op: for example `dot`, `fusion`, `all-gather-start`.
    type: of the result, as text.
    operands: names of instructions of the same computation; `name#1` is an
      element of a tuple, as newer compilers write it.
    args: what stands between the parentheses: for a constant its value.
    attributes: the text after the parentheses.
    root: whether it is the computation's result.
    line: the whole text.
  """

  op: str
  type: str
  operands: tuple[str, ...]
  args: str
  attributes: str
  root: bool
  line: str

  @property
  def shapes(self) -> tuple[Shape, ...]:
    """Of the result, all arrays of a tuple in order."""
    return _shapes(self.type)

  def calls(self, *keys: str) -> list[str]:
    """Names of the computations that `key=` attributes name."""
    found: list[str] = []
    for key in keys:
      match = re.search(
          rf"\b{key}=(?:\{{([^}}]*)\}}|%?([\w.-]+))", self.attributes
      )
      if match:
        found += re.findall(r"[\w.-]+", match[1] or match[2] or "")
    return found


Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Program:
  """The text of `jax.stages.Compiled.as_text`, read.

  Attributes:
    computations: instructions by name, by the computation's name.
    entry: name of the computation that runs first.
  """

  computations: dict[str, Computation]
  entry: str


@dataclasses.dataclass(frozen=True)
class Cost:
  """What a program does, per device and run; see the module.

  Attributes:
    flops: floating-point operations of matrix products.
    collective_bytes: by kind, of those in `COLLECTIVES` that occur.
    unknown_loops: loops that run as often as the data say, counted once.
  """

  flops: int = 0
  collective_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
  unknown_loops: int = 0

  def __add__(self, other: "Cost") -> "Cost":
    total = Counter(self.collective_bytes)
    total.update(other.collective_bytes)
    return Cost(
        self.flops + other.flops,
        dict(total),
        self.unknown_loops + other.unknown_loops,
    )

  def times(self, n: int) -> "Cost":
    """Of n runs."""
    scaled = {k: n * v for k, v in self.collective_bytes.items()}
    return Cost(n * self.flops, scaled, self.unknown_loops)


def parse(text: str) -> Program:
  """Reads a compiled program.

  Args:
    text: of `jax.stages.Compiled.as_text`.

  Raises:
    ValueError: there is no program in it.
  """
  computations: dict[str, Computation] = {}
  entry = ""
  current: Computation = {}
  for line in text.splitlines():
    if line.endswith("{") and "->" in line:
      name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
      current = computations.setdefault(name, {})
      entry = name if line.startswith("ENTRY ") else entry
      continue
    match = _LINE.match(line)
    if match:
      args, attributes = _split(match["rest"])
      current[match["name"]] = Instruction(
          op=match["op"],
          type=match["type"],
          operands=tuple(re.findall(r"%([\w.-]+(?:#\d+)*)", args)),
          args=args,
          attributes=attributes,
          root=bool(match["root"]),
          line=line.strip(),
      )
  if not entry:
    raise ValueError("no ENTRY computation: this is no compiled program's text")
  return Program(computations, entry)


def cost(text: str) -> Cost:
  """Counts a compiled program.

  Args:
    text: of `jax.stages.Compiled.as_text`.

  Returns:
    Its cost per device.
  """
  program = parse(text)
  return _Counter(program).computation(program.entry)


def _split(rest: str) -> tuple[str, str]:
  """What stands before and after the parenthesis that closes the operands."""
  depth = 1
  for i, char in enumerate(rest):
    depth += (char == "(") - (char == ")")
    if not depth:
      return rest[:i], rest[i + 1 :]
  return rest, ""


def _shapes(text: str) -> tuple[Shape, ...]:
  return tuple(
      Shape(dtype, tuple(int(d) for d in dims.split(",") if d))
      for dtype, dims in _SHAPE.findall(text)
  )


def _bits(dtype: str) -> int:
  """Size of a number: the first number in its dtype's name."""
  if dtype in _BITS:
    return _BITS[dtype]
  match = re.match(r"[a-z]+(\d+)", dtype)
  if not match:
    raise ValueError(f"unknown dtype {dtype!r} in a compiled program")
  return int(match[1])


def _element(text: str, index: int) -> str:
  """Of a tuple's type, the type of one element."""
  depth, start, found = 0, 1, []
  for i, char in enumerate(text):
    depth += (char in "([{") - (char in ")]}")
    if (char == "," and depth == 1) or not depth:
      found.append(text[start:i])
      start = i + 1
  return found[index].strip()


class _Counter:
  """Sums costs over computations, each looked at once per known arguments."""

  def __init__(self, program: Program):
    self._computations = program.computations
    self._done: dict[tuple[str, _Value], Cost] = {}

  def computation(self, name: str, args: tuple["_Value", ...] = ()) -> Cost:
    if (name, args) not in self._done:
      frame = _Frame(self._computations, name, args)
      self._done[name, args] = sum(
          (self._instruction(frame, i) for i in frame.body.values()), Cost()
      )
    return self._done[name, args]

  def _instruction(self, frame: "_Frame", i: Instruction) -> Cost:
    op = i.op.removesuffix("-start")
    operands = _operand_shapes(frame.body, i)
    if op in COLLECTIVES:
      # As a TPU writes it: a fusion that sums, and keeps a slice.
      scatter = frame.name.startswith("all-reduce-scatter")
      kind = "reduce-scatter" if scatter else op
      return Cost(collective_bytes={kind: _moved(i, operands)})
    if op == "dot":
      return Cost(flops=_dot(i, operands[0]))
    if op == "convolution":
      return Cost(flops=_convolution(i, operands))
    if op == "while":
      return self._loop(frame, i)
    if op == "conditional":
      names = i.calls(
          "branch_computations", "true_computation", "false_computation"
      )
      branches = [
          self.computation(name, (frame.value(operand),))
          for name, operand in zip(names, i.operands[1:], strict=True)
      ]
      size = lambda c: (c.flops, sum(c.collective_bytes.values()))
      return max(branches, key=size)
    inner = Cost()
    if op in ("fusion", "call", "async", "custom-call"):
      args = tuple(frame.value(operand) for operand in i.operands)
      names = i.calls("calls", "to_apply", "called_computations")
      inner = sum((self.computation(name, args) for name in names), Cost())
    if op == "custom-call" and "gemm_backend_config" in i.attributes:
      return inner + Cost(flops=_gemm(i, operands[0]))
    return inner

  def _loop(self, frame: "_Frame", i: Instruction) -> Cost:
    (body,), (condition,) = i.calls("body"), i.calls("condition")
    start = frame.value(i.operands[0])
    turns, constants = _turns(self._computations, start, condition, body)
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', i.attributes)
    if known:
      turns = int(known[1])
    inner = self.computation(body, (constants,))
    if turns is None:
      return inner + Cost(unknown_loops=1)
    return inner.times(turns)


def _operand_shapes(body: Computation, i: Instruction) -> list[Shape]:
  shapes: list[Shape] = []
  for operand in i.operands:
    name, *path = operand.split("#")
    if name in body:
      text = body[name].type
      for index in path:
        text = _element(text, int(index))
      shapes += _shapes(text)
  return shapes


def _moved(i: Instruction, operands: Sequence[Shape]) -> int:
  """Bytes of a collective: the larger of operands and results."""
  sent = sum(s.n_bytes for s in operands)
  received = sum(s.n_bytes for s in i.shapes)
  if i.op.endswith("-start") and len(i.shapes) > len(operands):
    # The result is of (operands, results, counters).
    received = sum(s.n_bytes for s in i.shapes if s.dims) - sent
  return max(sent, received)


def _numbers(text: str, key: str) -> list[int]:
  """Of `key={1,2}`; empty where the key is missing."""
  match = re.search(rf"\b{key}=\{{([\d,]*)\}}", text)
  return [int(n) for n in match[1].split(",") if n] if match else []


def _dot(i: Instruction, lhs: Shape) -> int:
  contracted = _numbers(i.attributes, "lhs_contracting_dims")
  depth = math.prod(lhs.dims[d] for d in contracted)
  return 2 * math.prod(i.shapes[0].dims) * depth


def _gemm(i: Instruction, lhs: Shape) -> int:
  """A cuBLAS call: the product that it was made of is in its configuration."""
  match = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', i.attributes)
  contracted = re.findall(r"\d+", match[1]) if match else []
  depth = math.prod(lhs.dims[int(d)] for d in contracted)
  return 2 * math.prod(i.shapes[0].dims) * depth


def _convolution(i: Instruction, operands: Sequence[Shape]) -> int:
  """Multiply-adds of pairs that exist: not of padding or of dilation's holes.

  A TPU writes batch dimensions of a product as spatial ones, dilated so that
  each output has one such pair.
  """
  match = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes)
  assert match is not None, i.line
  lhs_labels, rhs_labels, out_labels = match.groups()
  lhs = dict(zip(lhs_labels, operands[0].dims, strict=True))
  rhs = dict(zip(rhs_labels, operands[1].dims, strict=True))
  out = dict(zip(out_labels, i.shapes[0].dims, strict=True))
  spatial = [label for label in out_labels if label.isdigit()]
  window = _window(i.attributes, len(spatial))
  pairs = math.prod(
      _pairs(lhs[d], rhs[d], out[d], *window[int(d)]) for d in spatial
  )
  return 2 * out["b"] * out["f"] * rhs["i"] * pairs


def _window(text: str, n: int) -> list[tuple[int, int, int, int]]:
  """Stride, low padding and both dilations of each spatial dimension."""
  match = re.search(r"window=\{([^}]*)\}", text)
  fields = dict(f.split("=") for f in match[1].split()) if match else {}

  def numbers(key: str, default: int) -> list[int]:
    if key not in fields:
      return [default] * n
    return [int(v.split("_")[0]) for v in fields[key].split("x")]

  return list(
      zip(
          numbers("stride", 1),
          numbers("pad", 0),
          numbers("lhs_dilate", 1),
          numbers("rhs_dilate", 1),
          strict=True,
      )
  )


def _pairs(
    n_lhs: int,
    n_rhs: int,
    n_out: int,
    stride: int,
    pad: int,
    lhs_dilate: int,
    rhs_dilate: int,
) -> int:
  """(output, kernel) positions of one dimension that meet an input."""
  total = 0
  start = np.arange(n_out) * stride - pad
  for k in range(n_rhs):
    at = start + k * rhs_dilate
    inside = (at >= 0) & (at <= (n_lhs - 1) * lhs_dilate)
    total += int(np.sum(inside & (at % lhs_dilate == 0)))
  return total


# What a loop's counter is made of: a number, a tuple, or None for what does not
# follow from constants.
_Value = int | tuple | None


def _turns(
    computations: dict[str, Computation],
    start: _Value,
    condition: str,
    body: str,
) -> tuple[int | None, _Value]:
  """How often a loop runs, by running its counter; what of its state stays."""
  state = stays = start
  for turn in range(_MAX_TURNS):
    goes_on = _Frame(computations, condition, (state,)).root()
    if not isinstance(goes_on, int):
      break
    if not goes_on:
      return turn, stays
    state = _Frame(computations, body, (state,)).root()
    stays = _common(stays, state)
  return None, None


def _common(a: _Value, b: _Value) -> _Value:
  """What two values share."""
  if isinstance(a, tuple) and isinstance(b, tuple):
    return tuple(map(_common, a, b))
  return a if a == b else None


class _Frame:
  """One run of a computation, as far as it follows from constants."""

  def __init__(
      self,
      computations: dict[str, Computation],
      name: str,
      args: tuple[_Value, ...],
  ):
    self.name = name
    self.body = computations[name]
    self._computations = computations
    self._args = args
    self._values: dict[str, _Value] = {}

  def root(self) -> _Value:
    """The result."""
    (name,) = [n for n, i in self.body.items() if i.root]
    return self.value(name)

  def value(self, operand: str) -> _Value:
    """Of an instruction, or of an element of it: see `Instruction`."""
    name, *path = operand.split("#")
    if name not in self._values:
      self._values[name] = self._evaluate(self.body[name])
    value = self._values[name]
    for index in path:
      value = _at(value, int(index))
    return value

  def _evaluate(self, i: Instruction) -> _Value:
    of = self.value
    # Only counters are of interest; arrays would lead through everything.
    if not i.type.startswith("(") and not _is_counter(i.shapes[0]):
      return None
    if i.op == "parameter":
      number = int(i.args)
      return self._args[number] if number < len(self._args) else None
    if i.op == "constant":
      return _constant(i.args)
    if i.op in _SAME:
      return of(i.operands[0])
    if i.op == "tuple":
      return tuple(of(operand) for operand in i.operands)
    if i.op == "get-tuple-element":
      match = re.search(r"\bindex=(\d+)", i.attributes)
      assert match is not None, i.line
      return _at(of(i.operands[0]), int(match[1]))
    if i.op in ("fusion", "call"):
      return self._call(i)
    # Transfers and calls while others run: their results are known as at once.
    if i.op == "copy-start":
      return of(i.operands[0]), None, None
    if i.op == "async-start":
      return None, self._call(i), None
    if i.op in ("copy-done", "async-done"):
      return _at(of(i.operands[0]), 0 if i.op == "copy-done" else 1)
    if i.op in _ARITHMETIC or i.op in ("compare", "select"):
      values = [of(operand) for operand in i.operands]
      if all(isinstance(value, int) for value in values):
        return _arithmetic(i, values)
    return None

  def _call(self, i: Instruction) -> _Value:
    (inner,) = i.calls("calls", "to_apply")
    args = tuple(self.value(operand) for operand in i.operands)
    return _Frame(self._computations, inner, args).root()


# Operations that hand on one number, or a tuple, as it is.
_SAME = (
    "async-update",
    "bitcast",
    "broadcast",
    "convert",
    "copy",
    "opt-barrier",
    "reshape",
)
_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "and": operator.and_,
    "maximum": max,
    "minimum": min,
    "multiply": operator.mul,
    "or": operator.or_,
    "subtract": operator.sub,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}


def _is_counter(shape: Shape) -> bool:
  """Whether it is one whole number."""
  whole = re.fullmatch(r"[su]\d+|pred", shape.dtype)
  return bool(whole) and math.prod(shape.dims) == 1


def _at(value: _Value, index: int) -> _Value:
  return value[index] if isinstance(value, tuple) else None


def _constant(text: str) -> int | None:
  text = text.strip("{} ")  # Of an array of one.
  words = {"true": 1, "false": 0}
  if text in words:
    return words[text]
  return int(text) if re.fullmatch(r"-?\d+", text) else None


def _arithmetic(i: Instruction, values: Sequence[Any]) -> int:
  """The result of one operation on whole numbers, in its dtype."""
  if i.op == "select":
    return values[1] if values[0] else values[2]
  if i.op == "compare":
    match = re.search(r"\bdirection=(\w+)", i.attributes)
    assert match is not None, i.line
    return int(_COMPARISONS[match[1]](*values))
  dtype = i.shapes[0].dtype
  n = 2 ** _bits(dtype)
  low = -n // 2 if dtype.startswith("s") else 0
  return (_ARITHMETIC[i.op](*values) - low) % n + low
