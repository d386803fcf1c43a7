"""Tests of float and int8 caches, and of the memory they take."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models import decoder, kv_cache, tiny

CONFIG = dataclasses.replace(
    tiny.CONFIG, n_layers=3, max_length=24, dtype="bfloat16"
)


@pytest.mark.parametrize(
    ("dtype", "bytes_of_a_head"),
    [(None, 8 * 2), ("float32", 8 * 4), ("int8", 8 + 4)],
)
def test_the_bytes_stated_are_those_taken(dtype, bytes_of_a_head):
  stated = kv_cache.cache_bytes(CONFIG, 5, 7, dtype)
  assert stated == 2 * 3 * 5 * 7 * 2 * bytes_of_a_head
  cache = kv_cache.init_cache(CONFIG, 5, 7, dtype)
  assert stated == sum(x.nbytes for x in jax.tree.leaves(cache))


def test_int8_is_off_by_half_a_unit_at_most():
  x = np.random.default_rng(0).normal(size=(50, 4, 8)).astype(np.float32)
  x *= np.logspace(-6, 6, 50, dtype=np.float32)[:, None, None]
  x[0] = 0.0
  units, scale = kv_cache.quantise(x)
  assert units.dtype == jnp.int8 and scale.dtype == jnp.float32
  largest = np.abs(x).max(-1)
  np.testing.assert_allclose(scale, largest / 127, rtol=1e-6)
  error = np.abs(np.asarray(units, np.float32) * scale[..., None] - x).max(-1)
  assert np.all(error <= largest / 254 * 1.0001)
  # The bound is nearly reached: coarser rounding would fail.
  assert np.max(error[1:] / largest[1:]) > 0.8 / 254
  assert np.min(units) == -127 and np.max(units) == 127


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_what_is_written_is_read(dtype):
  rng = np.random.default_rng(0)
  k, v = rng.normal(size=(2, 5, 3, 2, 8)).astype(np.float32)
  cache = kv_cache.init_cache(CONFIG, 5, 7, dtype)
  cache = kv_cache.write(cache, 1, 2, k, v)
  read = kv_cache.read_tokens(cache, 1, 6, "float32")
  for got, new in zip(read, (k, v), strict=True):
    assert got.shape == (5, 6, 2, 8) and got.dtype == jnp.float32
    atol = 0 if dtype == "float32" else np.abs(new).max() / 250
    np.testing.assert_allclose(got[:, 2:5], new, atol=atol)
    assert not np.any(got[:, :2]) and not np.any(got[:, 5:])
  for other in (0, 2):
    assert not any(
        map(np.any, kv_cache.read_tokens(cache, other, 7, "float32"))
    )


def softmax(x):
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("length", [12, 40, 257, 300, 512, 513, 600])
def test_attention_to_what_is_seen_is_attention(length):
  """Tries one, two and eight window widths, then parts; two rows see little."""
  rng = np.random.default_rng(length)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  k, v, q = normal(3, length, 2, 8), normal(3, length, 2, 8), normal(3, 1, 4, 8)
  mask = rng.random((3, 1, length)) < 0.3
  mask[1, 0], mask[2, 0] = False, False
  mask[1, 0, length // 3] = mask[2, 0, -1] = True
  config = dataclasses.replace(CONFIG, dtype="float32", max_length=600)
  cache = kv_cache.init_cache(config, 3, length)
  cache = kv_cache.write(cache, 1, 0, k, v)
  run = jax.jit(
      lambda cache, mask: kv_cache.attend(
          cache, 1, q, mask, kv_cache.place(0, mask)
      )
  )
  k, v = (np.repeat(x.astype(np.float64), 2, axis=2) for x in (k, v))

  def expected(mask):
    scores = np.einsum("bhd,bmhd->bhm", q[:, 0], k) * 8**-0.5
    weights = softmax(np.where(mask, scores, -np.inf))
    return np.einsum("bhm,bmhd->bhd", weights, v).reshape(3, 1, 32)

  np.testing.assert_allclose(run(cache, mask), expected(mask), atol=1e-5)
  # All widths, from the beginning and up to the end.
  for part in (0.0, 0.1, 0.25, 0.5, 0.8):
    for seen in (slice(int(part * length), None), slice(length // 3)):
      some = np.zeros_like(mask)
      some[:, :, seen] = mask[:, :, seen]
      some[:, :, int(part * length)] = True
      np.testing.assert_allclose(run(cache, some), expected(some), atol=1e-5)
  # Slots far from all slots that are seen are not read.
  late = mask.copy()
  late[:, :, : length // 2 + 2] = False
  late[:, :, length * 3 // 4] = True
  assert kv_cache.place(0, late).first > length // 2
  rest = cache.replace(v=cache.v.at[:, :, :, : length // 4].set(np.nan))
  if length > 100:
    np.testing.assert_allclose(run(rest, late), expected(late), atol=1e-5)


def test_attention_to_an_int8_cache_is_close():
  config = dataclasses.replace(CONFIG, dtype="float32")
  model = decoder.Decoder(config)
  tokens = jax.random.randint(jax.random.key(0), (4, 12), 0, CONFIG.vocab_size)
  variables = jax.jit(model.init)(jax.random.key(1), tokens)
  variables["params"]["embed"]["embedding"] *= 15.0
  positions = jnp.broadcast_to(jnp.arange(12), tokens.shape)

  @functools.partial(jax.jit, static_argnums=0)
  def hidden(dtype):
    cache = kv_cache.init_cache(config, 4, 12, dtype)
    valid = jnp.ones(tokens.shape, bool)
    args = (tokens, valid, positions, cache, 0)
    return model.apply(variables, *args, method="decode")[0]

  exact, close = hidden("float32"), hidden("int8")
  off = np.linalg.norm(close - exact) / np.linalg.norm(exact)
  # A key or value is off by 1/254 of its largest feature, evenly spread.
  assert 1e-5 < off < 1e-2


@pytest.mark.parametrize("dtype", ["int32", "uint8", "bool"])
def test_a_dtype_that_cannot_hold_a_cache(dtype):
  with pytest.raises(ValueError, match=f"float or int8, got '{dtype}'"):
    kv_cache.init_cache(CONFIG, 1, 2, dtype)
  with pytest.raises(ValueError, match=f"float or int8, got '{dtype}'"):
    kv_cache.cache_bytes(CONFIG, 1, 2, dtype)


def test_a_cache_longer_than_the_model():
  with pytest.raises(ValueError, match="25 tokens is longer than"):
    kv_cache.init_cache(CONFIG, 1, 25)
