"""Flax linen layers whose kernels can be targets; Flax's own otherwise."""

from typing import Any

from flax import linen as nn
from flax.linen import dtypes
import jax.numpy as jnp

from logra_jax._dense import Kernel, cast_in_place, dot_general


def promote_dtype(*args: Any, dtype: Any = None, inexact: bool = True) -> list:
  """Flax's `promote_dtype`, for arguments of which some may be targets.

  Args:
    *args: arrays, targets or None.
    dtype: dtype to compute in, None for the common one.
    inexact: whether a common dtype must be inexact.

  Returns:
    The arguments in one dtype; a target keeps its parameter as it is, and is
    cast where it is used.
  """
  arrays = [a.kernel if isinstance(a, Kernel) else a for a in args]
  dtype = dtypes.canonicalize_dtype(*arrays, dtype=dtype, inexact=inexact)

  def cast(a: Any) -> Any:
    if isinstance(a, Kernel):
      return a.with_dtype(dtype)
    return None if a is None else cast_in_place(jnp.asarray(a), dtype)

  return [cast(a) for a in args]


class Dense(nn.Dense):
  """`flax.linen.Dense` whose kernel `[d_in, features]` can be a target.

  Fields, parameters, initialisers and results are those of Flax.
  """

  promote_dtype: Any = promote_dtype
  dot_general: Any = dot_general


class DenseGeneral(nn.DenseGeneral):
  """`flax.linen.DenseGeneral` whose kernel `[*batch, *in, *out]` can be one.

  With more axes than input and output give `sketch` its layout, as
  `targets={'.*/query/kernel': 'ioo'}`.
  """

  promote_dtype: Any = promote_dtype
  dot_general: Any = dot_general
