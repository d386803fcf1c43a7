"""Which parameters are sketched, and the roles of their axes."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import math
import re
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from logra_jax import _basis, _paths

# The kernels of the seven projections in a transformer layer.
DEFAULT_TARGETS = r"(.*/)?(q|k|v|o|gate|up|down)_proj/kernel"

Rank: TypeAlias = int | Mapping[str, int]
Targets: TypeAlias = str | Sequence[str] | Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Target:
  """Static, hashable description of one sketched kernel `[*batch, *in, *out]`.

  Attributes:
    path: Path of the kernel in the parameter tree.
    batch: Sizes of the leading axes, which stack matrices (layers, experts).
    inputs: Sizes of the axes that are contracted with the input of the layer.
    outputs: Sizes of the axes that the output of the layer has.
    rank: Number of rows of the basis, at most `d_in`.
    distribution: A name in `_basis.DISTRIBUTIONS`.
  """

  path: str
  batch: tuple[int, ...]
  inputs: tuple[int, ...]
  outputs: tuple[int, ...]
  rank: int
  distribution: str

  @property
  def d_in(self) -> int:
    """Input size of each matrix."""
    return math.prod(self.inputs)

  @property
  def d_out(self) -> int:
    """Output size of each matrix."""
    return math.prod(self.outputs)

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the kernel."""
    return self.batch + self.inputs + self.outputs

  @property
  def thin(self) -> tuple[int, ...]:
    """Shape of the sketch, `[*batch, rank, d_out]`."""
    return (*self.batch, self.rank, self.d_out)

  def key(self, seed: jax.Array, count: jax.Array) -> jax.Array:
    """Returns the key data of the basis, `[*batch, 2]` uint32."""
    return _basis.target_key(seed, count, self.path, self.batch)

  def basis(self, key_data: jax.Array) -> jax.Array:
    """Draws the basis `A [*batch, rank, d_in]` float32."""
    return _basis.draw(key_data, self.rank, self.d_in, self.distribution)


def check_rank(rank: Any) -> None:
  """Raises ValueError unless `rank` is a positive int or a mapping to them."""
  if isinstance(rank, Mapping):
    _paths.check_patterns("rank", rank)
    if not rank:
      raise ValueError(
          "rank={} names no target; map path patterns to ints, such as"
          " {'.*': 256}"
      )
    ranks = list(rank.values())
  else:
    ranks = [rank]
  for value in ranks:
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not whole or value < 1:
      raise ValueError(
          f"rank={value!r} must be a positive Python int, or a mapping from"
          " path patterns to such ints (with optax.inject_hyperparams, list it"
          " in static_args)"
      )


def layouts(targets: Targets) -> dict[str, str]:
  """Returns `targets` as a dict from pattern to layout, '' if not given.

  Raises:
    ValueError: If there is no pattern, if one is invalid, or if a layout is not
      a sequence of `b` (batch), then `i` (input), then `o` (output) axes.
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
          f"targets[{pattern!r}]={layout!r} is not a layout; write one letter"
          " per axis: b (batch: layers, experts), i (input), o (output), such"
          " as 'io' or 'bioo'"
      )
  return dict(targets)


def _axes(path: str, leaf: Any, layout: str) -> tuple[int, int, int]:
  """Validates a leaf and counts its batch, input and output axes."""
  floating = jnp.issubdtype(leaf.dtype, jnp.floating)
  if not floating or jnp.dtype(leaf.dtype).itemsize < 2:
    raise ValueError(
        f"target {path!r} has dtype {leaf.dtype}; only kernels of 16, 32 or 64"
        " floating-point bits can be sketched: leave it out of targets"
    )
  layout = layout or "b" * (leaf.ndim - 2) + "io"
  if len(layout) != leaf.ndim:
    raise ValueError(
        f"target {path!r} has shape {tuple(leaf.shape)}, which does not fit"
        f" the layout {layout!r}; give one letter (b, i or o) per axis, or"
        " leave it out of targets"
    )
  if 0 in leaf.shape:
    raise ValueError(
        f"target {path!r} has shape {tuple(leaf.shape)}: it is empty; leave"
        " it out of targets"
    )
  return layout.count("b"), layout.count("i"), layout.count("o")


def resolve(
    params: optax.Params,
    targets: dict[str, str],
    rank: Rank,
    distribution: str,
) -> tuple[Target, ...]:
  """Finds the targets in `params`, in the order of the tree.

  A rank above the `d_in` of a kernel is clipped to `d_in`, since more rows
  cannot carry more of the gradient.

  Raises:
    ValueError: If a pattern (of `targets` or of `rank`) matches nothing, if a
      target has no rank, an integer dtype or no elements, or if its layout does
      not fit.
  """
  flat, _ = _paths.flatten(params)
  _paths.check_all_match("targets", targets, flat)
  resolved = []
  for path, leaf in flat.items():
    pattern = _paths.first_match(targets, path)
    if pattern is None:
      continue
    n_batch, n_in, _ = _axes(path, leaf, targets[pattern])
    if isinstance(rank, Mapping):
      named = _paths.first_match(rank, path)
      if named is None:
        raise ValueError(
            f"rank has no pattern for the target {path!r}; add one, such as"
            " '.*'"
        )
      target_rank = rank[named]
    else:
      target_rank = rank
    inputs = tuple(leaf.shape[n_batch : n_batch + n_in])
    resolved.append(
        Target(
            path=path,
            batch=tuple(leaf.shape[:n_batch]),
            inputs=inputs,
            outputs=tuple(leaf.shape[n_batch + n_in :]),
            rank=min(int(target_rank), math.prod(inputs)),
            distribution=distribution,
        )
    )
  if isinstance(rank, Mapping):
    _paths.check_all_match("rank", rank, [t.path for t in resolved])
  return tuple(resolved)
