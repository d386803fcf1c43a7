"""One decoder for Llama, SmolLM2, Qwen2, Qwen2.5 and Qwen3 (dense).

The layers are stacked: each parameter under `layers` has a leading layer axis
and the forward pass is one `scan`. Axis letters: B batch, S queries, M keys,
T tokens, D features, K key-value heads, G query heads per key-value head,
H features per head, V vocabulary.
"""

import dataclasses
import math

from flax import linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from experiments.models import kv_cache
from experiments.models.float32_product import float32_product
from experiments.models.kv_cache import Cache
from experiments.parallel.sharding import constrain
from logra_jax import linen as lnn

# Between products with split kernels the residual stream is split by tokens.
_RESIDUAL = ("batch", "sequence", None)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Llama 3's stretching of the rotary wavelengths beyond the old context."""

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_length: int


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """Shapes and switches of a `Decoder`; hashable.

  Attributes:
    vocab_size: number of token ids, V.
    d_model: features of the residual stream, D.
    n_layers: number of layers.
    n_heads: number of query heads.
    n_kv_heads: number of key-value heads; divides `n_heads`.
    head_dim: features per head, H; even.
    d_ff: width of the gated feed-forward layer.
    rope_theta: base of the rotary wavelengths.
    norm_eps: added to the mean square in every RMS norm.
    qkv_bias: whether the query, key and value projections have a bias.
    qk_norm: whether queries and keys are RMS-normalised per head (Qwen3).
    tied_head: whether the head is the embedding transposed.
    max_length: longest sequence in tokens, padding included.
    dtype: dtype of activations and products. Norm statistics, softmax and
      logits are float32 in any case.
    param_dtype: dtype that `init` creates parameters in.
    remat: whether each layer is recomputed in the backward pass.
    attention_block: queries whose scores are in memory at once, in the backward
      pass too; None means all of them.
    token_block: tokens of each sequence that go through a layer's projections
      at once, each block again in the backward pass; None means all of them.
    family: `'llama'`, `'qwen2'` or `'qwen3'`: the architecture to export as.
    rope_scaling: Llama 3's rotary scaling, or None.
  """

  vocab_size: int
  d_model: int
  n_layers: int
  n_heads: int
  n_kv_heads: int
  head_dim: int
  d_ff: int
  rope_theta: float = 10000.0
  norm_eps: float = 1e-6
  qkv_bias: bool = False
  qk_norm: bool = False
  tied_head: bool = False
  max_length: int = 2048
  dtype: DTypeLike = "float32"
  param_dtype: DTypeLike = "float32"
  remat: bool = False
  attention_block: int | None = None
  token_block: int | None = None
  family: str = "llama"
  rope_scaling: RopeScaling | None = None

  def __post_init__(self):
    sizes = (
        "vocab_size d_model n_layers n_heads n_kv_heads head_dim d_ff"
        " max_length"
    )
    for name in sizes.split():
      value = vars(self)[name]
      if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive int, got {value!r}")
    if self.n_heads % self.n_kv_heads:
      raise ValueError(
          f"n_kv_heads must divide n_heads={self.n_heads}, "
          f"got {self.n_kv_heads}"
      )
    for name in ("attention_block", "token_block"):
      block = vars(self)[name]
      if block is not None and (not isinstance(block, int) or block < 1):
        raise ValueError(
            f"{name} must be a positive int or None, got {block!r}"
        )
    if self.head_dim % 2:
      raise ValueError(f"head_dim must be even, got {self.head_dim}")


init_cache = kv_cache.init_cache


def _check_length(config: DecoderConfig, length: int) -> None:
  """Refuses sequences that the model was not trained for."""
  if length > config.max_length:
    raise ValueError(
        f"sequence of {length} tokens is longer than "
        f"max_length={config.max_length}: shorten it, or load the model with "
        "a larger max_length"
    )


def rope_frequencies(config: DecoderConfig) -> jax.Array:
  """Radians per position of each rotated pair: `[H / 2]` float32."""
  half = config.head_dim // 2
  exponent = jnp.arange(half, dtype=jnp.float32) / half
  freqs = 1.0 / config.rope_theta**exponent
  scaling = config.rope_scaling
  if scaling is None:
    return freqs
  # Turns within the old context: few turns are stretched by `factor`, many
  # are kept, and between the two bounds the frequency is interpolated.
  turns = scaling.original_max_length * freqs / (2 * math.pi)
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
  return freqs * (keep + (1.0 - keep) / scaling.factor)


