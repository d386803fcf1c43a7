"""Inspection of compiled programs: which buffers exist besides the weights?"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from experiments.planning import hlo_text

# Instructions that only rename, view, move or cast another buffer.
_VIEWS = (
    "parameter get-tuple-element bitcast reshape copy convert dynamic-slice"
    " slice transpose optimization-barrier"
).split()
_FLOATS = ("f16", "bf16", "f32", "f64")


def _is_view(
    computations: Mapping[str, hlo_text.Computation], where: str, name: str
) -> bool:
  """Returns whether an instruction holds only values of a parameter."""
  instruction = computations[where].get(name)
  if instruction is None or instruction.op not in (*_VIEWS, "fusion"):
    return False
  if instruction.op in ("parameter", "get-tuple-element"):
    return True  # its producer is checked on its own
  if instruction.op == "fusion":
    (inner,) = instruction.calls("calls")
    (root,) = [n for n, i in computations[inner].items() if i.root]
    return _is_view(computations, inner, root)
  # The first operand is the buffer; the others of a dynamic slice are indices.
  operands = instruction.operands
  operands = operands[:1] if "slice" in instruction.op else operands
  return all(_is_view(computations, where, operand) for operand in operands)


def dense_buffers(
    fun: Callable[..., Any],
    args: Sequence[Any],
    kernels: Iterable[tuple[int, ...]],
) -> list[str]:
  """Finds instructions that make an array of the shape of a kernel.

  Args:
    fun: A jitted function.
    args: Its arguments, arrays or `jax.ShapeDtypeStruct`.
    kernels: Shapes `[*batch, d_in, d_out]`. Arrays of the shape of one matrix
      or its transpose are searched for, alone and within any stack.

  Returns:
    The matching lines of the compiled program. Instructions inside a fusion
    are not included, because their results are never stored.
  """
  matrices = {tuple(k[-2:]) for k in kernels}
  matrices |= {m[::-1] for m in matrices}
  text = fun.lower(*args).compile().as_text()
  computations = hlo_text.parse(text).computations
  every = [i for body in computations.values() for i in body.values()]
  fused = {c for i in every if i.op == "fusion" for c in i.calls("calls")}
  lines = []
  for where, body in computations.items():
    if where in fused:
      continue
    for name, instruction in body.items():
      if instruction.op in ("tuple", "while", "conditional", "call"):
        continue  # they only name buffers of other instructions
      shapes = [
          tuple(d for d in shape.dims if d != 1)
          for shape in instruction.shapes
          if shape.dtype in _FLOATS
      ]
      dense = any(s[-2:] in matrices or s[:2] in matrices for s in shapes)
      if dense and not _is_view(computations, where, name):
        lines.append(instruction.line)
  return lines


def residuals(fun: Callable[..., Any], *args: Any) -> list[jax.Array]:
  """Returns the arrays that `jax.vjp` keeps for the backward pass."""
  return jax.tree.leaves(jax.vjp(fun, *args)[1])
