"""The random basis `A [rank, d_in]`: drawn on demand, never stored.

A basis is a pure function of a key, so every device, every process and every
later pass (backward, probe, merge) draws the same one. Entries have variance
`1 / rank`, hence `E[Aᵀ A] = I` and `Aᵀ (A G)` is an unbiased estimate of `G`.
"""

from collections.abc import Callable
import functools
import math
import zlib

import jax
from jax import lax
import jax.numpy as jnp

_WORD = 32  # random bits in one draw of the generator


def _rademacher(key: jax.Array, rank: int, d_in: int) -> jax.Array:
  """Signs ±1, one random bit each: a 32nd of the cost of a float draw."""
  words = -(-d_in // _WORD)
  bits = jax.random.bits(key, (rank, words), jnp.uint32)
  bits = (bits[..., None] >> jnp.arange(_WORD, dtype=jnp.uint32)) & 1
  bits = bits.reshape(rank, words * _WORD)[:, :d_in]
  return 1.0 - 2.0 * bits.astype(jnp.float32)


def _gaussian(key: jax.Array, rank: int, d_in: int) -> jax.Array:
  return jax.random.normal(key, (rank, d_in), jnp.float32)


def _orthonormal(key: jax.Array, rank: int, d_in: int) -> jax.Array:
  """Rows orthogonal, of norm √d_in, uniformly distributed (Haar)."""
  q, r = jnp.linalg.qr(jax.random.normal(key, (d_in, rank), jnp.float32))
  return jnp.sqrt(d_in) * (q * jnp.sign(jnp.diagonal(r))).T


# Rows with entries of unit variance; `A` is these divided by √rank.
DISTRIBUTIONS: dict[str, Callable[[jax.Array, int, int], jax.Array]] = {
    "rademacher": _rademacher,
    "gaussian": _gaussian,
    "orthonormal": _orthonormal,
}


def target_key(
    seed: jax.Array, count: jax.Array, path: str, batch: tuple[int, ...]
) -> jax.Array:
  """Key data of one target's bases, a function of (seed, count, path) only.

  Args:
    seed: uint32 scalar.
    count: int32 scalar, the update the basis belongs to.
    path: the kernel's path in the parameter tree.
    batch: the kernel's batch axes (stacked layers, experts).

  Returns:
    `[*batch, 2]` uint32, one key for each matrix of the stack.
  """
  key = jax.random.key(seed, impl="threefry2x32")
  key = jax.random.fold_in(key, zlib.crc32(path.encode()))
  key = jax.random.fold_in(key, count)
  return jax.random.key_data(jax.random.split(key, batch))


def _rows(
    key_data: jax.Array, rank: int, d_in: int, distribution: str
) -> jax.Array:
  """`√rank · A`, `[*batch, rank, d_in]` float32."""
  if key_data.ndim > 1:
    return jax.vmap(lambda k: _rows(k, rank, d_in, distribution))(key_data)
  key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
  return DISTRIBUTIONS[distribution](key, rank, d_in)


def draw(
    key_data: jax.Array, rank: int, d_in: int, distribution: str
) -> jax.Array:
  """Draws the basis `A [*batch, rank, d_in]` in float32.

  Args:
    key_data: `[*batch, 2]` uint32, see `target_key`.
    rank: rows of the basis.
    d_in: columns of the basis.
    distribution: a name in `DISTRIBUTIONS`.
  """
  return _rows(key_data, rank, d_in, distribution) / math.sqrt(rank)


def project(
    x: jax.Array, key_data: jax.Array, rank: int, distribution: str
) -> jax.Array:
  """`X Aᵀ`, `[*batch, N, rank]` in the dtype of `x [*batch, N, d_in]`.

  The unscaled rows of a Rademacher basis are exact in every float dtype, so
  the division by √rank comes after the product, in float32.
  """
  rows = _rows(key_data, rank, x.shape[-1], distribution).astype(x.dtype)
  # [*batch, N, rank] = [*batch, N, d_in] @ [*batch, rank, d_in]ᵀ
  y = jnp.einsum(
      "...ni,...ri->...nr", x, rows, preferred_element_type=jnp.float32
  )
  return (y / math.sqrt(rank)).astype(x.dtype)


def gram_norm_squared(basis: jax.Array, factor: jax.Array) -> jax.Array:
  """`‖Aᵀ D‖²` summed over the stack, without forming `Aᵀ D`.

  `‖Aᵀ D‖² = ⟨D, (A Aᵀ) D⟩` needs one rank by rank matrix.

  Args:
    basis: `A [*batch, rank, d_in]` float32.
    factor: `D [*batch, rank, d_out]` float32.
  """
  einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
  gram = einsum("...ri,...si->...rs", basis, basis)
  return jnp.sum(factor * einsum("...rs,...so->...ro", gram, factor))