def _rope_tables(config, positions):
  """Cosine and sine of each angle: two `[B, S, 1, H / 2]` float32."""
  angles = positions[..., None].astype(jnp.float32) * rope_frequencies(config)
  return jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]


def _rotate(x, rope):
  """Rotates feature i of `[B, S, heads, H]` with feature i + H / 2."""
  cos, sin = rope
  a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
  return turned.astype(x.dtype)


def _attend(q, k, v, mask, block):
  """Grouped attention, `block` queries at a time.

  q `[B, S, K * G, H]`, k and v `[B, M, K, H]`, mask `[B or 1, S, M]` bool;
  returns `[B, S, K * G * H]`. Key-value heads are never repeated in memory.
  """
  batch, queries, n_heads, head_dim = q.shape
  n_kv_heads = k.shape[2]
  q = q.reshape(batch, queries, n_kv_heads, n_heads // n_kv_heads, head_dim)
  if block is None or block >= queries:
    out = _attend_block(q, k, v, mask)
    return out.reshape(batch, queries, n_heads * head_dim)

  # The scan of `map` already keeps XLA from undoing the recomputation.
  one = jax.checkpoint(
      lambda x: _attend_block(x[0], k, v, x[1]), prevent_cse=False
  )
  out = _join(jax.lax.map(one, (_split(q, block), _split(mask, block))))
  return out.reshape(batch, -1, n_heads * head_dim)[:, :queries]


def _split(x, block):
  """`[B, S, ...]` to `[S / block, B, block, ...]`, padded with zeros."""
  pad = [(0, 0), (0, -x.shape[1] % block)] + [(0, 0)] * (x.ndim - 2)
  x = jnp.pad(x, pad)
  return jnp.moveaxis(x.reshape(x.shape[0], -1, block, *x.shape[2:]), 1, 0)


def _join(x):
  """`[N, B, block, ...]` to `[B, N * block, ...]`."""
  return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, *x.shape[3:])


def _attend_block(q, k, v, mask):
  """`_attend` of q `[B, S, K, G, H]`; returns the same shape."""
  scores = float32_product("bskgh,bmkh->bkgsm", q, k)
  scores = scores * q.shape[-1] ** -0.5
  scores = jnp.where(mask[:, None, None], scores, kv_cache.MASKED)
  weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
  return jnp.einsum("bkgsm,bmkh->bskgh", weights, v)


class Embed(nn.Module):
  """Token embeddings `[V, D]`, and their use as a tied head."""

  config: DecoderConfig

  def setup(self):
    config = self.config
    self.embedding = self.param(
        "embedding",
        nn.initializers.normal(0.02),
        (config.vocab_size, config.d_model),
        config.param_dtype,
    )

  def __call__(self, tokens):
    tokens = constrain(tokens, "gathered_batch", None)
    # `take` gives NaN, not a neighbour, for an id outside the vocabulary.
    x = jnp.take(self.embedding, tokens, axis=0).astype(self.config.dtype)
    return constrain(x, "gathered_batch", None, None)

  def attend(self, hidden):
    return _head_logits("...d,vd->...v", hidden, self.embedding, self.config)


