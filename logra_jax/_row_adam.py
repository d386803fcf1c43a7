"""RowAdam: one second moment for each output unit."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class ScaleByRowAdamState(NamedTuple):
  """State of `scale_by_row_adam`.

  Attributes:
    count: int32 scalar, updates so far.
    v: per array `[*batch, d_out]` float32, mean square of each column.
  """

  count: jax.Array
  v: Any


def _plain(sketch: jax.Array, rms: jax.Array, eps: float) -> jax.Array:
  return sketch / (rms + eps)[..., None, :]


def _norm_preserving(
    sketch: jax.Array, rms: jax.Array, eps: float
) -> jax.Array:
  """Columns divided by their RMS, at the norm the sketch itself has."""
  mean = jnp.mean(rms, axis=-1, keepdims=True)
  # mean / rms is dimensionless: neither tiny nor huge gradients overflow it.
  inverse = jnp.where(mean > 0, mean / (rms + eps * mean), 0.0)
  direction = sketch * inverse[..., None, :]
  norm = lambda x: jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)
  size = norm(direction)
  return jnp.where(size > 0, direction * (norm(sketch) / size), 0.0)


def scale_by_row_adam(
    b2: float = 0.95, eps: float = 1e-8, norm_preserving: bool = False
) -> optax.GradientTransformation:
  """Divides each column of a sketch by the running RMS of that column.

  With `S [*batch, rank, d_out]`, for output unit j::

    v[j] ← β₂ v[j] + (1 - β₂) mean_i S[i, j]²
    D[:, j] = S[:, j] / (√(v[j] / (1 - β₂ᵗ)) + ε)

  There is no first moment, and `v` is indexed by output unit, not by sketch
  coordinate: it stays valid when the basis is drawn anew.

  With `norm_preserving` the direction is then rescaled so that each layer has
  the norm of its own sketch, and ε is relative to the layer's mean RMS. A zero
  sketch gives a zero direction.

  Args:
    b2: decay of the second moment, in [0, 1).
    eps: added to the RMS, positive.
    norm_preserving: keep the norm of each sketch.

  Returns:
    A transformation of trees of arrays `[*batch, rank, d_out]`.

  Raises:
    ValueError: b2 outside [0, 1), eps not positive.

  Reference: arXiv 2610.06647, both published variants.
  """
  if not 0 <= b2 < 1:
    raise ValueError(f"b2={b2!r} must lie in [0, 1), as 0.95")
  if not eps > 0:
    raise ValueError(f"eps={eps!r} must be positive, as 1e-8")
  rescale = _norm_preserving if norm_preserving else _plain

  def init_fn(params):
    zeros = lambda p: jnp.zeros(p.shape[:-2] + p.shape[-1:], jnp.float32)
    return ScaleByRowAdamState(
        count=jnp.zeros([], jnp.int32), v=jax.tree.map(zeros, params)
    )

  def update_fn(updates, state, params=None):
    del params
    count = optax.safe_increment(state.count)
    v = jax.tree.map(
        lambda s, v: b2 * v + (1 - b2) * jnp.mean(jnp.square(s), axis=-2),
        updates,
        state.v,
    )
    correction = 1 - b2 ** count.astype(jnp.float32)
    updates = jax.tree.map(
        lambda s, v: rescale(s, jnp.sqrt(v / correction), eps), updates, v
    )
    return updates, ScaleByRowAdamState(count=count, v=v)

  return optax.GradientTransformation(init_fn, update_fn)
