"""Keys and values of the tokens read so far, in floats or in int8.

Axis letters: L layers, B sequences, M slots of a sequence, K key-value heads,
H features per head, S new tokens.
"""

import math
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


@struct.dataclass
class Cache:
  """Keys and values of all layers.

  Attributes:
    k: `[L, B, M, K, H]` keys, after the rotation by position.
    v: `[L, B, M, K, H]` values.
    k_scale: None, or of int8 keys `[L, B, M, K]` float32: what a unit is worth.
    v_scale: the same of values.
  """

  k: jax.Array
  v: jax.Array
  k_scale: jax.Array | None = None
  v_scale: jax.Array | None = None


def _shape(config, batch, length):
  return (config.n_layers, batch, length, config.n_kv_heads, config.head_dim)


def _check_dtype(dtype):
  """The dtype of keys and values, which must be a float or int8."""
  dtype = jnp.dtype(dtype)
  if dtype != jnp.int8 and not jnp.issubdtype(dtype, jnp.floating):
    raise ValueError(
        f"a cache's dtype must be a float or int8, got {dtype.name!r}"
    )
  return dtype


def init_cache(
    config: Any,
    batch: int,
    length: int,
    dtype: DTypeLike | None = None,
) -> Cache:
  """An empty cache.

  Args:
    config: the decoder's configuration, a `DecoderConfig`.
    batch: number of sequences, B.
    length: number of slots per sequence in tokens, M.
    dtype: of keys and values; None means `config.dtype`. `'int8'` keeps every
      token's and head's features as whole multiples of their largest / 127.

  Returns:
    A `Cache` of zeros.

  Raises:
    ValueError: if `length` exceeds `config.max_length`, or the dtype is
      neither a float nor int8.
  """
  if length > config.max_length:
    raise ValueError(
        f"sequence of {length} tokens is longer than "
        f"max_length={config.max_length}: shorten it, or load the model with "
        "a larger max_length"
    )
  dtype = _check_dtype(config.dtype if dtype is None else dtype)
  shape = _shape(config, batch, length)
  zeros = lambda: jnp.zeros(shape, dtype)
  if dtype != jnp.int8:
    return Cache(zeros(), zeros())
  scale = lambda: jnp.zeros(shape[:-1], jnp.float32)
  return Cache(zeros(), zeros(), scale(), scale())


def cache_bytes(
    config: Any, batch: int, length: int, dtype: DTypeLike | None = None
) -> int:
  """Bytes of a cache on all devices together; arguments of `init_cache`."""
  dtype = _check_dtype(config.dtype if dtype is None else dtype)
  shape = _shape(config, batch, length)
  scales = 4 * math.prod(shape[:-1]) if dtype == jnp.int8 else 0
  return 2 * (math.prod(shape) * dtype.itemsize + scales)


def write(
    cache: Cache, layer: jax.Array, index: jax.Array, k: jax.Array, v: jax.Array
) -> Cache:
  """Puts a layer's new keys and values in place.

  Args:
    cache: the cache of all layers.
    layer: int32 scalar.
    index: int32 scalar, the first slot to write.
    k: `[B, S, K, H]`.
    v: `[B, S, K, H]`.
  """

  def put(old, new):
    start = (layer, 0, index) + (0,) * (old.ndim - 3)
    return jax.lax.dynamic_update_slice(old, new[None].astype(old.dtype), start)

  if cache.k_scale is None:
    return Cache(put(cache.k, k), put(cache.v, v))
  (k, k_scale), (v, v_scale) = quantise(k), quantise(v)
  return Cache(
      put(cache.k, k),
      put(cache.v, v),
      put(cache.k_scale, k_scale),
      put(cache.v_scale, v_scale),
  )


def read(
    cache: Cache, layer: jax.Array, length: int, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
  """A layer's keys and values `[B, length, K, H]` of the first slots."""

  def get(stacked):
    sizes = (1, stacked.shape[1], length, *stacked.shape[3:])
    start = (layer,) + (0,) * (stacked.ndim - 1)
    return jax.lax.dynamic_slice(stacked, start, sizes)[0]

  def floats(stacked, scale):
    if scale is None:
      return get(stacked).astype(dtype)
    wide = get(stacked).astype(jnp.float32) * get(scale)[..., None]
    return wide.astype(dtype)

  return floats(cache.k, cache.k_scale), floats(cache.v, cache.v_scale)


def quantise(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Rounds to int8, symmetrically.

  Args:
    x: `[..., H]`.

  Returns:
    `[..., H]` int8 from -127 to 127, and `[...]` float32 what a unit is worth:
    the largest magnitude / 127. Their product is off by at most half a unit.
  """
  x = x.astype(jnp.float32)
  scale = jnp.max(jnp.abs(x), axis=-1) / 127
  units = x / jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)[..., None]
  return jnp.round(units).astype(jnp.int8), scale
