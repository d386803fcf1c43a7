"""Which parameters are sketched, and what each of their axes is."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import math
import re
from typing import Any

import jax
import jax.numpy as jnp

from logra_jax import _basis, _paths

# The seven projections of a transformer layer.
DEFAULT_TARGETS = r"(.*/)?(q|k|v|o|gate|up|down)_proj/kernel"

Rank = int | Mapping[str, int]
Targets = str | Sequence[str] | Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Target:
  """One sketched kernel `[*batch, *in, *out]`; static and hashable.

  Attributes:
    path: path of the kernel in the parameter tree.
    batch: sizes of the leading axes that stack matrices (layers, experts).
    inputs: sizes of the axes contracted with the layer's input.
    outputs: sizes of the axes the layer's output gets.
    rank: rows of the basis, at most `d_in`.
    distribution: a name in `_basis.DISTRIBUTIONS`.
  """

  path: str
  batch: tuple[int, ...]
  inputs: tuple[int, ...]
  outputs: tuple[int, ...]
  rank: int
  distribution: str

  @property
  def d_in(self) -> int:
    return math.prod(self.inputs)

  @property
  def d_out(self) -> int:
    return math.prod(self.outputs)

  @property
  def shape(self) -> tuple[int, ...]:
    return self.batch + self.inputs + self.outputs

  @property
  def thin(self) -> tuple[int, ...]:
    """Shape of the sketch, `[*batch, rank, d_out]`."""
    return (*self.batch, self.rank, self.d_out)

  def key(self, seed: jax.Array, count: jax.Array) -> jax.Array:
    return _basis.target_key(seed, count, self.path, self.batch)

  def basis(self, key_data: jax.Array) -> jax.Array:
    return _basis.draw(key_data, self.rank, self.d_in, self.distribution)


def check_rank(rank: Any) -> None:
  """Raises ValueError unless rank is a positive int or a mapping to such."""
  if isinstance(rank, Mapping):
    _paths.check_patterns("rank", rank)
    if not rank:
      raise ValueError("rank={} names no target; map patterns to ints")
    ranks = list(rank.values())
  else:
    ranks = [rank]
  for value in ranks:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
      raise ValueError(
          f"rank={value!r} must be a positive Python int, or a mapping from"
          " path patterns to such (under optax.inject_hyperparams name it in"
          " static_args)"
      )


def layouts(targets: Any) -> dict[str, str]:
  """`targets` as a mapping from pattern to layout ('' where not given).

  Raises:
    ValueError: no pattern, a broken one, or a layout that is not some `b`
      (batch), then `i` (input), then `o` (output) axes.
  """
  if isinstance(targets, str):
    targets = {targets: ""}
  elif not isinstance(targets, Iterable):
    raise ValueError(
        f"targets={targets!r} must be a path pattern, several of them, or a"
        " mapping from patterns to layouts"
    )
  elif not isinstance(targets, Mapping):
    targets = dict.fromkeys(targets, "")
  _paths.check_patterns("targets", targets)
  if not targets:
    raise ValueError("targets is empty; name at least one kernel to sketch")
  for pattern, layout in targets.items():
    if layout and not re.fullmatch("b*i+o+", layout):
      raise ValueError(
          f"targets[{pattern!r}]={layout!r} is no layout; write one letter an"
          " axis: b (batch: layers, experts), i (input), o (output), as 'io'"
          " or 'bioo'"
      )
  return dict(targets)


def _axes(path: str, leaf: Any, layout: str) -> tuple[int, int, int]:
  """Numbers of batch, input and output axes; validates the leaf."""
  if not jnp.issubdtype(leaf.dtype, jnp.floating):
    raise ValueError(
        f"target {path!r} has dtype {leaf.dtype}; only floating-point kernels"
        " can be sketched: leave it out of targets"
    )
  layout = layout or "b" * (leaf.ndim - 2) + "io"
  if len(layout) != leaf.ndim:
    raise ValueError(
        f"target {path!r} has shape {tuple(leaf.shape)}, which does not fit"
        f" the layout {layout!r}; give one letter (b, i or o) an axis, or"
        " leave it out of targets"
    )
  if 0 in leaf.shape:
    raise ValueError(
        f"target {path!r} has shape {tuple(leaf.shape)}: it is empty; leave"
        " it out of targets"
    )
  return layout.count("b"), layout.count("i"), layout.count("o")


def resolve(
    params: Any, targets: dict[str, str], rank: Rank, distribution: str
) -> tuple[Target, ...]:
  """Finds the targets in `params`, in the tree's order.

  A rank above a kernel's `d_in` is clipped to `d_in`: more rows than that
  cannot carry more of the gradient.

  Raises:
    ValueError: a pattern (of `targets` or of `rank`) that matches nothing, a
      target without a rank, an integer kernel, a layout that does not fit.
  """
  flat, _ = _paths.flatten(params)
  _paths.check_all_match("targets", targets, flat)
  found = []
  for path, leaf in flat.items():
    pattern = _paths.first_match(targets, path)
    if pattern is None:
      continue
    n_batch, n_in, _ = _axes(path, leaf, targets[pattern])
    if isinstance(rank, Mapping):
      named = _paths.first_match(rank, path)
      if named is None:
        raise ValueError(
            f"rank has no pattern for the target {path!r}; add one, as '.*'"
        )
      target_rank = rank[named]
    else:
      target_rank = rank
    inputs = tuple(leaf.shape[n_batch : n_batch + n_in])
    found.append(
        Target(
            path=path,
            batch=tuple(leaf.shape[:n_batch]),
            inputs=inputs,
            outputs=tuple(leaf.shape[n_batch + n_in :]),
            rank=min(target_rank, math.prod(inputs)),
            distribution=distribution,
        )
    )
  if isinstance(rank, Mapping):
    _paths.check_all_match("rank", rank, [t.path for t in found])
  return tuple(found)
