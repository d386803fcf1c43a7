"""One decoder for Llama, SmolLM2, Qwen2, Qwen2.5 and Qwen3 (dense).

The layers are stacked: each parameter under `layers` has a leading layer axis,
and the forward pass is one `scan`. Axis letters: N blocks of tokens, B batch,
S queries, M keys, T tokens, D features, H features per head, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from experiments.models import attention, kv_cache
from experiments.models.config import DecoderConfig
from experiments.models.float32_product import float32_product
from experiments.models.kv_cache import Cache, Place
from experiments.parallel.sharding import constrain
from logra_jax import linen as lnn

# Between products with split kernels, the residual stream is split by tokens.
_RESIDUAL = ("batch", "sequence", None)


class Embed(nn.Module):
  """Token embeddings `[V, D]`, which are also the head of a tied model."""

  config: DecoderConfig

  def setup(self) -> None:
    config = self.config
    self.embedding = self.param(
        "embedding",
        nn.initializers.normal(0.02),
        (config.vocab_size, config.d_model),
        config.param_dtype,
    )

  def __call__(self, tokens: jax.Array) -> jax.Array:
    """Looks up `[B, T, D]` features of tokens `[B, T]`."""
    tokens = constrain(tokens, "gathered_batch", None)
    # For an id outside the vocabulary, `take` gives NaN and not a neighbour.
    x = jnp.take(self.embedding, tokens, axis=0).astype(self.config.dtype)
    return constrain(x, "gathered_batch", None, None)

  def attend(self, hidden: jax.Array) -> jax.Array:
    """Computes logits `[..., V]` float32 of features `[..., D]`."""
    return _head_logits("...d,vd->...v", hidden, self.embedding, self.config)


class Head(nn.Module):
  """An untied head `[D, V]`."""

  config: DecoderConfig

  @nn.compact
  def __call__(self, hidden: jax.Array) -> jax.Array:
    """Computes logits `[..., V]` float32 of features `[..., D]`."""
    config = self.config
    kernel = self.param(
        "kernel",
        nn.initializers.normal(0.02),
        (config.d_model, config.vocab_size),
        config.param_dtype,
    )
    return _head_logits("...d,dv->...v", hidden, kernel, config)


def _head_logits(
    spec: str, hidden: jax.Array, kernel: jax.Array, config: DecoderConfig
) -> jax.Array:
  """Computes float32 logits, sharded over the vocabulary like the head.

  The features are sent to the head's devices; the head is not moved.
  """
  between = (None,) * (hidden.ndim - 1)
  hidden = constrain(hidden, "gathered_batch", *between)
  logits = float32_product(
      spec, hidden.astype(config.dtype), kernel.astype(config.dtype)
  )
  return constrain(logits, "gathered_batch", *between[1:], "vocab")


class Layer(nn.Module):
  """Attention and a gated feed-forward, each on a normalised residual."""

  config: DecoderConfig

  def _norm(self, name: str) -> nn.RMSNorm:
    config = self.config
    return nn.RMSNorm(
        epsilon=config.norm_eps,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        name=name,
    )

  def _dense(
      self, features: int, name: str, use_bias: bool = False
  ) -> lnn.Dense:
    return lnn.Dense(
        features,
        use_bias=use_bias,
        dtype=self.config.dtype,
        param_dtype=self.config.param_dtype,
        name=name,
    )

  @nn.compact
  def __call__(
      self,
      carry: tuple[jax.Array, Cache | None],
      layer: jax.Array,
      rope: tuple[jax.Array, jax.Array],
      mask: jax.Array,
      where: Any,
  ) -> tuple[tuple[jax.Array, Cache | None], None]:
    """Computes one layer, as the body of the scan over layers.

    Each sequence is N blocks of S tokens.

    Args:
      carry: Residual stream `[N, B, S, D]`, and the cache of all layers or
        None. The cache is carried, not scanned over, so that it is updated in
        place.
      layer: Index of this layer, int32 scalar.
      rope: Cosine and sine tables, with a leading block axis.
      mask: `[N, B or 1, S, M]` bool, True where a query may see a key.
      where: The `Place` of new tokens in the cache, or None without a cache.

    Returns:
      The new carry, and None.
    """
    x, cache = carry
    x = constrain(x, None, *_RESIDUAL)
    q, k, v = _blockwise(Layer._project, self, x, *rope)
    # The padding of the last block holds no keys.
    k, v = (attention.join_blocks(y)[:, : mask.shape[-1]] for y in (k, v))
    if cache is not None:
      cache = kv_cache.write(cache, layer, where.start, k, v)
    if cache is not None and mask.shape[2] > 1:
      k, v = kv_cache.read_tokens(cache, layer, mask.shape[-1], k.dtype)

    def rest(module, x, q, mask):
      if cache is not None and mask.shape[1] == 1:
        y = kv_cache.attend(cache, layer, q, mask, where)
      else:
        y = attention.attend(q, k, v, mask, module.config.attention_block)
      return module._feed(x, y)

    return (_blockwise(rest, self, x, q, mask), cache), None

  def _project(
      self, x: jax.Array, cos: jax.Array, sin: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Projects `[B, S, D]` to queries, keys and values `[B, S, heads, H]`."""
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
    return attention.rotate(q, cos, sin), attention.rotate(k, cos, sin), v

  def _feed(self, x: jax.Array, y: jax.Array) -> jax.Array:
    """Adds attention's result `y` and the feed-forward to the residual `x`."""
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

  def _normed(self, x: jax.Array, name: str) -> jax.Array:
    """Normalises the residual stream and gathers its tokens."""
    # Sharding the result like x first gathers the compute dtype, not float32.
    y = constrain(self._norm(name)(x), *_RESIDUAL)
    return constrain(y, "batch", None, None)


