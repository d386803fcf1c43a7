"""LoRA: frozen kernels, each with a trained product of two thin matrices.

A layer computes `y = x W + (alpha / rank) · (x a) b`. The adapters `a` and `b`
are part of the parameters: `wrap` replaces each target kernel by a
`LoRAKernel`, and `merge` turns these into plain arrays again.
"""

import dataclasses
import re
from typing import Any
import zlib

import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import DTypeLike

from experiments.parallel import sharding
import logra_jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoRAKernel(logra_jax.Kernel):
  """A stack of kernels with their adapters.

  Attributes:
    kernel: `[*batch, d_in, d_out]`, never differentiated.
    a: `[*batch, d_in, rank]` float32.
    b: `[*batch, rank, d_out]` float32.
    scaling: Factor of the adapters' product, `alpha / rank`.
    dtype: Dtype to compute in; None means that of the kernel.
  """

  kernel: jax.Array
  a: jax.Array
  b: jax.Array
  scaling: float = dataclasses.field(metadata={"static": True})
  dtype: DTypeLike | None = dataclasses.field(
      default=None, metadata={"static": True}
  )

  def dot_general(
      self,
      x: jax.Array,
      dimension_numbers: lax.DotDimensionNumbers,
      precision: lax.PrecisionLike = None,
      preferred_element_type: DTypeLike | None = None,
  ) -> jax.Array:
    """Multiplies `x` by the kernel; arguments as in `jax.lax.dot_general`."""
    dtype = self.kernel.dtype if self.dtype is None else self.dtype
    n_batch = _check_axes(self.kernel, dimension_numbers)
    batch = tuple(range(n_batch))
    dot = lambda x, w, dims: lax.dot_general(
        x,
        w.astype(dtype),
        dims,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    # Without this, the backward pass would compute the dense gradient.
    kernel = lax.stop_gradient(self.kernel)
    y = dot(x, kernel, dimension_numbers)
    # [*batch, *free, rank]
    projected = dot(x, self.a, dimension_numbers).astype(dtype)
    last = (((projected.ndim - 1,), (n_batch,)), (batch, batch))
    return y + self.scaling * dot(projected, self.b, last)

  def merged(self) -> jax.Array:
    """Computes `W + scaling · a b` in float32; returns the kernel's dtype."""
    # [*batch, d_in, d_out] = [*batch, d_in, rank] @ [*batch, rank, d_out]
    delta = jnp.matmul(self.a, self.b, precision=lax.Precision.HIGHEST)
    wide = jnp.promote_types(self.kernel.dtype, jnp.float32)
    total = self.kernel.astype(wide) + self.scaling * delta
    return total.astype(self.kernel.dtype)


def _check_axes(
    kernel: jax.Array, dimension_numbers: lax.DotDimensionNumbers
) -> int:
  """Returns the number of batch axes; only the input axis can be contracted."""
  (_, contract), (_, batch) = dimension_numbers
  n_batch = kernel.ndim - 2
  if tuple(contract) != (n_batch,) or tuple(batch) != tuple(range(n_batch)):
    raise ValueError(
        f"a LoRA kernel {kernel.shape} is contracted over axes"
        f" {tuple(contract)} with batch axes {tuple(batch)}; it must be over"
        f" its input axis {n_batch}, with all axes before that as batch axes"
    )
  return n_batch


def _is_adapted(x: Any) -> bool:
  return isinstance(x, LoRAKernel)


def wrap(
    params: chex.ArrayTree, rank: int, alpha: float, seed: int
) -> chex.ArrayTree:
  """Adds adapters to the seven projections of every layer.

  The model computes the same function at first, because `b` is 0. `a` is
  uniform within `±1 / √d_in` (Kaiming's, as in `peft`) and depends on the seed
  and the kernel's path only.

  Args:
    params: The model's parameters; can be abstract, in `jax.eval_shape`.
    rank: Columns of `a` and rows of `b`.
    alpha: Scale of the adapters; `alpha / rank` multiplies their product.
    seed: Random seed of the initial `a`.

  Returns:
    The parameters, with a `LoRAKernel` for every kernel whose path matches
    `logra_jax.DEFAULT_TARGETS`.

  Raises:
    ValueError: If no path matches.
  """
  adapted = False

  def adapt(key_path, kernel):
    nonlocal adapted
    path = sharding.path_of(key_path)
    if not re.fullmatch(logra_jax.DEFAULT_TARGETS, path):
      return kernel
    adapted = True
    *batch, d_in, d_out = kernel.shape
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode()))
    bound = d_in**-0.5
    shape = (*batch, d_in, rank)
    a = jax.random.uniform(key, shape, jnp.float32, -bound, bound)
    b = jnp.zeros((*batch, rank, d_out), jnp.float32)
    return LoRAKernel(kernel, a, b, alpha / rank)

  wrapped = jax.tree_util.tree_map_with_path(adapt, params)
  if not adapted:
    raise ValueError(
        "params has no kernel for LoRA: none of its paths matches"
        f" {logra_jax.DEFAULT_TARGETS!r}"
    )
  return wrapped


def merge(params: chex.ArrayTree) -> chex.ArrayTree:
  """Adds the adapters to their kernels.

  Args:
    params: Parameters from `wrap`, trained or not. Parameters without adapters
      are returned unchanged.

  Returns:
    The model's parameters as plain arrays, in the kernels' dtypes.
  """
  return jax.tree.map(
      lambda x: x.merged() if _is_adapted(x) else x,
      params,
      is_leaf=_is_adapted,
  )
