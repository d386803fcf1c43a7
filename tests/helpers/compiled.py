"""Reads a compiled program: which buffers has it, beside the weights?"""

from collections.abc import Iterable
from typing import Any

import jax

from experiments.planning import hlo_cost

# What only renames, views, moves or casts another buffer.
_VIEWS = (
    "parameter get-tuple-element bitcast reshape copy convert dynamic-slice"
    " slice transpose optimization-barrier"
).split()
_FLOATS = ("f16", "bf16", "f32", "f64")


def _is_view(computations: Any, where: str, name: str) -> bool:
  """Whether an instruction holds no other numbers than a parameter's."""
  instruction = computations[where].get(name)
  if instruction is None or instruction.op not in (*_VIEWS, "fusion"):
    return False
  if instruction.op in ("parameter", "get-tuple-element"):
    return True  # what it was made by is looked at where it is made
  if instruction.op == "fusion":
    (inner,) = instruction.calls("calls")
    (root,) = [n for n, i in computations[inner].items() if i.root]
    return _is_view(computations, inner, root)
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
  computations = hlo_cost.parse(text).computations
  every = [i for body in computations.values() for i in body.values()]
  fused = {c for i in every if i.op == "fusion" for c in i.calls("calls")}
  found = []
  for where, body in computations.items():
    if where in fused:
      continue
    for name, instruction in body.items():
      if instruction.op in ("tuple", "while", "conditional", "call"):
        continue  # names of buffers that other instructions make
      shapes = [
          tuple(d for d in shape.dims if d != 1)
          for shape in instruction.shapes
          if shape.dtype in _FLOATS
      ]
      dense = any(s[-2:] in matrices or s[:2] in matrices for s in shapes)
      if dense and not _is_view(computations, where, name):
        found.append(instruction.line)
  return found


def residuals(fun: Any, *args: Any) -> list[jax.Array]:
  """What `jax.vjp` keeps for the backward pass of `fun(*args)`."""
  return jax.tree.leaves(jax.vjp(fun, *args)[1])