def _blockwise(
    fn: Callable[..., Any], module: nn.Module, *xs: jax.Array
) -> Any:
  """Maps `fn(module, *blocks)` over the first axis of xs, block by block.

  If there are several blocks, the backward pass recomputes each of them.
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

  Its parameters are:

  - `embed/embedding [V, D]`;
  - under `layers`, stacked over layers,
    `{q,k,v,o,gate,up,down}_proj/kernel [n_layers, d_in, d_out]`, their `bias`
    where the family has one, and `{attn,mlp,q,k}_norm/scale`;
  - `norm/scale [D]`;
  - `lm_head/kernel [D, V]`, unless the head is tied.

  Call methods other than `__call__` as
  `model.apply(variables, ..., method="hidden")`.

  Attributes:
    config: Shapes and settings.
  """

  config: DecoderConfig

  def setup(self) -> None:
    config = self.config
    self.embed = Embed(config)
    # The scan over layers already keeps XLA from undoing the recomputation.
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
    """Computes logits `[B, T, V]` float32; takes the arguments of `hidden`."""
    return self.head(self.hidden(tokens, valid))

  def hidden(
      self, tokens: jax.Array, valid: jax.Array | None = None
  ) -> jax.Array:
    """Computes the features after the final norm, before the head.

    Args:
      tokens: `[B, T]` int32.
      valid: `[B, T]` bool, False at padding; None means no padding. A valid
        token's position is the number of valid tokens before it, so padding
        on the left (or anywhere) does not change what valid tokens see.

    Returns:
      `[B, T, D]` in `config.dtype`; meaningless at padding.

    Raises:
      ValueError: If T exceeds `config.max_length`.
    """
    length = tokens.shape[1]
    self.config.check_length(length)
    positions, mask = attention.causal_mask(length, valid)
    return self._run(tokens, positions, mask, None, None)[0]

  def hidden_masked(
      self, tokens: jax.Array, positions: jax.Array, mask: jax.Array
  ) -> jax.Array:
    """Like `hidden`, with positions and mask given by the caller.

    Rows of several packed texts need this, for example.

    Args:
      tokens: `[B, T]` int32.
      positions: `[B, T]` int32, the position of each token in its own text.
      mask: `[B or 1, T, T]` bool, True where token i may see token j.

    Returns:
      `[B, T, D]` in `config.dtype`.
    """
    return self._run(tokens, positions, mask, None, None)[0]

  def head(self, hidden: jax.Array) -> jax.Array:
    """Computes logits `[..., V]` float32 of features `[..., D]`."""
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
    """Continues sequences by a whole prompt, or by one token at a time.

    Args:
      tokens: `[B, S]` int32, written to slots `index ... index + S - 1`.
      valid_cache: `[B, M]` bool, False at padding. It covers the new tokens
        too: a token sees the valid slots up to its own.
      positions: `[B, S]` int32, the number of valid tokens before each.
      cache: A cache from `kv_cache.init_cache`, with M slots.
      index: Int32 scalar. The caller makes sure that `index + S <= M`: a traced
        index that is too large overwrites the last slots.

    Returns:
      Features after the final norm `[B, S, D]`, and the new cache.
    """
    mask = attention.decode_mask(tokens.shape[1], valid_cache, index)
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
    """Like `decode`, with the mask given by the caller.

    A cache whose slots are in another order needs this.

    Args:
      tokens: `[B, S]` int32, written to slots `index ... index + S - 1`.
      positions: `[B, S]` int32, the position of each token in its own text.
      mask: `[B, S, A]` bool, True where a token may see a slot, including its
        own. Slots from A on are not read; A ≤ M.
      cache: A cache from `kv_cache.init_cache`, with M slots.
      index: Int32 scalar, the first slot to write.

    Returns:
      Features after the final norm `[B, S, D]`, and the new cache.
    """
    where = kv_cache.place(index, mask)
    return self._run(tokens, positions, mask, cache, where)

  def _run(
      self,
      tokens: jax.Array,
      positions: jax.Array,
      mask: jax.Array,
      cache: Cache | None,
      where: Place | None,
  ) -> tuple[jax.Array, Any]:
    """Applies embedding, layers and final norm; returns features and cache."""
    length = tokens.shape[1]
    # Decoding with a cache writes a single block.
    block = length if cache is not None else self.config.token_block or length
    block = min(block, length)
    x, mask, *rope = (
        attention.split_blocks(a, block)
        for a in (
            self.embed(tokens),
            mask,
            *attention.rope_tables(self.config, positions),
        )
    )
    layers = jnp.arange(self.config.n_layers)
    (x, cache), _ = self.layers((x, cache), layers, rope, mask, where)
    x = attention.join_blocks(constrain(x, None, *_RESIDUAL))[:, :length]
    return self.norm(constrain(x, "batch", None, None)), cache
