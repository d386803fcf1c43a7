"""Finds how often the loops of a compiled program run.

A loop's counter is an integer that starts from a constant. It is followed
through the program by evaluating the few instructions that it depends on, and
nothing else.
"""

from collections.abc import Callable, Mapping, Sequence
import math
import operator
import re
from typing import TypeAlias

from experiments.planning import hlo_text
from experiments.planning.hlo_text import Computation, Instruction

# A loop with more iterations counts as one of unknown length.
_MAX_ITERATIONS = 20_000
# An integer, a tuple of values, or None for a value that does not follow from
# constants.
Value: TypeAlias = "int | tuple[Value, ...] | None"


class Frame:
  """One run of a computation, as far as its values follow from constants.

  Attributes:
    name: Name of the computation.
    body: Its instructions by name.
  """

  def __init__(
      self,
      computations: Mapping[str, Computation],
      name: str,
      args: tuple[Value, ...],
  ):
    """Prepares a run of the computation `name` with these arguments."""
    self.name = name
    self.body = computations[name]
    self._computations = computations
    self._args = args
    self._values: dict[str, Value] = {}

  def root(self) -> Value:
    """Value of the computation's result."""
    (name,) = [n for n, i in self.body.items() if i.root]
    return self.value(name)

  def value(self, operand: str) -> Value:
    """Value of an operand, named as in `hlo_text.Instruction.operands`."""
    name, *path = operand.split("#")
    if name not in self._values:
      self._values[name] = self._evaluate(self.body[name])
    value = self._values[name]
    for index in path:
      value = _at(value, int(index))
    return value

  def _evaluate(self, instruction: Instruction) -> Value:
    """Value of an instruction."""
    op, operands = instruction.op, instruction.operands
    # Only counters matter; following arrays would evaluate the whole program.
    is_tuple = instruction.type.startswith("(")
    if not is_tuple and not _is_counter(instruction.shapes[0]):
      return None
    if op == "parameter":
      number = int(instruction.args)
      return self._args[number] if number < len(self._args) else None
    if op == "constant":
      return _constant(instruction.args)
    if op in _SAME:
      return self.value(operands[0])
    if op == "tuple":
      return tuple(self.value(operand) for operand in operands)
    if op == "get-tuple-element":
      match = re.search(r"\bindex=(\d+)", instruction.attributes)
      assert match is not None, instruction.line
      return _at(self.value(operands[0]), int(match[1]))
    if op in ("fusion", "call"):
      return self._call(instruction)
    # Asynchronous copies and calls are evaluated as if they ended at once.
    if op == "copy-start":
      return self.value(operands[0]), None, None
    if op == "async-start":
      return None, self._call(instruction), None
    if op in ("copy-done", "async-done"):
      return _at(self.value(operands[0]), 0 if op == "copy-done" else 1)
    if op in _ARITHMETIC or op in ("compare", "select"):
      values = [self.value(operand) for operand in operands]
      numbers = [value for value in values if isinstance(value, int)]
      if len(numbers) == len(values):
        return _arithmetic(instruction, numbers)
    return None

  def _call(self, instruction: Instruction) -> Value:
    """Value that a called computation returns."""
    (inner,) = instruction.calls("calls", "to_apply")
    args = tuple(self.value(operand) for operand in instruction.operands)
    return Frame(self._computations, inner, args).root()


def trip_count(
    computations: Mapping[str, Computation],
    start: Value,
    condition: str,
    body: str,
) -> tuple[int | None, Value]:
  """Counts the iterations of a loop by running its counter.

  Args:
    computations: Computations of the program, by name.
    start: State of the loop before its first iteration.
    condition: Name of the computation that decides whether to go on.
    body: Name of the computation that makes the next state.

  Returns:
    The number of iterations, and the part of the state that is the same in all
    of them. Both are None if the number does not follow from constants.
  """
  state = stays = start
  for iteration in range(_MAX_ITERATIONS):
    goes_on = Frame(computations, condition, (state,)).root()
    if not isinstance(goes_on, int):
      break
    if not goes_on:
      return iteration, stays
    state = Frame(computations, body, (state,)).root()
    stays = _common(stays, state)
  return None, None


def _common(a: Value, b: Value) -> Value:
  """The parts of two values that are equal."""
  if isinstance(a, tuple) and isinstance(b, tuple):
    return tuple(map(_common, a, b))
  return a if a == b else None


# Operations that return their first operand unchanged, a number or a tuple.
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


def _is_counter(shape: hlo_text.Shape) -> bool:
  """Whether this is the shape of a single integer."""
  whole = re.fullmatch(r"[su]\d+|pred", shape.dtype)
  return bool(whole) and math.prod(shape.dims) == 1


def _at(value: Value, index: int) -> Value:
  """An element of a tuple; None if the tuple is unknown."""
  return value[index] if isinstance(value, tuple) else None


def _constant(text: str) -> int | None:
  """Reads the value of a constant; None if it is not an integer."""
  text = text.strip("{} ")  # Braces enclose an array of one element.
  words = {"true": 1, "false": 0}
  if text in words:
    return words[text]
  return int(text) if re.fullmatch(r"-?\d+", text) else None


def _arithmetic(instruction: Instruction, values: Sequence[int]) -> int:
  """Result of an operation on integers; it wraps around like its dtype."""
  if instruction.op == "select":
    return values[1] if values[0] else values[2]
  if instruction.op == "compare":
    match = re.search(r"\bdirection=(\w+)", instruction.attributes)
    assert match is not None, instruction.line
    return int(_COMPARISONS[match[1]](*values))
  dtype = instruction.shapes[0].dtype
  n = 2 ** hlo_text.bits(dtype)
  low = -n // 2 if dtype.startswith("s") else 0
  return (_ARITHMETIC[instruction.op](*values) - low) % n + low