class Head(nn.Module):
  """An untied head `[D, V]`."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, hidden):
    config = self.config
    kernel = self.param(
        "kernel",
        nn.initializers.normal(0.02),
        (config.d_model, config.vocab_size),
        config.param_dtype,
    )
    return _head_logits("...d,dv->...v", hidden, kernel, config)


def _head_logits(spec, hidden, kernel, config):
  """Float32 logits, split over the vocabulary where the head is.

  The features go to the head's devices, and the head nowhere.
  """
  between = (None,) * (hidden.ndim - 1)
  hidden = constrain(hidden, "gathered_batch", *between)
  logits = float32_product(
      spec, hidden.astype(config.dtype), kernel.astype(config.dtype)
  )
  return constrain(logits, "gathered_batch", *between[1:], "vocab")


class Layer(nn.Module):
  """Attention and gated feed-forward, each on a normalised residual."""

  config: DecoderConfig

  def _norm(self, name):
    config = self.config
    return nn.RMSNorm(
        epsilon=config.norm_eps,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        name=name,
    )

  def _dense(self, features, name, use_bias=False):
    return lnn.Dense(
        features,
        use_bias=use_bias,
        dtype=self.config.dtype,
        param_dtype=self.config.param_dtype,
        name=name,
    )

  @nn.compact
  def __call__(self, carry, layer, rope, mask, where):
    """The body of the scan; N blocks of S tokens, N * S of each sequence.

    Args:
      carry: residual stream `[N, B, S, D]` and the whole `Cache` or None. The
        cache is carried and not scanned over, so that it is updated in place.
      layer: index of this layer, int32 scalar.
      rope: tables of `_rope_tables`, with a leading block axis.
      mask: `[N, B or 1, S, M]` bool, True where a query may see a key.
      where: a `Place` in the cache, or None.

    Returns:
      The new carry, and None.
    """
    x, cache = carry
    x = constrain(x, None, *_RESIDUAL)
    q, k, v = _blockwise(Layer._project, self, x, *rope)
    # What fills up the last block is no key.
    k, v = (_join(y)[:, : mask.shape[-1]] for y in (k, v))
    if cache is not None:
      cache = kv_cache.write(cache, layer, where.start, k, v)
    if cache is not None and mask.shape[2] > 1:
      k, v = kv_cache.read_tokens(cache, layer, mask.shape[-1], k.dtype)

    def rest(module, x, q, mask):
      if cache is not None and mask.shape[1] == 1:
        y = kv_cache.attend(cache, layer, q, mask, where)
      else:
        y = _attend(q, k, v, mask, module.config.attention_block)
      return module._feed(x, y)

    return (_blockwise(rest, self, x, q, mask), cache), None

  def _project(self, x, cos, sin):
    """Queries, keys and values `[B, S, heads, H]` of a block `[B, S, D]`."""
    config = self.config

    def heads(y, name, n):
      y = self._dense(n * config.head_dim, name, config.qkv_bias)(y)
      y = y.reshape(*y.shape[:2], n, config.head_dim)
      return constrain(y, "batch", None, "heads", None)

    y = self._normed(x, "attn_norm")
    q = heads(y, "q_proj", config.n_heads)
    k = heads(y, "k_proj", config.n_kv_heads)
    v = heads(y, "v_proj", config.n_kv_heads)
    if config.qk_norm:
      q, k = self._norm("q_norm")(q), self._norm("k_norm")(k)
    return _rotate(q, (cos, sin)), _rotate(k, (cos, sin)), v

  def _feed(self, x, y):
    """A block's residual stream after attention, `y`, and feed-forward."""
    config = self.config
    y = constrain(y, "batch", None, "heads")
    y = self._dense(config.d_model, "o_proj")(y)
    x = x + constrain(y, *_RESIDUAL)

    y = self._normed(x, "mlp_norm")
    gate = self._dense(config.d_ff, "gate_proj")(y)
    y = nn.silu(gate) * self._dense(config.d_ff, "up_proj")(y)
    y = constrain(y, "batch", None, "features")
    y = self._dense(config.d_model, "down_proj")(y)
    return x + constrain(y, *_RESIDUAL)

  def _normed(self, x, name):
    """The normalised residual stream, whole on devices that share tokens."""
    # Split like x in the compute dtype first, lest float32 be gathered.
    y = constrain(self._norm(name)(x), *_RESIDUAL)
    return constrain(y, "batch", None, None)


def _blockwise(fn, module, *xs):
  """`fn(module, *blocks)` along the first axis of xs, one block at a time.

  Several blocks are each computed again in the backward pass.
  """
  if xs[0].shape[0] == 1:
    ys = fn(module, *(x[0] for x in xs))
    return jax.tree.map(lambda y: y[None], ys)
  one = nn.remat(fn, prevent_cse=False)
  blocks = nn.scan(
      lambda module, carry, *xs: (carry, one(module, *xs)),
      variable_broadcast="params",
      split_rngs={"params": False},
  )
  return blocks(module, None, *xs)[1]


