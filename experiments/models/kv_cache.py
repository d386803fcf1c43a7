"""Keys and values of the tokens read so far, in floats or in int8.

Axis letters: L layers, B sequences, M slots of a sequence, K key-value heads,
H features per head, S new tokens.
"""

import functools
import math
from typing import Any, NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from experiments.models.float32_product import float32_product

# A masked score. Finite, so that a row with nothing to attend to (padding) is
# uniform and not NaN.
MASKED = -1e30
# A token's attention reads a cache in steps of at most so many parts of its
# slots, each of so many or more.
_PARTS, _LEAST = 8, 16
# Slots up to which they are read at once.
_SHORT = 512


class Place(NamedTuple):
  """Where new tokens go, and what they read.

  Attributes:
    start: int32 scalar, the first slot to write.
    first: int32 scalar, the first slot that any of them sees.
    last: int32 scalar, behind the last one.
  """

  start: jax.Array | int
  first: jax.Array
  last: jax.Array


@struct.dataclass
class Cache:
  """Keys and values of all layers, as the products of one query want them.

  Attributes:
    k: `[L, B, K, H, M]` keys, after the rotation by position.
    v: `[L, B, K, M, H]` values.
    k_scale: None, or of int8 keys `[L, B, K, M]` float32: what a unit is worth.
    v_scale: the same of values.
  """

  k: jax.Array
  v: jax.Array
  k_scale: jax.Array | None = None
  v_scale: jax.Array | None = None

  @property
  def length(self) -> int:
    """Slots of a sequence, M."""
    return self.v.shape[3]


def _shape(config, batch, length):
  return (config.n_layers, batch, config.n_kv_heads, length, config.head_dim)


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
  k = jnp.zeros((*shape[:-2], shape[-1], shape[-2]), dtype)
  v = jnp.zeros(shape, dtype)
  if dtype != jnp.int8:
    return Cache(k, v)
  scale = lambda: jnp.zeros(shape[:-1], jnp.float32)
  return Cache(k, v, scale(), scale())


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

  def put(old, new, axis):
    start = [layer, *(0,) * (old.ndim - 1)]
    start[axis] = index
    return jax.lax.dynamic_update_slice(old, new[None].astype(old.dtype), start)

  k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
  if cache.k_scale is None:
    return Cache(put(cache.k, k, 4), put(cache.v, v, 3))
  (k, k_scale), (v, v_scale) = quantise(k, axis=2), quantise(v, axis=3)
  return Cache(
      put(cache.k, k, 4),
      put(cache.v, v, 3),
      put(cache.k_scale, k_scale, 3),
      put(cache.v_scale, v_scale, 3),
  )


def read(
    cache: Cache,
    layer: jax.Array,
    length: int,
    dtype: DTypeLike,
    start: jax.Array | int = 0,
) -> tuple[jax.Array, jax.Array]:
  """A layer's keys `[B, K, H, length]` and values `[B, K, length, H]`.

  Args:
    cache: the cache of all layers.
    layer: int32 scalar.
    length: number of slots.
    dtype: of the result.
    start: int32 scalar, the first slot.
  """

  def get(stacked, axis):
    sizes, place = [1, *stacked.shape[1:]], [layer, *(0,) * (stacked.ndim - 1)]
    sizes[axis], place[axis] = length, start
    return jax.lax.dynamic_slice(stacked, place, sizes)[0]

  k, v = get(cache.k, 4), get(cache.v, 3)
  if cache.k_scale is not None:
    k = k.astype(jnp.float32) * get(cache.k_scale, 3)[:, :, None]
    v = v.astype(jnp.float32) * get(cache.v_scale, 3)[..., None]
  return k.astype(dtype), v.astype(dtype)


