"""Counts the operations and the traffic of a compiled program, from its text.

XLA's own `cost_analysis` counts the body of a loop once and does not exist for
described GPUs. Here it counts once per iteration.

What is counted, per device and per run of the program:

- Floating-point operations: two per multiply-add of every matrix product
  (`dot`, the `convolution` that a TPU makes of it, and cuBLAS calls).
  Elementwise work is not counted.
- Bytes of collectives: for each one, the larger of its input and its output on
  a device. A ring moves about that much over each device's link, and twice as
  much for an all-reduce.
- A conditional counts as its most expensive branch.
"""

from collections import Counter
from collections.abc import Sequence
import dataclasses
import math
import re

import numpy as np

from experiments.planning import hlo_text
from experiments.planning.hlo_counters import Frame, Value, trip_count
from experiments.planning.hlo_text import Instruction, Shape

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-permute",
    "reduce-scatter",
)


@dataclasses.dataclass(frozen=True)
class Cost:
  """The cost of a program, per device and run; see the module.

  Attributes:
    flops: Floating-point operations of matrix products.
    collective_bytes: Bytes by kind, for each of `COLLECTIVES` that occurs.
    unknown_loops: Number of loops whose length depends on data; each is counted
      as one iteration.
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
    """The cost of n runs."""
    scaled = {k: n * v for k, v in self.collective_bytes.items()}
    return Cost(n * self.flops, scaled, self.unknown_loops)


def cost(text: str) -> Cost:
  """Counts the cost of a compiled program.

  Args:
    text: Text of `jax.stages.Compiled.as_text`, or of the compiler's dump.

  Returns:
    The cost per device.

  Raises:
    ValueError: If the text holds no program.
  """
  program = hlo_text.parse(text)
  return _CostSum(program).computation(program.entry)


class _CostSum:
  """Sums costs over computations, once per computation and known arguments."""

  def __init__(self, program: hlo_text.Program):
    self._computations = program.computations
    self._done: dict[tuple[str, tuple[Value, ...]], Cost] = {}

  def computation(self, name: str, args: tuple[Value, ...] = ()) -> Cost:
    """Cost of one run of a computation."""
    if (name, args) not in self._done:
      frame = Frame(self._computations, name, args)
      self._done[name, args] = sum(
          (self._instruction(frame, i) for i in frame.body.values()), Cost()
      )
    return self._done[name, args]

  def _instruction(self, frame: Frame, instruction: Instruction) -> Cost:
    """Cost of one instruction and of the computations that it calls."""
    op = instruction.op.removesuffix("-start")
    operands = hlo_text.operand_shapes(frame.body, instruction)
    if op in COLLECTIVES:
      # A TPU writes a reduce-scatter as a fusion that sums and keeps a slice.
      scatter = frame.name.startswith("all-reduce-scatter")
      kind = "reduce-scatter" if scatter else op
      return Cost(collective_bytes={kind: _moved(instruction, operands)})
    if op == "dot":
      return Cost(flops=_dot(instruction, operands[0]))
    if op == "convolution":
      return Cost(flops=_convolution(instruction, operands))
    if op == "while":
      return self._loop(frame, instruction)
    if op == "conditional":
      return self._most_expensive_branch(frame, instruction)
    inner = Cost()
    if op in ("fusion", "call", "async", "custom-call"):
      args = tuple(frame.value(operand) for operand in instruction.operands)
      names = instruction.calls("calls", "to_apply", "called_computations")
      inner = sum((self.computation(name, args) for name in names), Cost())
    if op == "custom-call" and "gemm_backend_config" in instruction.attributes:
      return inner + Cost(flops=_gemm(instruction, operands[0]))
    return inner

  def _most_expensive_branch(
      self, frame: Frame, instruction: Instruction
  ) -> Cost:
    """Cost of a conditional."""
    names = instruction.calls(
        "branch_computations", "true_computation", "false_computation"
    )
    branches = [
        self.computation(name, (frame.value(operand),))
        for name, operand in zip(names, instruction.operands[1:], strict=True)
    ]
    return max(
        branches, key=lambda c: (c.flops, sum(c.collective_bytes.values()))
    )

  def _loop(self, frame: Frame, instruction: Instruction) -> Cost:
    """Cost of all iterations of a loop."""
    (body,) = instruction.calls("body")
    (condition,) = instruction.calls("condition")
    start = frame.value(instruction.operands[0])
    n, constants = trip_count(self._computations, start, condition, body)
    stated = re.search(
        r'"known_trip_count":\{"n":"(\d+)"', instruction.attributes
    )
    if stated:
      n = int(stated[1])
    inner = self.computation(body, (constants,))
    return inner + Cost(unknown_loops=1) if n is None else inner.times(n)


def _moved(instruction: Instruction, operands: Sequence[Shape]) -> int:
  """Bytes of a collective: the larger of operands and results."""
  sent = sum(s.n_bytes for s in operands)
  received = sum(s.n_bytes for s in instruction.shapes)
  if instruction.op.endswith("-start") and len(instruction.shapes) > len(
      operands
  ):
    # The result holds operands, results and counters.
    received = sum(s.n_bytes for s in instruction.shapes if s.dims) - sent
  return max(sent, received)


def _numbers(text: str, key: str) -> list[int]:
  """Reads `key={1,2}`; empty if the key is missing."""
  match = re.search(rf"\b{key}=\{{([\d,]*)\}}", text)
  return [int(n) for n in match[1].split(",") if n] if match else []


def _dot(instruction: Instruction, lhs: Shape) -> int:
  """Operations of a matrix product."""
  contracted = _numbers(instruction.attributes, "lhs_contracting_dims")
  depth = math.prod(lhs.dims[d] for d in contracted)
  return 2 * math.prod(instruction.shapes[0].dims) * depth


def _gemm(instruction: Instruction, lhs: Shape) -> int:
  """Operations of a cuBLAS call; its configuration describes the product."""
  match = re.search(
      r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes
  )
  contracted = re.findall(r"\d+", match[1]) if match else []
  depth = math.prod(lhs.dims[int(d)] for d in contracted)
  return 2 * math.prod(instruction.shapes[0].dims) * depth


def _convolution(instruction: Instruction, operands: Sequence[Shape]) -> int:
  """Operations of a convolution, without padding and the holes of dilation.

  A TPU writes the batch dimensions of a product as spatial ones, dilated so
  that each output sees exactly one input.
  """
  match = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
  assert match is not None, instruction.line
  lhs_labels, rhs_labels, out_labels = match.groups()
  lhs = dict(zip(lhs_labels, operands[0].dims, strict=True))
  rhs = dict(zip(rhs_labels, operands[1].dims, strict=True))
  out = dict(zip(out_labels, instruction.shapes[0].dims, strict=True))
  spatial = [label for label in out_labels if label.isdigit()]
  window = _window(instruction.attributes, len(spatial))
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
  """Number of (output, kernel) positions of a dimension that meet an input."""
  total = 0
  start = np.arange(n_out) * stride - pad
  for k in range(n_rhs):
    at = start + k * rhs_dilate
    inside = (at >= 0) & (at <= (n_lhs - 1) * lhs_dilate)
    total += int(np.sum(inside & (at % lhs_dilate == 0)))
  return total
