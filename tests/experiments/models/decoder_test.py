"""Compares the decoder with transformers' logits, and with itself."""

import dataclasses
import functools

import chex
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.models import load, stacking, tiny
from experiments.models.decoder import Decoder
from experiments.models.kv_cache import init_cache
import logra_jax
from tests.helpers.paths import GOLDEN

FAMILIES = ("llama", "llama3", "qwen2", "qwen3")


def small_config(**changes):
  """Two layers with every optional part."""
  optional = {"qkv_bias": True, "qk_norm": True}
  return dataclasses.replace(tiny.CONFIG, **optional | changes)


def random_params(config, seed=0):
  """Draws parameters so large that the logits depend on every one of them."""
  rng = np.random.default_rng(seed)
  flat = {
      path: jnp.float32(0.3 * rng.standard_normal(shape) + ("norm" in path[-2]))
      for path, shape in stacking.param_shapes(config).items()
  }
  return traverse_util.unflatten_dict(flat)


def run(config, params, *args, method=None):
  """Applies the compiled decoder, which is faster than running op by op."""

  @jax.jit
  def apply(params, *args):
    return Decoder(config).apply({"params": params}, *args, method=method)

  return apply(params, *args)


def random_tokens(shape, seed=1):
  return jax.random.randint(
      jax.random.key(seed), shape, 0, tiny.CONFIG.vocab_size
  )


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_match_transformers(family):
  config, params, _ = load.from_path(GOLDEN / family)
  golden = np.load(GOLDEN / family / "logits.npz")
  valid = golden["valid"]
  logits = run(config, params, golden["tokens"], valid)
  assert logits.dtype == jnp.float32
  error = np.abs(logits - golden["logits"])[valid].max()
  assert error < 1e-4
  # The logits are far from constant, so the bound means something.
  assert golden["logits"][valid].std() > 1


@pytest.mark.parametrize(
    "change", [{"rope_theta": 1e4}, {"rope_scaling": None}, {"norm_eps": 1e-2}]
)
def test_golden_logits_reject_a_wrong_model(change):
  config, params, _ = load.from_path(GOLDEN / "llama3")
  golden = np.load(GOLDEN / "llama3" / "logits.npz")
  config = dataclasses.replace(config, **change)
  logits = run(config, params, golden["tokens"], golden["valid"])
  error = np.abs(logits - golden["logits"])[golden["valid"]].max()
  assert error > 1e-2


def test_parameter_tree_is_the_documented_one():
  config = small_config(vocab_size=48, d_model=16, d_ff=24, tied_head=False)
  tokens = jnp.zeros((1, 1), jnp.int32)
  init = jax.jit(Decoder(config).init)
  params = init(jax.random.key(0), tokens)["params"]
  assert jax.tree.map(jnp.shape, params) == {
      "embed": {"embedding": (48, 16)},
      "layers": {
          "attn_norm": {"scale": (2, 16)},
          "mlp_norm": {"scale": (2, 16)},
          "q_norm": {"scale": (2, 8)},
          "k_norm": {"scale": (2, 8)},
          "q_proj": {"kernel": (2, 16, 32), "bias": (2, 32)},
          "k_proj": {"kernel": (2, 16, 16), "bias": (2, 16)},
          "v_proj": {"kernel": (2, 16, 16), "bias": (2, 16)},
          "o_proj": {"kernel": (2, 32, 16)},
          "gate_proj": {"kernel": (2, 16, 24)},
          "up_proj": {"kernel": (2, 16, 24)},
          "down_proj": {"kernel": (2, 24, 16)},
      },
      "norm": {"scale": (16,)},
      "lm_head": {"kernel": (16, 48)},
  }


def test_a_token_sees_itself_and_the_past_only():
  config = small_config()
  params = random_params(config)
  tokens = random_tokens((1, 8))
  changed = tokens.at[0, 5].add(1)
  before = run(config, params, tokens)
  after = run(config, params, changed)
  moved = np.abs(before - after).max(axis=(0, 2)) > 1e-3
  np.testing.assert_array_equal(moved, np.arange(8) >= 5)


