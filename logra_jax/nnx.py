"""The Flax NNX linear layer whose kernel can be a target."""

from typing import Any

from flax import nnx
import jax

from logra_jax import linen
from logra_jax._dense import dot_general


def _promote_dtype(
    args: tuple[Any, ...],
    /,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    **kwargs: Any,
) -> tuple[Any, ...]:
  """Calls `linen.promote_dtype` with a tuple of arguments, as NNX does."""
  return tuple(linen.promote_dtype(*args, dtype=dtype, **kwargs))


class Linear(nnx.Linear):
  """`flax.nnx.Linear` whose kernel `[d_in, d_out]` can be a target.

  Arguments, parameters, initializers and results are the same as in Flax. Only
  the defaults of `dot_general` and `promote_dtype` differ.

  Args:
    in_features: Number of input features.
    out_features: Number of output features.
    **kwargs: All other arguments of `flax.nnx.Linear`, such as `rngs`.

  Examples:
    >>> from flax import nnx
    >>> import jax.numpy as jnp, logra_jax
    >>> layer = logra_jax.nnx.Linear(8, 6, rngs=nnx.Rngs(0))
    >>> graphdef, params = nnx.split(layer, nnx.Param)
    >>> opt_state = logra_jax.sketch(rank=4, targets='kernel').init(params)
    >>> def loss_fn(params, x):
    ...   return nnx.merge(graphdef, params)(x).mean()
    >>> _, grads = logra_jax.value_and_grad(loss_fn)(
    ...     params, opt_state, jnp.ones((2, 8)))
    >>> grads['kernel'][...].shape
    (4, 6)
  """

  def __init__(self, in_features: int, out_features: int, **kwargs: Any):
    kwargs.setdefault("dot_general", dot_general)
    kwargs.setdefault("promote_dtype", _promote_dtype)
    super().__init__(in_features, out_features, **kwargs)
