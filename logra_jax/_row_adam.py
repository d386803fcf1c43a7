"""RowAdam, which keeps one second moment for each output unit."""

import math
from typing import NamedTuple

import jax
from jax.experimental.layout import Layout, with_layout_constraint
import jax.numpy as jnp
import optax


class ScaleByRowAdamState(NamedTuple):
  """State of `scale_by_row_adam`.

  Attributes:
    count: Number of updates so far, int32 scalar.
    rms: `√v`, one array `[*batch, d_out]` float32 for each sketch. Unlike v,
      it neither overflows nor underflows for any float32 sketch.
  """

  count: jax.Array
  rms: optax.Updates


def _rms(x: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
  """Root mean square over `axis`, without overflow or underflow of squares."""
  peak = jnp.max(jnp.abs(x), axis, keepdims=True)
  unit = x / jnp.where(peak > 0, peak, 1.0)
  return peak.squeeze(axis) * jnp.sqrt(jnp.mean(jnp.square(unit), axis))


def _as_it_lies(x: jax.Array) -> jax.Array:
  """Stops XLA from transposing a sketch in memory for the mean over rank."""
  return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _plain(sketch: jax.Array, rms: jax.Array, eps: float) -> jax.Array:
  """Divides each column by its RMS."""
  return sketch / (rms + eps)[..., None, :]


def _norm_preserving(
    sketch: jax.Array, rms: jax.Array, eps: float
) -> jax.Array:
  """Divides each column by its RMS, then restores the norm of the sketch."""
  mean = jnp.mean(rms, axis=-1, keepdims=True)
  # rms / mean does not depend on the gradient's size, so it cannot overflow.
  inverse = 1.0 / (rms / jnp.where(mean > 0, mean, 1.0) + eps)
  direction = sketch * inverse[..., None, :]
  size = _rms(direction, (-2, -1))
  # A zero sketch stays zero: its ratio is 0 / 1.
  ratio = _rms(sketch, (-2, -1)) / jnp.where(size > 0, size, 1.0)
  return direction * ratio[..., None, None]


def scale_by_row_adam(
    b2: float = 0.95, eps: float = 1e-8, norm_preserving: bool = False
) -> optax.GradientTransformation:
  """Divides each column of a sketch by the running RMS of that column.

  For a sketch `S [*batch, rank, d_out]` and output unit j at update t::

    v[j] ← β₂ v[j] + (1 - β₂) mean_i S[i, j]²
    D[:, j] = S[:, j] / (√(v[j] / (1 - β₂ᵗ)) + ε)

  There is no first moment. Since v is indexed by output unit and not by sketch
  coordinate, it remains valid when a new basis is drawn.

  With `norm_preserving`, the direction is then rescaled to the norm of the
  sketch, for each layer separately, and ε is relative to the mean RMS of the
  layer. A zero sketch gives a zero direction.

  Args:
    b2: Decay rate of the second moment, in [0, 1).
    eps: Positive constant added to the RMS.
    norm_preserving: Whether to rescale each direction to the norm of its
      sketch.

  Returns:
    A transformation of trees of arrays `[*batch, rank, d_out]`.

  Raises:
    ValueError: If `b2` is outside [0, 1) or `eps` is not positive.

  Examples:
    >>> import jax.numpy as jnp, logra_jax
    >>> tx = logra_jax.scale_by_row_adam()
    >>> sketch = jnp.array([[1.0, 10.0], [-1.0, 10.0]])
    >>> direction, _ = tx.update(sketch, tx.init(sketch))
    >>> print(direction.round(3))
    [[ 1.  1.]
     [-1.  1.]]

  References:
    LoGRA, arXiv 2610.06647: both published variants.
  """
  if not 0 <= b2 < 1:
    raise ValueError(f"b2={b2!r} must lie in [0, 1), for example 0.95")
  if not eps > 0:
    raise ValueError(f"eps={eps!r} must be positive, for example 1e-8")
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
