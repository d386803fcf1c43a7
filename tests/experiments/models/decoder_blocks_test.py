"""Computing a decoder in blocks of tokens changes no number."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.models import decoder, kv_cache
from experiments.models.config import DecoderConfig
import logra_jax

LENGTH = 7
CONFIG = DecoderConfig(
    vocab_size=16,
    d_model=12,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=4,
    d_ff=20,
    qkv_bias=True,
    qk_norm=True,
    max_length=16,
)
TX = logra_jax.sketch(3, others=optax.adam(0.1))


def inputs():
  init = jax.jit(decoder.Decoder(CONFIG).init)
  params = init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
  # Biases too, and no two scales alike.
  leaves, treedef = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  params = jax.tree.unflatten(
      treedef,
      [
          x + 0.2 * jax.random.normal(k, x.shape)
          for k, x in zip(keys, leaves, strict=True)
      ],
  )
  tokens = jax.random.randint(jax.random.key(2), (3, LENGTH), 0, 16)
  # Padding before and after.
  place = np.arange(LENGTH)[None]
  valid = (place >= np.array([[0], [2], [1]])) & (
      place < np.array([[7], [5], [7]])
  )
  return params, tokens, jnp.asarray(valid)


@functools.partial(jax.jit, static_argnums=0)
def run(model, params, tokens, valid):
  """Loss, sketches and gradients, and the derivative along a direction."""

  def loss(params):
    logits = model.apply({"params": params}, tokens, valid)
    keep = valid[..., None]
    return jnp.sum(jnp.where(keep, jnp.sin(logits), 0.0))

  value, grads = logra_jax.value_and_grad(loss)(params, TX.init(params))
  along = jax.tree.map(jnp.cos, params)
  return value, grads, jax.jvp(loss, (params,), (along,))[1]


@functools.cache
def whole():
  return run(decoder.Decoder(CONFIG), *inputs())


@pytest.mark.parametrize(
    "blocks",
    [
        # 3 and 4 do not divide 7 tokens, nor 3 queries a block of 4.
        pytest.param({"token_block": 3}, marks=pytest.mark.slow),
        {"token_block": 4, "attention_block": 3, "remat": True},
    ],
)
def test_blocks_change_no_value_sketch_or_tangent(blocks):
  config = dataclasses.replace(CONFIG, **blocks)
  got = run(decoder.Decoder(config), *inputs())
  assert all(np.abs(x).max() > 1e-3 for x in jax.tree.leaves(whole()))
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
      got,
      whole(),
  )


def test_decoding_with_a_cache_ignores_blocks():
  params, tokens, _ = inputs()
  valid = jnp.ones((3, LENGTH), bool)
  model = decoder.Decoder(
      dataclasses.replace(CONFIG, token_block=3, attention_block=2)
  )
  cache = kv_cache.init_cache(model.config, 3, LENGTH)
  positions = jnp.arange(LENGTH)[None].repeat(3, 0)
  variables = {"params": params}
  hidden, _ = jax.jit(functools.partial(model.apply, method="decode"))(
      variables, tokens, valid, positions, cache, 0
  )
  plain = decoder.Decoder(CONFIG)
  wanted = jax.jit(functools.partial(plain.apply, method="hidden"))(
      variables, tokens, valid
  )
  np.testing.assert_allclose(hidden, wanted, rtol=1e-4, atol=1e-5)
