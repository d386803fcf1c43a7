"""The random basis `A [rank, d_in]`, drawn on demand and never stored.

A basis is a pure function of a key, so every device, every process and every
later pass (backward, probe, merge) draws the same one. Its entries have
variance `1 / rank`. Hence `E[Aᵀ A] = I`, and `Aᵀ (A G)` is an unbiased
estimate of `G`. A basis of full rank is the identity: then `Aᵀ (A G) = G`.
"""

from collections.abc import Callable
import functools
import math
import zlib

import jax
from jax import lax
import jax.numpy as jnp

_WORD = 32  # random bits per draw of the generator


def _rademacher(key: jax.Array, rank: int, d_in: int) -> jax.Array:
  """Draws signs ±1 from one random bit each, 1/32 the cost of a float."""
  words = -(-d_in // _WORD)
  bits = jax.random.bits(key, (rank, words), jnp.uint32)
  shifts = jnp.arange(_WORD, dtype=jnp.uint32).reshape(1, 1, _WORD)
  bits = (bits[..., None] >> shifts) & 1
  bits = bits.reshape(rank, words * _WORD)[:, :d_in]
  return 1.0 - 2.0 * bits.astype(jnp.float32)


def _gaussian(key: jax.Array, rank: int, d_in: int) -> jax.Array:
  """Draws standard normal entries."""
  return jax.random.normal(key, (rank, d_in), jnp.float32)


def _orthonormal(key: jax.Array, rank: int, d_in: int) -> jax.Array:
  """Draws orthogonal rows of norm √d_in, uniformly distributed (Haar)."""
  q, r = jnp.linalg.qr(jax.random.normal(key, (d_in, rank), jnp.float32))
  return jnp.sqrt(d_in) * (q * jnp.sign(jnp.diagonal(r))).T


# Each function draws rows whose entries have unit variance; `A` is those rows
# divided by √rank.
DISTRIBUTIONS: dict[str, Callable[[jax.Array, int, int], jax.Array]] = {
    "rademacher": _rademacher,
    "gaussian": _gaussian,
    "orthonormal": _orthonormal,
}


def target_key(
    seed: jax.Array, count: jax.Array, path: str, batch: tuple[int, ...]
) -> jax.Array:
  """Derives the keys of a target's bases from (seed, count, path) only.

  Args:
    seed: uint32 scalar.
    count: int32 scalar, the index of the update that the basis belongs to.
    path: Path of the kernel in the parameter tree.
    batch: Sizes of the kernel's batch axes (stacked layers, experts).

  Returns:
    Key data `[*batch, 2]` uint32, one key for each matrix of the stack.
  """
  key = jax.random.key(seed, impl="threefry2x32")
  key = jax.random.fold_in(key, zlib.crc32(path.encode()))
  key = jax.random.fold_in(key, count)
  return jax.random.key_data(jax.random.split(key, batch))


def _rows(
    key_data: jax.Array, rank: int, d_in: int, distribution: str
) -> jax.Array:
  """Draws `√rank · A`, `[*batch, rank, d_in]` float32."""
  if rank >= d_in:  # A full basis is the identity, and sketches are exact.
    rows = math.sqrt(rank) * jnp.eye(rank, d_in, dtype=jnp.float32)
    return jnp.broadcast_to(rows, (*key_data.shape[:-1], rank, d_in))
  if key_data.ndim > 1:
    return jax.vmap(lambda k: _rows(k, rank, d_in, distribution))(key_data)
  key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
  return DISTRIBUTIONS[distribution](key, rank, d_in)


def draw(
    key_data: jax.Array, rank: int, d_in: int, distribution: str
) -> jax.Array:
  """Draws the basis `A [*batch, rank, d_in]` in float32.

  Args:
    key_data: `[*batch, 2]` uint32, as returned by `target_key`.
    rank: Number of rows of the basis.
    d_in: Number of columns of the basis.
    distribution: A name in `DISTRIBUTIONS`.

  Returns:
    The basis, one matrix for each key.
  """
  return _rows(key_data, rank, d_in, distribution) / math.sqrt(rank)


def project(
    x: jax.Array,
    key_data: jax.Array,
    rank: int,
    distribution: str,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
  """Computes `X Aᵀ [*batch, N, rank]` in the dtype of `x [*batch, N, d_in]`.

  The product is divided by √rank afterwards, in float32, because the unscaled
  rows of a Rademacher basis are exact in every float dtype.
  """
  if rank == x.shape[-1]:
    return x
  rows = _rows(key_data, rank, x.shape[-1], distribution).astype(x.dtype)
  # [*batch, N, rank] = [*batch, N, d_in] @ [*batch, rank, d_in]ᵀ
  y = jnp.einsum(
      "...ni,...ri->...nr",
      x,
      rows,
      precision=precision,
      preferred_element_type=jnp.float32,
  )
  return (y / math.sqrt(rank)).astype(x.dtype)


def gram_norm_squared(basis: jax.Array, factor: jax.Array) -> jax.Array:
  """Computes `‖Aᵀ D‖²`, summed over the stack, without forming `Aᵀ D`.

  The identity `‖Aᵀ D‖² = ⟨D, (A Aᵀ) D⟩` needs only a rank × rank matrix.

  Args:
    basis: `A [*batch, rank, d_in]` float32.
    factor: `D [*batch, rank, d_out]` float32.

  Returns:
    float32 scalar.
  """
  einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)
  gram = einsum("...ri,...si->...rs", basis, basis)
  return jnp.sum(factor * einsum("...rs,...so->...ro", gram, factor))
