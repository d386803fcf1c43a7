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
from collections.abc import Sequence
import dataclasses
import math
import re
from typing import NamedTuple

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
    shapes: of the result, all arrays of a tuple in order.
    operands: names of instructions of the same computation.
    args: what stands between the parentheses: for a constant its value.
    attributes: the text after the parentheses.
    root: whether it is the computation's result.
    line: the whole text.
  """

  op: str
  shapes: tuple[Shape, ...]
  operands: tuple[str, ...]
  args: str
  attributes: str
  root: bool
  line: str

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
          shapes=_shapes(match["type"]),
          operands=tuple(re.findall(r"%([\w.-]+)", args)),
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


class _Counter:
  """Sums costs over computations, each looked at once."""

  def __init__(self, program: Program):
    self._computations = program.computations
    self._done: dict[str, Cost] = {}

  def computation(self, name: str) -> Cost:
    if name not in self._done:
      body = self._computations[name]
      self._done[name] = sum(
          (self._instruction(name, i) for i in body.values()), Cost()
      )
    return self._done[name]

  def _instruction(self, where: str, i: Instruction) -> Cost:
    op = i.op.removesuffix("-start")
    operands = self._operand_shapes(where, i)
    if op in COLLECTIVES:
      return Cost(collective_bytes={op: _moved(i, operands)})
    if op == "dot":
      return Cost(flops=_dot(i, operands[0]))
    if op == "convolution":
      return Cost(flops=_convolution(i, operands))
    if op == "while":
      return self._loop(where, i)
    if op == "conditional":
      names = i.calls(
          "branch_computations", "true_computation", "false_computation"
      )
      branches = [self.computation(name) for name in names]
      size = lambda c: (c.flops, sum(c.collective_bytes.values()))
      return max(branches, key=size)
    inner = Cost()
    if op in ("fusion", "call", "async", "custom-call"):
      names = i.calls("calls", "to_apply", "called_computations")
      inner = sum((self.computation(name) for name in names), Cost())
    if op == "custom-call" and "gemm_backend_config" in i.attributes:
      return inner + Cost(flops=_gemm(i, operands[0]))
    return inner

  def _operand_shapes(self, where: str, i: Instruction) -> list[Shape]:
    body = self._computations[where]
    return [s for name in i.operands if name in body for s in body[name].shapes]

  def _loop(self, where: str, i: Instruction) -> Cost:
    (body,), (condition,) = i.calls("body"), i.calls("condition")
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', i.attributes)
    if known:
      turns: int | None = int(known[1])
    else:
      turns = _turns(self._computations, where, i, condition, body)
    inner = self.computation(body)
    if turns is None:
      return inner + Cost(unknown_loops=1)
    return inner.times(turns)


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
_Value = int | list | None


def _turns(
    computations: dict[str, Computation],
    where: str,
    loop: Instruction,
    condition: str,
    body: str,
) -> int | None:
  """How often a loop runs, by running its counter."""
  state = _evaluate(computations, where, loop.operands[0], [])
  for turn in range(_MAX_TURNS):
    if not isinstance(state, list):
      return None
    goes_on = _root(computations, condition, [state])
    if goes_on is None:
      return None
    if not goes_on:
      return turn
    state = _root(computations, body, [state])
  return None


def _root(
    computations: dict[str, Computation], where: str, args: Sequence[_Value]
) -> _Value:
  """The result of a computation as far as it follows from constants."""
  (name,) = [n for n, i in computations[where].items() if i.root]
  return _evaluate(computations, where, name, args)


def _evaluate(
    computations: dict[str, Computation],
    where: str,
    name: str,
    args: Sequence[_Value],
) -> _Value:
  """The value of an instruction, for integers and tuples of them."""
  i = computations[where][name]
  of = lambda operand: _evaluate(computations, where, operand, args)
  if i.op == "parameter":
    number = int(i.args)
    return args[number] if number < len(args) else None
  if i.op == "get-tuple-element":
    whole = of(i.operands[0])
    match = re.search(r"\bindex=(\d+)", i.attributes)
    assert match is not None, i.line
    return whole[int(match[1])] if isinstance(whole, list) else None
  if i.op == "tuple":
    return [of(operand) for operand in i.operands]
  # Only counters are of interest; arrays would lead through the whole program.
  if len(i.shapes) != 1 or i.shapes[0].dims:
    return None
  if i.op == "constant":
    return _constant(i.args)
  if i.op in ("copy", "bitcast", "convert", "reshape"):
    return of(i.operands[0])
  if i.op in ("fusion", "call"):
    (inner,) = i.calls("calls", "to_apply")
    return _root(computations, inner, [of(o) for o in i.operands])
  if i.op in ("add", "subtract", "compare"):
    a, b = (of(operand) for operand in i.operands)
    if isinstance(a, int) and isinstance(b, int):
      return _arithmetic(i, a, b)
  return None


def _constant(text: str) -> int | None:
  words = {"true": 1, "false": 0}
  if text in words:
    return words[text]
  return int(text) if re.fullmatch(r"-?\d+", text) else None


def _arithmetic(i: Instruction, a: int, b: int) -> int:
  if i.op != "compare":
    return a + b if i.op == "add" else a - b
  match = re.search(r"\bdirection=(\w+)", i.attributes)
  assert match is not None, i.line
  results = {
      "LT": a < b,
      "LE": a <= b,
      "GT": a > b,
      "GE": a >= b,
      "EQ": a == b,
      "NE": a != b,
  }
  return int(results[match[1]])
