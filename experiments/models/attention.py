"""Rotary positions, masks, and attention in blocks of queries.

Axis letters: B batch, S queries, M keys, K key-value heads, G query heads per
key-value head, H features per head.
"""

import math

import jax
import jax.numpy as jnp

from experiments.models.config import DecoderConfig
from experiments.models.float32_product import float32_product

# A masked score. It is finite so that a row with nothing to attend to (padding)
# gets uniform weights instead of NaN.
MASKED = -1e30


def rope_frequencies(config: DecoderConfig) -> jax.Array:
  """Returns radians per position of each rotated pair, `[H / 2]` float32."""
  half = config.head_dim // 2
  exponent = jnp.arange(half, dtype=jnp.float32) / half
  freqs = 1.0 / config.rope_theta**exponent
  scaling = config.rope_scaling
  if scaling is None:
    return freqs
  # Turns within the original context decide how far a wavelength is stretched.
  turns = scaling.original_max_length * freqs / (2 * math.pi)
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
  return freqs * (keep + (1.0 - keep) / scaling.factor)


def rope_tables(
    config: DecoderConfig, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns cosine and sine of each angle, two `[B, S, 1, H / 2]` float32.

  Args:
    config: The decoder's configuration.
    positions: `[B, S]` int32, the position of each token in its own text.
  """
  angles = positions[..., None].astype(jnp.float32) * rope_frequencies(config)
  return jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
  """Rotates feature i of `[B, S, heads, H]` with feature i + H / 2.

  Args:
    x: Queries or keys.
    cos: Cosines from `rope_tables`.
    sin: Sines from `rope_tables`.

  Returns:
    The rotated features, in the shape and dtype of x.
  """
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return turned.astype(x.dtype)


def causal_mask(
    length: int, valid: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
  """Returns positions and mask of whole sequences.

  Args:
    length: Tokens per sequence, T.
    valid: `[B, T]` bool, False at padding; None means no padding.

  Returns:
    Positions `[B or 1, T]` int32, and a mask `[B or 1, T, T]` bool, True where
    a query may see a key.
  """
  mask = jnp.tril(jnp.ones((length, length), bool))[None]
  if valid is None:
    return jnp.arange(length)[None], mask
  positions = jnp.maximum(jnp.cumsum(valid, axis=1) - 1, 0)
  return positions, mask & valid[:, None, :]


def decode_mask(
    queries: int, valid_cache: jax.Array, index: jax.Array | int
) -> jax.Array:
  """Returns the mask `[B, S, M]` of new tokens that are written to a cache.

  Args:
    queries: Number of new tokens, S.
    valid_cache: `[B, M]` bool, False at padding.
    index: Int32 scalar, the slot of the first new token.
  """
  own = index + jnp.arange(queries)
  mask = jnp.arange(valid_cache.shape[1])[None, :] <= own[:, None]
  return mask[None] & valid_cache[:, None, :]


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    block: int | None = None,
) -> jax.Array:
  """Computes grouped attention, `block` queries at a time.

  Key-value heads are never repeated in memory.

  Args:
    q: Queries `[B, S, K * G, H]`.
    k: Keys `[B, M, K, H]`.
    v: Values `[B, M, K, H]`.
    mask: `[B or 1, S, M]` bool, True where a query may see a key.
    block: Number of queries whose scores are in memory at once, also in the
      backward pass; None means all of them.

  Returns:
    `[B, S, K * G * H]` in the dtype of v.
  """
  batch, queries, n_heads, head_dim = q.shape
  n_kv_heads = k.shape[2]
  q = q.reshape(batch, queries, n_kv_heads, n_heads // n_kv_heads, head_dim)
  if block is None or block >= queries:
    out = _attend_block(q, k, v, mask)
    return out.reshape(batch, queries, n_heads * head_dim)

  # The scan inside `map` already keeps XLA from undoing the recomputation.
  one = jax.checkpoint(
      lambda x: _attend_block(x[0], k, v, x[1]), prevent_cse=False
  )
  blocks = (split_blocks(q, block), split_blocks(mask, block))
  out = join_blocks(jax.lax.map(one, blocks))
  return out.reshape(batch, -1, n_heads * head_dim)[:, :queries]


def _attend_block(q, k, v, mask):
  """Computes `attend` for q `[B, S, K, G, H]`; returns the same shape."""
  scores = float32_product("bskgh,bmkh->bkgsm", q, k)
  scores = scores * q.shape[-1] ** -0.5
  scores = jnp.where(mask[:, None, None], scores, MASKED)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  return jnp.einsum("bkgsm,bmkh->bskgh", weights, v)


def split_blocks(x: jax.Array, block: int) -> jax.Array:
  """Splits `[B, S, ...]` into `[S / block, B, block, ...]`, padding with 0."""
  pad = [(0, 0), (0, -x.shape[1] % block)] + [(0, 0)] * (x.ndim - 2)
  x = jnp.pad(x, pad)
  return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)


def join_blocks(x: jax.Array) -> jax.Array:
  """Joins `[N, B, block, ...]` into `[B, N * block, ...]`."""
  return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])
