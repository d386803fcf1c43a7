"""Reads a compiled program: which buffers has it, beside the weights?"""

from collections.abc import Iterable
import re
from typing import Any, NamedTuple

import jax

# What only renames, views, moves or casts another buffer.
_VIEWS = (
    "parameter get-tuple-element bitcast reshape copy convert dynamic-slice"
    " slice transpose optimization-barrier"
).split()
_LINE = re.compile(
    r"\s*(?:ROOT )?(?P<name>%?[\w.-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[\w-]+)\("
)
_SHAPE = re.compile(r"\b(?:f32|bf16|f16|f64)\[([\d,]+)\]")


class Instruction(NamedTuple):
  op: str
  shapes: tuple[tuple[int, ...], ...]
  operands: tuple[str, ...]
  calls: str
  root: bool
  line: str


def parse(text: str) -> dict[str, dict[str, Instruction]]:
  """Instructions by name, by computation."""
  computations: dict[str, dict[str, Instruction]] = {}
  current: dict[str, Instruction] = {}
  for line in text.splitlines():
    if line.endswith("{") and "->" in line:
      name = line.removeprefix("ENTRY ").split()[0].lstrip("%")
      current = computations.setdefault(name, {})
      continue
    match = _LINE.match(line)
    if not match:
      continue
    shapes = tuple(
        tuple(map(int, s.split(","))) for s in _SHAPE.findall(match["type"])
    )
    rest = line[match.end() :]
    calls = re.search(r"calls=%?([\w.-]+)", rest)
    current[match["name"].lstrip("%")] = Instruction(
        match["op"],
        shapes,
        tuple(re.findall(r"%([\w.-]+)", rest.split("), ")[0])),
        calls[1] if calls else "",
        line.lstrip().startswith("ROOT "),
        line.strip(),
    )
  return computations


def _is_view(computations: Any, where: str, name: str) -> bool:
  """Whether an instruction holds no other numbers than a parameter's."""
  instruction = computations[where].get(name)
  if instruction is None or instruction.op not in (*_VIEWS, "fusion"):
    return False
  if instruction.op in ("parameter", "get-tuple-element"):
    return True  # what it was made by is looked at where it is made
  if instruction.op == "fusion":
    body = computations[instruction.calls]
    (root,) = [n for n, i in body.items() if i.root]
    return _is_view(computations, instruction.calls, root)
  # The first operand is the buffer; a dynamic slice's others are indices.
  operands = instruction.operands
  operands = operands[:1] if "slice" in instruction.op else operands
  return all(_is_view(computations, where, operand) for operand in operands)


def dense_buffers(fun: Any, args: Any, kernels: Iterable[tuple]) -> list[str]:
  """Instructions that make an array of a kernel's shape, or its transpose's.

  Args:
    fun: a jitted function.
    args: its arguments, arrays or `jax.ShapeDtypeStruct`.
    kernels: shapes `[*batch, d_in, d_out]`, of which one matrix is looked for
      alone, and within any stack.

  Returns:
    The offending lines of the compiled program. Instructions inside a fusion
    are none: they are never stored.
  """
  matrices = {tuple(k[-2:]) for k in kernels}
  matrices |= {m[::-1] for m in matrices}
  text = fun.lower(*args).compile().as_text()
  computations = parse(text)
  every = [i for body in computations.values() for i in body.values()]
  assert any(i.op == "parameter" for i in every), "no program was parsed"
  fused = {i.calls for i in every if i.op == "fusion"}
  found = []
  for where, body in computations.items():
    if where in fused:
      continue
    for name, instruction in body.items():
      if instruction.op in ("tuple", "while", "conditional", "call"):
        continue  # names of buffers that other instructions make
      shapes = [tuple(d for d in s if d != 1) for s in instruction.shapes]
      dense = any(s[-2:] in matrices or s[:2] in matrices for s in shapes)
      if dense and not _is_view(computations, where, name):
        found.append(instruction.line)
  return found


def residuals(fun: Any, *args: Any) -> list[jax.Array]:
  """What `jax.vjp` keeps for the backward pass of `fun(*args)`."""
  return jax.tree.leaves(jax.vjp(fun, *args)[1])