def read_tokens(
    cache: Cache, layer: jax.Array, length: int, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
  """A layer's first `length` keys and values, `[B, length, K, H]` each."""
  k, v = read(cache, layer, length, dtype)
  return k.transpose(0, 3, 1, 2), v.transpose(0, 2, 1, 3)


def place(index: jax.Array | int, mask: jax.Array) -> Place:
  """The place of tokens that are written at `index` and see `[B, S, M]`."""
  seen = jnp.any(mask, axis=(0, 1))
  n = seen.shape[0]
  return Place(
      index,
      jnp.argmax(seen).astype(jnp.int32),
      n - jnp.argmax(seen[::-1]).astype(jnp.int32),
  )


def attend(
    cache: Cache, layer: jax.Array, q: jax.Array, mask: jax.Array, where: Place
) -> jax.Array:
  """Attention of one new token per sequence, to the part of the cache in use.

  A short cache is read as one window from the first slot that any token sees,
  of the least of a few compiled widths that reaches the last one. Of a long one
  the copies that each width needs would be large: it is read in parts, with a
  running maximum and sum (online softmax, Milakov and Gimelshein, 2018), each
  converted to floats and forgotten; parts that no token sees are not read.

  Args:
    cache: with the new token written.
    layer: int32 scalar.
    q: `[B, 1, heads, H]`, heads a multiple of K.
    mask: `[B, 1, A]` bool, True at slots that a token sees; A ≤ M.
    where: of `place(index, mask)`.

  Returns:
    `[B, 1, heads * H]` in the dtype of q.
  """
  batch, _, heads, size = q.shape
  kv_heads, length = cache.v.shape[2], mask.shape[-1]
  grouped = q.reshape(batch, kv_heads, heads // kv_heads, size)

  n_parts = min(max(length // _LEAST, 1), _PARTS)
  unit = -(-length // n_parts)

  def scores(begin, width):
    """Scores `[B, K, G, width]` and values `[B, K, width, H]` from a slot."""
    # At the end what is read reaches back before `begin`.
    start = jnp.minimum(begin, length - width)
    k, v = read(cache, layer, width, q.dtype, start)
    seen = jax.lax.dynamic_slice_in_dim(mask[:, 0], start, width, axis=1)
    seen &= start + jnp.arange(width) >= begin
    product = float32_product("bkgh,bkhm->bkgm", grouped, k)
    return jnp.where(seen[:, None, None], product * size**-0.5, MASKED), v

  def weigh(weights, v):
    return jnp.einsum("bkgm,bkmh->bkgh", weights.astype(v.dtype), v)

  def window(width):
    product, v = scores(where.first, width)
    return weigh(jax.nn.softmax(product, axis=-1), v)

  def part(i, carry):
    largest, total, out = carry
    product, v = scores(i * unit, unit)
    new = jnp.maximum(largest, jnp.max(product, axis=-1))
    weights, shrink = jnp.exp(product - new[..., None]), jnp.exp(largest - new)
    total = total * shrink + jnp.sum(weights, axis=-1)
    return new, total, out * shrink[..., None] + weigh(weights, v)

  if length <= _SHORT:
    widths = [min(unit * (i + 1), length) for i in range(n_parts)]
    out = jax.lax.switch(
        (where.last - where.first - 1) // unit,
        [functools.partial(window, width) for width in widths],
    )
  else:
    shape = grouped.shape
    start = (
        jnp.full(shape[:-1], MASKED, jnp.float32),
        jnp.zeros(shape[:-1], jnp.float32),
        jnp.zeros(shape, jnp.float32),
    )
    first, last = where.first // unit, -(-where.last // unit)
    _, total, out = jax.lax.fori_loop(first, last, part, start)
    out = (out / total[..., None]).astype(q.dtype)
  return out.reshape(batch, 1, heads * size)


def quantise(x: jax.Array, axis: int = -1) -> tuple[jax.Array, jax.Array]:
  """Rounds to int8, symmetrically, with one unit for all along an axis.

  Args:
    x: an array, for example `[..., H]`.
    axis: what shares a unit.

  Returns:
    int8 from -127 to 127 in the shape of x, and float32 without the axis what a
    unit is worth: the largest magnitude / 127. Their product is off by at most
    half a unit.
  """
  x = x.astype(jnp.float32)
  scale = jnp.max(jnp.abs(x), axis=axis, keepdims=True) / 127
  units = x / jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)
  return jnp.round(units).astype(jnp.int8), jnp.squeeze(scale, axis)
