"""LoRA: frozen kernels, each beside a trained product of two thin matrices.

`y = x W + (alpha / rank) · (x a) b`. The adapters are part of the parameter
tree: `wrap` puts a `LoRAKernel` where a target kernel was, and `merge` puts
plain arrays back.
"""

import dataclasses
import re
from typing import Any
import zlib

import jax
from jax import lax
import jax.numpy as jnp

from experiments.parallel import sharding
import logra_jax

PyTree = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LoRAKernel(logra_jax.Kernel):
  """A stack of kernels with their adapters.

  Attributes:
    kernel: `[*batch, d_in, d_out]`, never differentiated.
    a: `[*batch, d_in, rank]` float32.
    b: `[*batch, rank, d_out]` float32.
    scaling: what the adapters' product is multiplied by.
    dtype: dtype to compute in, None for the kernel's own.
  """

  kernel: jax.Array
  a: jax.Array
  b: jax.Array
  scaling: float = dataclasses.field(metadata={"static": True})
  dtype: Any = dataclasses.field(default=None, metadata={"static": True})

  def dot_general(
      self,
      x: jax.Array,
      dimension_numbers: Any,
      precision: Any = None,
      preferred_element_type: Any = None,
  ) -> jax.Array:
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
    # Without this the backward pass would make the dense gradient.
    kernel = lax.stop_gradient(self.kernel)
    y = dot(x, kernel, dimension_numbers)
    # [*batch, *free, rank]
    projected = dot(x, self.a, dimension_numbers).astype(dtype)
    last = (((projected.ndim - 1,), (n_batch,)), (batch, batch))
    return y + self.scaling * dot(projected, self.b, last)

  def merged(self) -> jax.Array:
    """`W + scaling · a b`, made in float32, in the kernel's dtype."""
    # [*batch, d_in, d_out] = [*batch, d_in, rank] @ [*batch, rank, d_out]
    delta = jnp.matmul(self.a, self.b, precision=lax.Precision.HIGHEST)
    wide = jnp.promote_types(self.kernel.dtype, jnp.float32)
    total = self.kernel.astype(wide) + self.scaling * delta
    return total.astype(self.kernel.dtype)


def _check_axes(kernel: jax.Array, dimension_numbers: Any) -> int:
  """The number of batch axes; raises where others than the input contract."""
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


def wrap(params: PyTree, rank: int, alpha: float, seed: int) -> PyTree:
  """Puts adapters beside the seven projections of every layer.

  The model is the same function at first: `b` is 0. `a` is uniform within
  `±1 / √d_in` (Kaiming's, as `peft` draws it), from the seed and the path.

  Args:
    params: the model's parameters; also within `jax.eval_shape`.
    rank: columns of `a`, rows of `b`.
    alpha: `alpha / rank` multiplies the product.
    seed: of the initial `a`.

  Returns:
    The tree with a `LoRAKernel` for every kernel that
    `logra_jax.DEFAULT_TARGETS` matches.

  Raises:
    ValueError: it matches none.
  """
  found = False

  def adapt(key_path, kernel):
    nonlocal found
    path = sharding.path_of(key_path)
    if not re.fullmatch(logra_jax.DEFAULT_TARGETS, path):
      return kernel
    found = True
    *batch, d_in, d_out = kernel.shape
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode()))
    bound = d_in**-0.5
    shape = (*batch, d_in, rank)
    a = jax.random.uniform(key, shape, jnp.float32, -bound, bound)
    b = jnp.zeros((*batch, rank, d_out), jnp.float32)
    return LoRAKernel(kernel, a, b, alpha / rank)

  wrapped = jax.tree_util.tree_map_with_path(adapt, params)
  if not found:
    raise ValueError(
        "params has no kernel for LoRA: none of its paths matches"
        f" {logra_jax.DEFAULT_TARGETS!r}"
    )
  return wrapped


def merge(params: PyTree) -> PyTree:
  """The parameters as plain arrays, adapters added to their kernels.

  Args:
    params: of `wrap`, trained or not; a tree without adapters stays as it is.

  Returns:
    The tree of the model, in the kernels' dtypes.
  """
  return jax.tree.map(
      lambda x: x.merged() if _is_adapted(x) else x,
      params,
      is_leaf=_is_adapted,
  )
