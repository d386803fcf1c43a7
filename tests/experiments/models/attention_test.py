"""Compares rotary positions, masks and attention with written-out formulas."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models import attention, tiny
from experiments.models.config import RopeScaling


def draw(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def dense_attention(q, k, v, mask):
  """One query head at a time, in float64."""
  out = np.zeros(q.shape)
  group = q.shape[2] // k.shape[2]
  for head in range(q.shape[2]):
    keys, values = k[:, :, head // group], v[:, :, head // group]
    scores = np.einsum("bsh,bmh->bsm", q[:, :, head].astype(np.float64), keys)
    scores = np.where(mask, scores * q.shape[-1] ** -0.5, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out[:, :, head] = np.einsum("bsm,bmh->bsh", weights, values)
  return out.reshape(*q.shape[:2], -1)


@pytest.mark.parametrize("block", [None, 1, 3, 7, 20])
def test_attention_is_that_of_the_formula_in_blocks_of_any_size(block):
  q, k, v = draw(0, 2, 7, 6, 4), draw(1, 2, 9, 3, 4), draw(2, 2, 9, 3, 4)
  mask = np.random.default_rng(3).random((2, 7, 9)) < 0.5
  mask[:, :, 0] = True
  run = jax.jit(attention.attend, static_argnums=4)
  expected = dense_attention(q, k, v, mask)
  np.testing.assert_allclose(run(q, k, v, mask, block), expected, atol=1e-5)
  # The mask matters.
  unmasked = run(q, k, v, np.ones_like(mask), block)
  assert np.abs(unmasked - expected).max() > 0.1


def test_a_query_that_sees_nothing_gives_finite_numbers():
  q, k, v = draw(0, 1, 2, 2, 4), draw(1, 1, 3, 2, 4), draw(2, 1, 3, 2, 4)
  out = attention.attend(q, k, v, np.zeros((1, 2, 3), bool))
  mean = v.mean(1).reshape(1, 1, 8)
  np.testing.assert_allclose(out, np.repeat(mean, 2, axis=1), atol=1e-6)


@pytest.mark.parametrize("block", [1, 3, 7, 9])
def test_blocks_joined_are_the_whole_and_zeros(block):
  x = draw(0, 2, 7, 3)
  blocks = attention.split_blocks(x, block)
  assert blocks.shape == (-(-7 // block), 2, block, 3)
  joined = attention.join_blocks(blocks)
  np.testing.assert_array_equal(joined[:, :7], x)
  assert not joined[:, 7:].any()


def test_rotated_products_depend_on_the_distance_alone():
  q, k = draw(0, 1, 1, 1, 8), draw(1, 1, 1, 1, 8)

  def product(i, j):
    rotated = [
        attention.rotate(
            x, *attention.rope_tables(tiny.CONFIG, jnp.array([[n]]))
        )
        for x, n in ((q, i), (k, j))
    ]
    return float((rotated[0] * rotated[1]).sum())

  np.testing.assert_allclose(product(0, 0), (q * k).sum(), rtol=1e-5)
  np.testing.assert_allclose(product(9, 4), product(25, 20), rtol=1e-4)
  assert abs(product(9, 4) - product(9, 5)) > 1e-2


def test_scaling_keeps_short_wavelengths_and_stretches_long_ones():
  scaling = RopeScaling(8.0, 1.0, 4.0, 32)
  config = dataclasses.replace(tiny.CONFIG, rope_theta=1000.0)
  plain = attention.rope_frequencies(config)
  scaled = attention.rope_frequencies(
      dataclasses.replace(config, rope_scaling=scaling)
  )
  turns = 32 * plain / (2 * np.pi)
  # 5.1, 0.91, 0.16 and 0.03 turns: one is kept, three are stretched.
  np.testing.assert_array_equal(turns >= 4, [True, False, False, False])
  np.testing.assert_allclose(scaled[0], plain[0], rtol=1e-6)
  np.testing.assert_allclose(scaled[1:], plain[1:] / 8, rtol=1e-6)
  # Halfway between 1 and 4 turns, the mean of both.
  halfway = dataclasses.replace(
      config,
      rope_scaling=dataclasses.replace(
          scaling, low_freq_factor=0.0, high_freq_factor=2 * float(turns[1])
      ),
  )
  np.testing.assert_allclose(
      attention.rope_frequencies(halfway)[1],
      plain[1] * (1 + 1 / 8) / 2,
      rtol=1e-6,
  )


def test_positions_count_valid_tokens_and_padding_is_not_seen():
  valid = jnp.array([[False, True, True, True]])
  positions, mask = attention.causal_mask(4, valid)
  np.testing.assert_array_equal(positions, [[0, 0, 1, 2]])
  np.testing.assert_array_equal(
      mask[0].astype(int),
      [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0], [0, 1, 1, 1]],
  )


@pytest.mark.parametrize("index", [0, 2])
def test_new_tokens_see_their_own_and_earlier_valid_slots(index):
  valid = jnp.array([[True, False, True, True, True, True]])
  mask = attention.decode_mask(2, valid, index)
  _, whole = attention.causal_mask(6, valid)
  np.testing.assert_array_equal(mask, whole[:, index : index + 2])
