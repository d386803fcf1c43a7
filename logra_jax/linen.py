"""Flax Linen layers whose kernels can be targets."""

from collections.abc import Callable
from typing import Any

from flax import linen as nn
from flax.linen import dtypes
import jax
import jax.numpy as jnp

from logra_jax._dense import Kernel, cast_in_place, dot_general


def promote_dtype(
    *args: jax.typing.ArrayLike | Kernel | None,
    dtype: jax.typing.DTypeLike | None = None,
    inexact: bool = True,
) -> list[Any]:
  """Like `flax.linen.dtypes.promote_dtype`, but arguments can be targets.

  Args:
    *args: Arrays, targets or None.
    dtype: The dtype to compute in, or None for the common dtype of the
      arguments.
    inexact: Whether the common dtype must be inexact.

  Returns:
    The arguments in one dtype. A target keeps its parameter unchanged and casts
    it where it is used.
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

  Fields, parameters, initializers and results are the same as in Flax.

  Examples:
    >>> import jax, jax.numpy as jnp, logra_jax
    >>> layer = logra_jax.linen.Dense(features=6)
    >>> params = layer.init(jax.random.key(0), jnp.ones((1, 8)))['params']
    >>> opt_state = logra_jax.sketch(rank=4, targets='kernel').init(params)
    >>> def loss_fn(params, x):
    ...   return layer.apply({'params': params}, x).mean()
    >>> _, grads = logra_jax.value_and_grad(loss_fn)(
    ...     params, opt_state, jnp.ones((2, 8)))
    >>> grads['kernel'].shape
    (4, 6)
  """

  promote_dtype: Callable[..., list[Any]] = promote_dtype
  dot_general: Callable[..., jax.Array] = dot_general


class DenseGeneral(nn.DenseGeneral):
  """`flax.linen.DenseGeneral` whose kernel can be a target.

  The kernel is `[*batch, *in, *out]`. If it has several input or output axes,
  give its layout to `sketch`, as in `targets={'.*/query/kernel': 'ioo'}`.
  Fields, parameters, initializers and results are the same as in Flax.
  """

  promote_dtype: Callable[..., list[Any]] = promote_dtype
  dot_general: Callable[..., jax.Array] = dot_general
