"""Cosines of gradients and their reconstructions, from thin products.

Matrices come in stacks of layers: gradients `G [L, d_in, d_out]`, bases
`A [L, r, d_in]`, sketches `S = A G [L, r, d_out]`, all float32.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

METHODS = ("plain", "least_squares")


def methods(distribution: str) -> tuple[str, ...]:
  """Those that differ: of an orthonormal basis least squares is plain."""
  return METHODS[:1] if distribution == "orthonormal" else METHODS


class Products(NamedTuple):
  """What a cosine is made of; float64 `[L]` each.

  Attributes:
    inner: of gradient and reconstruction.
    reconstruction: squared norm of it.
    gradient: squared norm of it.
  """

  inner: np.ndarray
  reconstruction: np.ndarray
  gradient: np.ndarray

  def cosine(self) -> np.ndarray:
    """By layer; 0 where the gradient is."""
    size = np.sqrt(self.reconstruction * self.gradient)
    return self.inner / np.where(size > 0, size, 1.0)


def of_sketch(basis: np.ndarray, gradient: np.ndarray, method: str) -> Products:
  """Of a gradient and its reconstruction, which is never formed.

  `⟨G, Aᵀ S⟩ = ‖S‖²` and `‖Aᵀ S‖² = ⟨S, (A Aᵀ) S⟩`. Least squares is the
  projection on A's rows: both are `⟨S, (A Aᵀ)⁻¹ S⟩`.
  """
  sketch = (basis @ gradient).astype(np.float64)
  gram = _gram(basis)
  if method == "plain":
    inner = _dot(sketch, sketch)
    reconstruction = _dot(sketch, gram @ sketch)
  else:
    inner = reconstruction = _dot(sketch, np.linalg.inv(gram) @ sketch)
  return Products(inner, reconstruction, _dot(gradient, gradient))


def reconstruct(
    bases: Sequence[np.ndarray], gradients: Sequence[np.ndarray], method: str
) -> np.ndarray:
  """`Σ_t A_tᵀ S_t`, or `Σ_t A_tᵀ (A_t A_tᵀ)⁻¹ S_t` by least squares."""
  factors = [a @ g for a, g in zip(bases, gradients, strict=True)]
  if method == "least_squares":
    inverses = [np.linalg.inv(_gram(a)).astype(np.float32) for a in bases]
    factors = [x @ s for x, s in zip(inverses, factors, strict=True)]
  # One product: the sum over t is one over more rows.
  basis = np.concatenate(bases, axis=-2)
  return basis.swapaxes(-1, -2) @ np.concatenate(factors, axis=-2)


def of_arrays(reconstruction: np.ndarray, gradient: np.ndarray) -> Products:
  """Of a gradient and anything of its shape."""
  return Products(
      _dot(reconstruction, gradient),
      _dot(reconstruction, reconstruction),
      _dot(gradient, gradient),
  )


def predicted(rank: float | np.ndarray, d_in: int, method: str) -> np.ndarray:
  """The cosine with an i.i.d. basis, whatever the gradient."""
  rank = np.minimum(rank, d_in)
  if method == "plain":
    return np.sqrt(rank / (rank + d_in))
  return np.sqrt(rank / d_in)


def _gram(basis: np.ndarray) -> np.ndarray:
  """`A Aᵀ [L, r, r]` in float64."""
  wide = basis.astype(np.float64)
  return wide @ wide.swapaxes(-1, -2)


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """Inner products by layer."""
  return np.einsum("lij,lij->l", a, b, dtype=np.float64)
