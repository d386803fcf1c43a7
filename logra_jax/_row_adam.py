"""RowAdam: one second moment for each output unit."""

import math
from typing import Any, NamedTuple

import jax
from jax.experimental.layout import Layout, with_layout_constraint
import jax.numpy as jnp
import optax


class ScaleByRowAdamState(NamedTuple):
  """State of `scale_by_row_adam`.

  Attributes:
    count: int32 scalar, updates so far.
    rms: per array `[*batch, d_out]` float32, `√v`: unlike v it neither
      overflows nor vanishes for any float32 sketch.
  """

  count: jax.Array
  rms: Any


def _rms(x: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
  """Root mean square over axes; no square overflows or vanishes."""
  peak = jnp.max(jnp.abs(x), axis, keepdims=True)
  unit = x / jnp.where(peak > 0, peak, 1.0)
  return peak.squeeze(axis) * jnp.sqrt(jnp.mean(jnp.square(unit), axis))


def _as_it_lies(x: jax.Array) -> jax.Array:
  """Keeps XLA from transposing sketches in memory for the mean over a rank."""
  return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _plain(sketch: jax.Array, rms: jax.Array, eps: float) -> jax.Array:
  return sketch / (rms + eps)[..., None, :]


def _norm_preserving(
    sketch: jax.Array, rms: jax.Array, eps: float
) -> jax.Array:
  """Columns divided by their RMS, at the norm the sketch itself has."""
  mean = jnp.mean(rms, axis=-1, keepdims=True)
  # rms / mean is dimensionless: neither tiny nor huge gradients overflow it.
  inverse = 1.0 / (rms / jnp.where(mean > 0, mean, 1.0) + eps)
  direction = sketch * inverse[..., None, :]
  size = _rms(direction, (-2, -1))
  ratio = jnp.where(size > 0, _rms(sketch, (-2, -1)) / size, 0.0)
  return direction * ratio[..., None, None]


def scale_by_row_adam(
    b2: float = 0.95, eps: float = 1e-8, norm_preserving: bool = False
) -> optax.GradientTransformation:
  """Divides each column of a sketch by the running RMS of that column.

  With `S [*batch, rank, d_out]`, for output unit j::

    v[j] ← β₂ v[j] + (1 - β₂) mean_i S[i, j]²
    D[:, j] = S[:, j] / (√(v[j] / (1 - β₂ᵗ)) + ε)

  There is no first moment, and v is indexed by output unit, not by sketch
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
        count=jnp.zeros([], jnp.int32), rms=jax.tree.map(zeros, params)
    )

  def update_fn(updates, state, params=None):
    del params
    count = optax.safe_increment(state.count)
    updates = jax.tree.map(_as_it_lies, updates)
    keep, add = math.sqrt(b2), math.sqrt(1 - b2)
    rms = jax.tree.map(
        lambda s, old: jnp.hypot(keep * old, add * _rms(s, -2)),
        updates,
        state.rms,
    )
    correction = jnp.sqrt(1 - b2 ** count.astype(jnp.float32))
    updates = jax.tree.map(
        lambda s, r: rescale(s, r / correction, eps), updates, rms
    )
    updates = jax.tree.map(_as_it_lies, updates)
    return updates, ScaleByRowAdamState(count=count, rms=rms)

  return optax.GradientTransformation(init_fn, update_fn)
