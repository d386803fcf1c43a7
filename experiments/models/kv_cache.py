"""A cache of keys and values of earlier tokens, in floats or in int8.

Axis letters: L layers, B sequences, M slots of a sequence, K key-value heads,
H features per head, S new tokens.
"""

import functools
import math
from typing import NamedTuple

from flax import struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from experiments.models.attention import MASKED
from experiments.models.config import DecoderConfig
from experiments.models.float32_product import float32_product

# A cache is divided into at most `_MAX_PARTS` parts of at least `_MIN_SLOTS`
# slots. One-token attention reads a whole number of parts.
_MAX_PARTS, _MIN_SLOTS = 8, 16
# Caches of up to this many slots are read as one window, longer ones by parts.
_MAX_WINDOW = 512


class Place(NamedTuple):
  """The slots that new tokens are written to, and those that they see.

  Attributes:
    start: Int32 scalar, the first slot to write.
    first: Int32 scalar, the first slot that any of the tokens sees.
    last: Int32 scalar, one past the last slot that any of them sees.
  """

  start: jax.Array | int
  first: jax.Array
  last: jax.Array


@struct.dataclass
class Cache:
  """Keys and values of all layers, laid out for the products of one query.

  Attributes:
    k: `[L, B, K, H, M]` keys, after the rotation by position.
    v: `[L, B, K, M, H]` values.
    k_scale: `[L, B, K, M]` float32, the unit of int8 keys; None for floats.
    v_scale: The same for values.
  """

  k: jax.Array
  v: jax.Array
  k_scale: jax.Array | None = None
  v_scale: jax.Array | None = None

  @property
  def length(self) -> int:
    """Number of slots per sequence, M."""
    return self.v.shape[3]


def _shape(config: DecoderConfig, batch: int, length: int) -> tuple[int, ...]:
  """Returns the shape `[L, B, K, M, H]`."""
  return (config.n_layers, batch, config.n_kv_heads, length, config.head_dim)


def _check_dtype(dtype: DTypeLike) -> jnp.dtype:
  """Returns the dtype of keys and values; refuses all but floats and int8."""
  dtype = jnp.dtype(dtype)
  if dtype != jnp.int8 and not jnp.issubdtype(dtype, jnp.floating):
    raise ValueError(
        f"a cache's dtype must be a float or int8, got {dtype.name!r}"
    )
  return dtype


def init_cache(
    config: DecoderConfig,
    batch: int,
    length: int,
    dtype: DTypeLike | None = None,
) -> Cache:
  """Makes an empty cache.

  Args:
    config: The decoder's configuration.
    batch: Number of sequences, B.
    length: Number of slots per sequence, M; a slot holds one token.
    dtype: Dtype of keys and values; None means `config.dtype`. `'int8'` rounds
      the features of each token and head to multiples of a unit, which is the
      largest magnitude among them divided by 127.

  Returns:
    A `Cache` of zeros.

  Raises:
    ValueError: If `length` exceeds `config.max_length`, or the dtype is
      neither a float nor int8.
  """
  config.check_length(length)
  dtype = _check_dtype(config.dtype if dtype is None else dtype)
  shape = _shape(config, batch, length)
  k = jnp.zeros((*shape[:-2], shape[-1], shape[-2]), dtype)
  v = jnp.zeros(shape, dtype)
  if dtype != jnp.int8:
    return Cache(k, v)
  scale = lambda: jnp.zeros(shape[:-1], jnp.float32)
  return Cache(k, v, scale(), scale())


def cache_bytes(
    config: DecoderConfig,
    batch: int,
    length: int,
    dtype: DTypeLike | None = None,
) -> int:
  """Returns the bytes of a cache, summed over all devices.

  Args:
    config: The decoder's configuration.
    batch: Number of sequences, B.
    length: Number of slots per sequence, M.
    dtype: Dtype of keys and values, as in `init_cache`.
  """
  dtype = _check_dtype(config.dtype if dtype is None else dtype)
  shape = _shape(config, batch, length)
  scales = 4 * math.prod(shape[:-1]) if dtype == jnp.int8 else 0
  return 2 * (math.prod(shape) * dtype.itemsize + scales)


