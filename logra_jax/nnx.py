"""The Flax NNX linear layer whose kernel can be a target."""

from typing import Any

from flax import nnx

from logra_jax import linen
from logra_jax._dense import dot_general


def _promote_dtype(args: Any, /, *, dtype: Any = None, **kwargs: Any) -> tuple:
  return tuple(linen.promote_dtype(*args, dtype=dtype, **kwargs))


class Linear(nnx.Linear):
  """`flax.nnx.Linear` whose kernel `[d_in, d_out]` can be a target.

  Arguments, parameters, initialisers and results are those of Flax; only
  `dot_general` and `promote_dtype` have other defaults.
  """

  def __init__(self, in_features: int, out_features: int, **kwargs: Any):
    kwargs.setdefault("dot_general", dot_general)
    kwargs.setdefault("promote_dtype", _promote_dtype)
    super().__init__(in_features, out_features, **kwargs)
