"""Reads the text of a compiled program (XLA's HLO) into instructions."""

import dataclasses
import math
import re
from typing import NamedTuple

# `name = type op(operands), attributes`. The type of a tuple has parentheses,
# and TPU layouts have further parentheses within it.
_LINE = re.compile(
    r"\s*(?P<root>ROOT )?%?(?P<name>[\w.-]+) = "
    r"(?P<type>\((?:[^()]|\([^()]*\)|\((?:[^()]|\([^()]*\))*\))*\)|\S+)"
    r" (?P<op>[a-z][\w-]*)\((?P<rest>.*)$"
)
_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_BITS = {"pred": 8, "token": 0, "opaque": 0}


class Shape(NamedTuple):
  """The type of one array.

  Attributes:
    dtype: Name of the dtype in XLA, such as `f32`.
    dims: The dimensions.
  """

  dtype: str
  dims: tuple[int, ...]

  @property
  def n_bytes(self) -> int:
    """Size without padding; numbers smaller than a byte are packed."""
    return -(-math.prod(self.dims) * bits(self.dtype) // 8)


class Instruction(NamedTuple):
  """One line of a computation.

  Attributes:
    op: Operation, such as `dot`, `fusion` or `all-gather-start`.
    type: Type of the result, as text.
    operands: Names of instructions of the same computation. `name#1` is an
      element of a tuple, as newer compilers write it.
    args: Text between the parentheses, such as the value of a constant.
    attributes: Text after the parentheses.
    root: Whether this is the result of the computation.
    line: The whole text.
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
    """Shapes of the result; of a tuple, of all its arrays in order."""
    return _shapes(self.type)

  def calls(self, *keys: str) -> list[str]:
    """Names of the computations that the attributes `key=` name."""
    names: list[str] = []
    for key in keys:
      match = re.search(
          rf"\b{key}=(?:\{{([^}}]*)\}}|%?([\w.-]+))", self.attributes
      )
      if match:
        names += re.findall(r"[\w.-]+", match[1] or match[2] or "")
    return names


# Instructions by name.
Computation = dict[str, Instruction]


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled program.

  Attributes:
    computations: Computations by name.
    entry: Name of the computation that runs first.
  """

  computations: dict[str, Computation]
  entry: str


def parse(text: str) -> Program:
  """Reads a compiled program.

  Args:
    text: Text of `jax.stages.Compiled.as_text`, or of the compiler's dump.

  Raises:
    ValueError: If the text holds no program.
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
    raise ValueError(
        "no ENTRY computation: this is not the text of a compiled program"
    )
  return Program(computations, entry)


def operand_shapes(
    computation: Computation, instruction: Instruction
) -> list[Shape]:
  """Shapes of the operands of an instruction, tuples flattened."""
  shapes: list[Shape] = []
  for operand in instruction.operands:
    name, *path = operand.split("#")
    if name in computation:
      text = computation[name].type
      for index in path:
        text = _element(text, int(index))
      shapes += _shapes(text)
  return shapes


def bits(dtype: str) -> int:
  """Bits per number: the first number in the name of its dtype.

  Raises:
    ValueError: If the name has no number.
  """
  if dtype in _BITS:
    return _BITS[dtype]
  match = re.match(r"[a-z]+(\d+)", dtype)
  if not match:
    raise ValueError(f"unknown dtype {dtype!r} in a compiled program")
  return int(match[1])


def _split(rest: str) -> tuple[str, str]:
  """Splits at the parenthesis that closes the operands."""
  depth = 1
  for i, char in enumerate(rest):
    depth += (char == "(") - (char == ")")
    if not depth:
      return rest[:i], rest[i + 1 :]
  return rest, ""


def _shapes(text: str) -> tuple[Shape, ...]:
  """All shapes in the text of a type."""
  return tuple(
      Shape(dtype, tuple(int(d) for d in dims.split(",") if d))
      for dtype, dims in _SHAPE.findall(text)
  )


def _element(text: str, index: int) -> str:
  """The type of one element, from the type of a tuple."""
  depth, start, elements = 0, 1, []
  for i, char in enumerate(text):
    depth += (char in "([{") - (char in ")]}")
    if (char == "," and depth == 1) or not depth:
      elements.append(text[start:i])
      start = i + 1
  return elements[index].strip()