def write(
    cache: Cache,
    layer: jax.Array | int,
    index: jax.Array | int,
    k: jax.Array,
    v: jax.Array,
) -> Cache:
  """Writes a layer's new keys and values.

  Args:
    cache: The cache of all layers.
    layer: Int32 scalar, the layer's index.
    index: Int32 scalar, the first slot to write.
    k: Keys `[B, S, K, H]`.
    v: Values `[B, S, K, H]`.

  Returns:
    The new cache.
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
    layer: jax.Array | int,
    length: int,
    dtype: DTypeLike,
    start: jax.Array | int = 0,
) -> tuple[jax.Array, jax.Array]:
  """Reads a layer's keys `[B, K, H, length]` and values `[B, K, length, H]`.

  Args:
    cache: The cache of all layers.
    layer: Int32 scalar, the layer's index.
    length: Number of slots to read.
    dtype: Dtype of the result.
    start: Int32 scalar, the first slot to read.
  """

  def get(stacked, axis):
    sizes, starts = [1, *stacked.shape[1:]], [layer, *(0,) * (stacked.ndim - 1)]
    sizes[axis], starts[axis] = length, start
    return jax.lax.dynamic_slice(stacked, starts, sizes)[0]

  k, v = get(cache.k, 4), get(cache.v, 3)
  if cache.k_scale is not None:
    k = k.astype(jnp.float32) * get(cache.k_scale, 3)[:, :, None]
    v = v.astype(jnp.float32) * get(cache.v_scale, 3)[..., None]
  return k.astype(dtype), v.astype(dtype)


def read_tokens(
    cache: Cache, layer: jax.Array | int, length: int, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array]:
  """Reads a layer's first keys and values, each `[B, length, K, H]`.

  Args:
    cache: The cache of all layers.
    layer: Int32 scalar, the layer's index.
    length: Number of slots to read.
    dtype: Dtype of the result.
  """
  k, v = read(cache, layer, length, dtype)
  return k.transpose(0, 3, 1, 2), v.transpose(0, 2, 1, 3)


def place(index: jax.Array | int, mask: jax.Array) -> Place:
  """Returns the place of new tokens.

  Args:
    index: Int32 scalar, the first slot that they are written to.
    mask: `[B, S, M]` bool, True where a token sees a slot.
  """
  seen = jnp.any(mask, axis=(0, 1))
  n = seen.shape[0]
  return Place(
      index,
      jnp.argmax(seen).astype(jnp.int32),
      n - jnp.argmax(seen[::-1]).astype(jnp.int32),
  )


def attend(
    cache: Cache,
    layer: jax.Array | int,
    q: jax.Array,
    mask: jax.Array,
    where: Place,
) -> jax.Array:
  """Computes one new token's attention per sequence to the used slots.

  A short cache is read as one window. The window starts at the first slot that
  any token sees and has the smallest of a few compiled widths that reaches the
  last one. For a long cache, the copies that each width needs would be large.
  It is therefore read part by part, with a running maximum and sum (online
  softmax, Milakov and Gimelshein, 2018). Only one part at a time is converted
  to floats, and parts that no token sees are skipped.

  Args:
    cache: The cache of all layers, with the new token already written.
    layer: Int32 scalar, the layer's index.
    q: Queries `[B, 1, heads, H]`; heads is a multiple of K.
    mask: `[B, 1, A]` bool, True at slots that a token sees; A ≤ M.
    where: The result of `place(index, mask)`.

  Returns:
    `[B, 1, heads * H]` in the dtype of q.
  """
  batch, _, heads, size = q.shape
  kv_heads, length = cache.v.shape[2], mask.shape[-1]
  grouped = q.reshape(batch, kv_heads, heads // kv_heads, size)

  n_parts = min(max(length // _MIN_SLOTS, 1), _MAX_PARTS)
  unit = -(-length // n_parts)

  def scores(begin, width):
    # [B, K, G, width] scores and [B, K, width, H] values. Near the end, the
    # window starts before `begin`; the slots there are masked.
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

  if length <= _MAX_WINDOW:
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
  """Rounds to int8, symmetrically, with one unit along an axis.

  Args:
    x: An array, for example `[..., H]`.
    axis: The axis whose entries share a unit.

  Returns:
    Int8 multiples from -127 to 127 in the shape of x, and the float32 unit in
    the shape of x without the axis: the largest magnitude divided by 127. Their
    product differs from x by at most half a unit.
  """
  x = x.astype(jnp.float32)
  scale = jnp.max(jnp.abs(x), axis=axis, keepdims=True) / 127
  units = x / jnp.maximum(scale, jnp.finfo(jnp.float32).tiny)
  return jnp.round(units).astype(jnp.int8), jnp.squeeze(scale, axis)