def test_left_padding_changes_nothing():
  config = small_config()
  params = random_params(config)
  tokens = random_tokens((2, 6))
  alone = run(config, params, tokens)
  padded = jnp.pad(tokens, ((0, 0), (4, 0)), constant_values=13)
  valid = jnp.broadcast_to(jnp.arange(10) >= 4, (2, 10))
  together = run(config, params, padded, valid)
  assert np.isfinite(together).all()
  np.testing.assert_allclose(together[:, 4:], alone, atol=1e-5)
  # Unmasked, the same padding is seen.
  unmasked = run(config, params, padded)
  assert np.abs(unmasked[:, 4:] - alone).max() > 1e-2


@pytest.mark.parametrize("first", [1, 5])
def test_cached_decoding_equals_the_whole_forward(first):
  """Decodes a prompt of `first` tokens at once, and the rest one by one."""
  config = small_config()
  params = random_params(config)
  tokens = random_tokens((2, 9))
  valid = jnp.arange(9)[None] >= jnp.array([[0], [3]])
  whole = run(config, params, tokens, valid, method="hidden")

  slots = 12
  in_cache = jnp.pad(valid, ((0, 0), (0, slots - 9)), constant_values=True)
  positions = jnp.maximum(jnp.cumsum(in_cache, axis=1) - 1, 0)
  cache = init_cache(config, 2, slots)

  @jax.jit
  def step(params, tokens, positions, cache, index):
    args = tokens, in_cache, positions, cache, index
    return Decoder(config).apply({"params": params}, *args, method="decode")

  parts, start = [], 0
  for size in (first, *[1] * (9 - first)):
    stop = start + size
    new = slice(start, stop)
    out, cache = step(params, tokens[:, new], positions[:, new], cache, start)
    parts.append(out)
    start = stop
  out = jnp.concatenate(parts, axis=1)
  np.testing.assert_allclose(out[valid], whole[valid], atol=1e-5)
  written = np.abs(cache.v).max(axis=(0, 1, 2, 4)) > 0
  np.testing.assert_array_equal(written, np.arange(slots) < 9)


def mean_square(config, tokens):
  """Returns a loss that depends on the parameters only."""

  def loss(params):
    logits = Decoder(config).apply({"params": params}, tokens)
    return (logits**2).mean()

  return loss


def test_remat_changes_no_value_and_no_gradient():
  params, tokens = random_params(small_config()), random_tokens((2, 6))
  plain = mean_square(small_config(), tokens)
  remat = mean_square(small_config(remat=True), tokens)
  value, grads = jax.jit(jax.value_and_grad(plain))(params)
  value_r, grads_r = jax.jit(jax.value_and_grad(remat))(params)
  np.testing.assert_allclose(value, value_r, rtol=1e-6)
  chex.assert_trees_all_close(grads, grads_r, rtol=1e-4, atol=1e-5)
  has_remat = lambda loss: "remat" in str(jax.make_jaxpr(loss)(params))
  assert has_remat(remat)
  assert not has_remat(plain)


@pytest.mark.parametrize("remat", [False, True])
def test_forward_mode_agrees_with_reverse_mode(remat):
  config = small_config(remat=remat)
  params, tangent = random_params(config), random_params(config, seed=7)
  loss = mean_square(config, random_tokens((1, 5)))

  @jax.jit
  def both(params, tangent):
    _, forward = jax.jvp(loss, (params,), (tangent,))
    reverse = jax.tree.map(jnp.vdot, jax.grad(loss)(params), tangent)
    return forward, sum(jax.tree.leaves(reverse))

  np.testing.assert_allclose(*both(params, tangent), rtol=1e-4)


def test_key_value_heads_are_never_repeated():
  """No array of the program has as many key heads as query heads."""
  config = small_config(n_heads=8, n_kv_heads=2)
  params = random_params(config)
  # 13 keys and 3 queries: such sizes occur nowhere else.
  cache = init_cache(config, 1, 13)

  def decode(cache):
    args = random_tokens((1, 3)), jnp.ones((1, 13), bool), jnp.arange(3)[None]
    args = (*args, cache, 0)
    return Decoder(config).apply({"params": params}, *args, method="decode")

  text = str(jax.make_jaxpr(decode)(cache))
  assert "1,13,2,8]" in text
  for repeated in ("1,13,8,8]", "1,13,2,4,8]", "1,8,13,8]"):
    assert repeated not in text


