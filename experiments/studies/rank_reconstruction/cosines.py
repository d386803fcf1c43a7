"""Cosines of gradients and their reconstructions, from thin products.

Matrices are stacked over L layers: gradients `G [L, d_in, d_out]`, bases
`A [L, r, d_in]`, sketches `S = A G [L, r, d_out]`, all float32.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

METHODS = ("plain", "least_squares")


def methods(distribution: str) -> tuple[str, ...]:
  """Returns the methods of a distribution whose results differ.

  For an orthonormal basis, least squares is the plain reconstruction.
  """
  return METHODS[:1] if distribution == "orthonormal" else METHODS


class Products(NamedTuple):
  """The inner products that a cosine is made of, float64 `[L]` each.

  Attributes:
    inner: Inner product of gradient and reconstruction.
    reconstruction: Squared norm of the reconstruction.
    gradient: Squared norm of the gradient.
  """

  inner: np.ndarray
  reconstruction: np.ndarray
  gradient: np.ndarray

  def cosine(self) -> np.ndarray:
    """Returns the cosine by layer, `[L]`; it is 0 for a gradient of zeros."""
    size = np.sqrt(self.reconstruction * self.gradient)
    return self.inner / np.where(size > 0, size, 1.0)


def of_sketch(basis: np.ndarray, gradient: np.ndarray, method: str) -> Products:
  """Computes the products of a gradient and the reconstruction by a basis.

  The reconstruction is never formed, since `⟨G, Aᵀ S⟩ = ‖S‖²` and
  `‖Aᵀ S‖² = ⟨S, (A Aᵀ) S⟩`. Least squares projects G on the rows of A, so that
  both products are `⟨S, (A Aᵀ)⁻¹ S⟩`.

  Args:
    basis: `[L, r, d_in]`.
    gradient: `[L, d_in, d_out]`.
    method: One of `METHODS`.
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
  """Reconstructs the sum of gradients, each from the sketch by its own basis.

  Args:
    bases: `A_t`, `[L, r, d_in]` each.
    gradients: `G_t`, `[L, d_in, d_out]` each.
    method: One of `METHODS`.

  Returns:
    `Σ_t A_tᵀ S_t`, or `Σ_t A_tᵀ (A_t A_tᵀ)⁻¹ S_t` by least squares,
    `[L, d_in, d_out]`.
  """
  factors = [a @ g for a, g in zip(bases, gradients, strict=True)]
  if method == "least_squares":
    inverses = [np.linalg.inv(_gram(a)).astype(np.float32) for a in bases]
    factors = [x @ s for x, s in zip(inverses, factors, strict=True)]
  # One product is enough: the sum over t is a sum over more rows.
  basis = np.concatenate(bases, axis=-2)
  return basis.swapaxes(-1, -2) @ np.concatenate(factors, axis=-2)


def of_arrays(reconstruction: np.ndarray, gradient: np.ndarray) -> Products:
  """Computes the products of a gradient and a reconstruction of its shape."""
  return Products(
      _dot(reconstruction, gradient),
      _dot(reconstruction, reconstruction),
      _dot(gradient, gradient),
  )


def predicted(rank: float | np.ndarray, d_in: int, method: str) -> np.ndarray:
  """Returns the predicted cosine with an i.i.d. basis, for any gradient.

  It is 1 at full rank, where the library's basis is the identity.

  Args:
    rank: One or more ranks.
    d_in: Number of inputs of the kernel.
    method: One of `METHODS`.
  """
  rank = np.minimum(rank, d_in)
  if method == "plain":
    return np.where(rank < d_in, np.sqrt(rank / (rank + d_in)), 1.0)
  return np.sqrt(rank / d_in)


def _gram(basis: np.ndarray) -> np.ndarray:
  """Returns `A Aᵀ`, float64 `[L, r, r]`."""
  wide = basis.astype(np.float64)
  return wide @ wide.swapaxes(-1, -2)


def _dot(a: np.ndarray, b: np.ndarray) -> np.ndarray:
  """Returns inner products by layer, float64 `[L]`."""
  return np.einsum("lij,lij->l", a, b, dtype=np.float64)