class Decoder(nn.Module):
  """A causal language model.

  Parameters: `embed/embedding [V, D]`; under `layers`, stacked over layers,
  `{q,k,v,o,gate,up,down}_proj/kernel [n_layers, d_in, d_out]`, `bias` where
  the family has one, `{attn,mlp,q,k}_norm/scale`; `norm/scale [D]`; without a
  tied head `lm_head/kernel [D, V]`.

  Call the other methods as `model.apply(variables, ..., method="hidden")`.
  """

  config: DecoderConfig

  def setup(self):
    config = self.config
    self.embed = Embed(config)
    # The scan already keeps XLA from undoing the recomputation.
    layer = nn.remat(Layer, prevent_cse=False) if config.remat else Layer
    self.layers = nn.scan(
        layer,
        variable_axes={"params": 0},
        split_rngs={"params": True},
        in_axes=(0, nn.broadcast, nn.broadcast, nn.broadcast),
        length=config.n_layers,
    )(config)
    self.norm = nn.RMSNorm(
        epsilon=config.norm_eps,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
    )
    if not config.tied_head:
      self.lm_head = Head(config)

  def __call__(
      self, tokens: jax.Array, valid: jax.Array | None = None
  ) -> jax.Array:
    """Logits `[B, T, V]` float32; arguments as for `hidden`."""
    return self.head(self.hidden(tokens, valid))

  def hidden(
      self, tokens: jax.Array, valid: jax.Array | None = None
  ) -> jax.Array:
    """Features after the final norm, before the head.

    Args:
      tokens: `[B, T]` int32.
      valid: `[B, T]` bool, False at padding; None means no padding. A valid
        token's position is the number of valid tokens before it, so padding
        on the left (or anywhere) does not change what valid tokens see.

    Returns:
      `[B, T, D]` in `config.dtype`; of no meaning at padding.

    Raises:
      ValueError: if T exceeds `config.max_length`.
    """
    length = tokens.shape[1]
    _check_length(self.config, length)
    mask = jnp.tril(jnp.ones((length, length), bool))[None]
    if valid is None:
      positions = jnp.arange(length)[None]
    else:
      positions = jnp.maximum(jnp.cumsum(valid, axis=1) - 1, 0)
      mask = mask & valid[:, None, :]
    return self._run(tokens, positions, mask, None, None)[0]

  def hidden_masked(
      self, tokens: jax.Array, positions: jax.Array, mask: jax.Array
  ) -> jax.Array:
    """Like `hidden`, for sequences that are laid out in another way.

    Args:
      tokens: `[B, T]` int32.
      positions: `[B, T]` int32, where each token stands in its own text.
      mask: `[B or 1, T, T]` bool, True where token i may see token j.

    Returns:
      `[B, T, D]` in `config.dtype`.
    """
    return self._run(tokens, positions, mask, None, None)[0]

  def head(self, hidden: jax.Array) -> jax.Array:
    """Logits `[..., V]` float32 of features `[..., D]`."""
    if self.config.tied_head:
      return self.embed.attend(hidden)
    return self.lm_head(hidden)

  def decode(
      self,
      tokens: jax.Array,
      valid_cache: jax.Array,
      positions: jax.Array,
      cache: Cache,
      index: jax.Array | int,
  ) -> tuple[jax.Array, Cache]:
    """Continues sequences: a whole prompt, or one token at a time.

    Args:
      tokens: `[B, S]` int32, written to slots `index ... index + S - 1`.
      valid_cache: `[B, M]` bool, False at padding. It covers the new tokens
        too: a token sees the valid slots up to its own.
      positions: `[B, S]` int32, the number of valid tokens before each.
      cache: of `init_cache`, with M slots.
      index: int32 scalar, with `index + S <= M` (the caller's duty: a traced
        index that is too large overwrites the last slots).

    Returns:
      Features after the final norm `[B, S, D]`, and the cache.
    """
    queries, slots = tokens.shape[1], valid_cache.shape[1]
    own = index + jnp.arange(queries)
    mask = jnp.arange(slots)[None, :] <= own[:, None]
    mask = mask[None] & valid_cache[:, None, :]
    where = kv_cache.place(index, mask)
    return self._run(tokens, positions, mask, cache, where)

  def decode_masked(
      self,
      tokens: jax.Array,
      positions: jax.Array,
      mask: jax.Array,
      cache: Cache,
      index: jax.Array | int,
  ) -> tuple[jax.Array, Cache]:
    """Like `decode`, for a cache whose slots are in another order.

    Args:
      tokens: `[B, S]` int32, written to slots `index ... index + S - 1`.
      positions: `[B, S]` int32, where each token stands in its own text.
      mask: `[B, S, A]` bool, True where a token may see a slot, its own among
        them. Slots from A on are not read: A ≤ M.
      cache: of `init_cache`, with M slots.
      index: int32 scalar.

    Returns:
      As `decode`.
    """
    where = kv_cache.place(index, mask)
    return self._run(tokens, positions, mask, cache, where)

  def _run(self, tokens, positions, mask, cache, where):
    """Embedding, layers and final norm; returns features and cache."""
    length = tokens.shape[1]
    # Decoding with a cache writes one block.
    whole = cache is not None or self.config.token_block is None
    block = length if whole else min(self.config.token_block, length)
    x, mask, *rope = (
        _split(a, block)
        for a in (
            self.embed(tokens),
            mask,
            *_rope_tables(self.config, positions),
        )
    )
    layers = jnp.arange(self.config.n_layers)
    (x, cache), _ = self.layers((x, cache), layers, rope, mask, where)
    x = _join(constrain(x, None, *_RESIDUAL))[:, :length]
    return self.norm(constrain(x, "batch", None, None)), cache
