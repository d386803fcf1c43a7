"""References for the numerical core: its definitions in float64 NumPy."""

import jax
import numpy as np


def f64(x: jax.typing.ArrayLike) -> np.ndarray:
  """Converts any array, including bfloat16, to float64."""
  return np.asarray(x).astype(np.float64)


def dense_gradient(
    x: jax.typing.ArrayLike, cotangent: jax.typing.ArrayLike
) -> np.ndarray:
  """Dense gradient `G = Xᵀ dY [*batch, d_in, d_out]`."""
  return np.einsum("...ni,...no->...io", f64(x), f64(cotangent))


def sketch(
    basis: jax.typing.ArrayLike, gradient: jax.typing.ArrayLike
) -> np.ndarray:
  """Sketch `S = A G [*batch, rank, d_out]`."""
  return np.einsum("...ri,...io->...ro", f64(basis), f64(gradient))


def reconstruct(
    basis: jax.typing.ArrayLike, factor: jax.typing.ArrayLike
) -> np.ndarray:
  """Full matrix `Aᵀ D [*batch, d_in, d_out]`."""
  return np.einsum("...ri,...ro->...io", f64(basis), f64(factor))


def row_adam(
    sketches: list[np.ndarray],
    b2: float = 0.95,
    eps: float = 1e-8,
    norm_preserving: bool = False,
) -> list[np.ndarray]:
  """RowAdam's directions for a sequence of sketches `[*batch, rank, d_out]`."""
  v = 0.0
  directions = []
  for t, s in enumerate(map(f64, sketches), start=1):
    v = b2 * v + (1 - b2) * np.mean(s**2, axis=-2)
    rms = np.sqrt(v / (1 - b2**t))[..., None, :]
    if not norm_preserving:
      directions.append(s / (rms + eps))
      continue
    mean = rms.mean(axis=-1, keepdims=True)
    scale = np.divide(mean, rms + eps * mean, where=mean > 0, out=rms * 0)
    d = s * scale
    size = lambda a: np.sqrt(np.sum(a**2, axis=(-2, -1), keepdims=True))
    ratio = np.divide(size(s), size(d), where=size(d) > 0, out=size(d) * 0)
    directions.append(d * ratio)
  return directions


def trace(sketches: list[np.ndarray], decay: float) -> list[np.ndarray]:
  """Heavy-ball momentum `m ← decay · m + s`."""
  m = 0.0
  out = []
  for s in map(f64, sketches):
    m = decay * m + s
    out.append(m)
  return out


def adam(
    sketches: list[np.ndarray], b1: float, b2: float, eps: float
) -> list[np.ndarray]:
  """Adam's directions, with bias correction."""
  m = v = 0.0
  out = []
  for t, s in enumerate(map(f64, sketches), start=1):
    m = b1 * m + (1 - b1) * s
    v = b2 * v + (1 - b2) * s**2
    out.append(m / (1 - b1**t) / (np.sqrt(v / (1 - b2**t)) + eps))
  return out


def global_norm(*arrays: jax.typing.ArrayLike) -> float:
  """Euclidean norm of all arrays together."""
  return float(np.sqrt(sum(np.sum(f64(a) ** 2) for a in arrays)))


def assert_close(
    actual: jax.typing.ArrayLike, desired: jax.typing.ArrayLike, tol: float
) -> None:
  """Asserts `‖actual - desired‖∞ ≤ tol · ‖desired‖∞`, and equal shapes.

  The tolerance is relative to the largest entry, because a sum of rounded
  products that cancels is only accurate to that extent.
  """
  actual, desired = f64(actual), f64(desired)
  assert actual.shape == desired.shape, (actual.shape, desired.shape)
  error = np.max(np.abs(actual - desired), initial=0.0)
  scale = np.max(np.abs(desired), initial=0.0)
  assert error <= tol * scale, f"error {error:.3g} > {tol:.3g} x {scale:.3g}"