def test_bfloat16_compute_keeps_logits_and_parameters_float32():
  config = small_config(dtype="bfloat16")
  params = random_params(config)
  tokens = random_tokens((2, 6))
  low = run(config, params, tokens)
  high = run(small_config(), params, tokens)
  assert low.dtype == jnp.float32
  # Not merely bfloat16 numbers in a wider type.
  assert (low != low.astype(jnp.bfloat16).astype(jnp.float32)).any()
  np.testing.assert_allclose(low, high, atol=0.1 * float(high.std()))
  hidden = run(config, params, tokens, method="hidden")
  assert hidden.dtype == jnp.bfloat16
  assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_head_takes_any_leading_shape():
  config = small_config(tied_head=False)
  params = random_params(config)
  hidden = jax.random.normal(jax.random.key(2), (2, 3, 32))
  head = lambda x: run(config, params, x, method="head")
  np.testing.assert_allclose(
      head(hidden).reshape(6, 14), head(hidden.reshape(6, 32)), atol=1e-6
  )
  np.testing.assert_allclose(
      head(hidden), hidden @ params["lm_head"]["kernel"], atol=1e-5
  )


def test_an_id_outside_the_vocabulary_is_not_read_as_another():
  config = small_config()
  params = random_params(config)
  logits = run(config, params, jnp.array([[1, config.vocab_size]]))
  assert np.isnan(logits[0, 1]).all()


def test_a_sequence_beyond_max_length_is_refused():
  config = small_config()
  params = random_params(config)
  match = "65 tokens is longer than max_length=64"
  with pytest.raises(ValueError, match=match):
    run(config, params, jnp.zeros((1, 65), jnp.int32))
  with pytest.raises(ValueError, match=match):
    init_cache(config, 1, 65)


def padded_batch():
  """Tokens `[3, 7]` and their validity, with padding before and after."""
  place = np.arange(7)[None]
  start, stop = np.array([[[0], [2], [1]], [[7], [5], [7]]])
  valid = (place >= start) & (place < stop)
  return random_tokens((3, 7), seed=2), jnp.asarray(valid)


@functools.partial(jax.jit, static_argnums=0)
def loss_gradients_and_tangent(config, params, tokens, valid):
  """Loss, sketches and gradients, and the derivative along a direction."""

  def loss(params):
    logits = Decoder(config).apply({"params": params}, tokens, valid)
    return jnp.sum(jnp.where(valid[..., None], jnp.sin(logits), 0.0))

  tx = logra_jax.sketch(3, others=optax.adam(0.1))
  value, grads = logra_jax.value_and_grad(loss)(params, tx.init(params))
  direction = jax.tree.map(jnp.cos, params)
  return value, grads, jax.jvp(loss, (params,), (direction,))[1]


@functools.cache
def without_blocks():
  config = small_config(tied_head=False)
  params = moderate_params(config)
  return loss_gradients_and_tangent(config, params, *padded_batch())


def moderate_params(config):
  """Initial parameters with some noise, so that no bias is 0."""
  init = jax.jit(Decoder(config).init)
  params = init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]
  noise = random_params(config, seed=1)
  return jax.tree.map(lambda x, y: 0.5 * (x + y), params, noise)


@pytest.mark.parametrize(
    "blocks",
    [
        # 3 and 4 do not divide 7 tokens, nor 3 queries a block of 4.
        pytest.param({"token_block": 3}, marks=pytest.mark.slow),
        {"token_block": 4, "attention_block": 3, "remat": True},
    ],
)
def test_blocks_change_no_value_sketch_or_tangent(blocks):
  config = small_config(tied_head=False, **blocks)
  params = moderate_params(config)
  got = loss_gradients_and_tangent(config, params, *padded_batch())
  expected = without_blocks()
  assert all(np.abs(x).max() > 1e-3 for x in jax.tree.leaves(expected))
  chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)


def test_decoding_with_a_cache_ignores_blocks():
  config = small_config()
  params = random_params(config)
  tokens, valid = random_tokens((3, 7)), jnp.ones((3, 7), bool)
  blocks = dataclasses.replace(config, token_block=3, attention_block=2)
  cache = init_cache(blocks, 3, 7)
  positions = jnp.arange(7)[None].repeat(3, 0)
  args = tokens, valid, positions, cache, 0
  hidden, _ = run(blocks, params, *args, method="decode")
  expected = run(config, params, tokens, valid, method="hidden")
  np.testing.assert_allclose(hidden, expected, rtol=1e-4, atol=1e-5)
