"""The decoder against transformers' logits, and against itself."""

import dataclasses

import chex
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models import load, stacking
from experiments.models.config import DecoderConfig
from experiments.models.decoder import Decoder
from experiments.models.kv_cache import init_cache
from tests.helpers.paths import GOLDEN

FAMILIES = ("llama", "llama3", "qwen2", "qwen3")


def small_config(**changes):
  """Two layers with every optional part."""
  config = DecoderConfig(
      vocab_size=64,
      d_model=16,
      n_layers=2,
      n_heads=4,
      n_kv_heads=2,
      head_dim=8,
      d_ff=24,
      qkv_bias=True,
      qk_norm=True,
      tied_head=True,
      max_length=32,
  )
  return dataclasses.replace(config, **changes)


def random_params(config, seed=0):
  """Parameters large enough for logits to depend on every one of them."""
  rng = np.random.default_rng(seed)
  flat = {
      path: jnp.float32(0.3 * rng.standard_normal(shape) + ("norm" in path[-2]))
      for path, shape in stacking.param_shapes(config).items()
  }
  return traverse_util.unflatten_dict(flat)


def run(config, params, *args, method=None):
  """Applies the decoder; compiled whole, which is faster than op by op."""

  @jax.jit
  def apply(params, *args):
    return Decoder(config).apply({"params": params}, *args, method=method)

  return apply(params, *args)


def random_tokens(shape, seed=1):
  return jax.random.randint(jax.random.key(seed), shape, 0, 64)


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
  config = small_config(tied_head=False)
  tokens = jnp.zeros((1, 1), jnp.int32)
  init = jax.jit(Decoder(config).init)
  params = init(jax.random.key(0), tokens)["params"]
  assert jax.tree.map(jnp.shape, params) == {
      "embed": {"embedding": (64, 16)},
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
      "lm_head": {"kernel": (16, 64)},
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
  padded = jnp.pad(tokens, ((0, 0), (4, 0)), constant_values=63)
  valid = jnp.broadcast_to(jnp.arange(10) >= 4, (2, 10))
  together = run(config, params, padded, valid)
  assert np.isfinite(together).all()
  np.testing.assert_allclose(together[:, 4:], alone, atol=1e-5)
  # Unmasked, the same padding is seen.
  unmasked = run(config, params, padded)
  assert np.abs(unmasked[:, 4:] - alone).max() > 1e-2


@pytest.mark.parametrize("first", [1, 5])
def test_cached_decoding_equals_the_whole_forward(first):
  """A prompt of `first` tokens at once, the rest one by one."""
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
  """A loss as a function of the parameters alone."""

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
  """No array of the program has as many key heads as there are queries'."""
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
  hidden = jax.random.normal(jax.random.key(2), (2, 3, 16))
  head = lambda x: run(config, params, x, method="head")
  np.testing.assert_allclose(
      head(hidden).reshape(6, 64), head(hidden.reshape(6, 16)), atol=1e-6
  )
  np.testing.assert_allclose(
      head(hidden), hidden @ params["lm_head"]["kernel"], atol=1e-5
  )


def test_an_id_outside_the_vocabulary_is_not_read_as_another():
  config = small_config()
  params = random_params(config)
  logits = run(config, params, jnp.array([[1, 64]]))
  assert np.isnan(logits[0, 1]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_kv_heads": 3}, "n_kv_heads must divide n_heads=4, got 3"),
        ({"head_dim": 7}, "head_dim must be even, got 7"),
        ({"d_model": 0}, "d_model must be a positive int, got 0"),
        ({"vocab_size": 9.0}, r"vocab_size must be a positive int, got 9\.0"),
    ],
)
def test_a_bad_configuration_is_refused(change, message):
  with pytest.raises(ValueError, match=message):
    small_config(**change)


def test_a_sequence_beyond_max_length_is_refused():
  config = small_config()
  params = random_params(config)
  match = "33 tokens is longer than max_length=32"
  with pytest.raises(ValueError, match=match):
    run(config, params, jnp.zeros((1, 33), jnp.int32))
  with pytest.raises(ValueError, match=match):
    init_cache(config, 1, 33)
