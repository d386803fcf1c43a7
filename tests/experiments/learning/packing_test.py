"""Tests of packed rows against separate rows for each response."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.learning import packing
from experiments.models import decoder, tiny
from experiments.rollouts.rollout import Rollout

N_PROMPT, N_NEW, GROUP = 6, 4, 3


def make_rollout(lengths, prompt_lengths, n_prompt=N_PROMPT, n_new=N_NEW):
  """Random responses of these lengths to prompts of these lengths."""
  rng = np.random.default_rng(0)
  batch, n = len(lengths), len(prompt_lengths)
  group = batch // n
  prompts = np.repeat(rng.integers(3, 14, (n, n_prompt)), group, axis=0)
  starts = n_prompt - np.repeat(prompt_lengths, group)
  place = np.arange(n_prompt + n_new)[None]
  ends = n_prompt + np.asarray(lengths)[:, None]
  new = rng.integers(3, 14, (batch, n_new))
  mask = (place >= n_prompt) & (place < ends)
  return Rollout(
      tokens=np.concatenate([prompts, new], axis=1).astype(np.int32),
      valid=(place >= starts[:, None]) & (place < ends),
      completion_mask=mask,
      log_probs=np.where(mask, rng.normal(size=mask.shape), 0).astype("f4"),
      finished=np.ones(batch, bool),
  )


@pytest.fixture(scope="module")
def rollout():
  """Three prompts of different lengths, three responses each."""
  return make_rollout([4, 1, 2, 3, 4, 0, 1, 1, 1], [6, 3, 2])


@pytest.fixture(scope="module")
def model():
  loaded = tiny.make_tiny(0)
  return decoder.Decoder(loaded.config), loaded.params


def pack(
    rollout, row_tokens, micro_rows=2, keep=None, group=GROUP, n_new=N_NEW
):
  keep = np.ones(len(rollout.tokens), bool) if keep is None else keep
  return packing.pack(
      rollout,
      keep,
      group_size=group,
      n_new=n_new,
      row_tokens=row_tokens,
      micro_rows=micro_rows,
  )


def by_token(packed, values, shape):
  """Puts `[M, G, K, ...]` values where their tokens are in the rollout."""
  out = np.zeros((*shape, *values.shape[3:]))
  mask = packed.rows.target_mask
  out.reshape(-1, *values.shape[3:])[packed.index[mask]] = values[mask]
  return out


def all_features(model, packed):
  decoder_, params = model
  run = jax.jit(lambda rows: packing.features(decoder_, params, rows))
  rows = [
      jax.tree.map(lambda x, i=i: x[i], packed.rows)
      for i in range(packed.count)
  ]
  found = np.zeros((*packed.index.shape, decoder_.config.d_model))
  found[: packed.count] = np.stack([run(x) for x in rows])
  return found


@pytest.mark.parametrize("row_tokens", [10, 30])
def test_features_are_those_of_separate_rows(model, rollout, row_tokens):
  decoder_, params = model
  hidden = jax.jit(
      lambda rollout: decoder_.apply(
          {"params": params}, rollout.tokens, rollout.valid, method="hidden"
      )
  )
  # A token is predicted by the features of the one before it.
  separate = np.roll(np.asarray(hidden(rollout)), 1, axis=1)
  packed = pack(rollout, row_tokens)
  found = by_token(packed, all_features(model, packed), rollout.tokens.shape)
  mask = rollout.completion_mask
  assert packed.rows.target_mask.sum() == mask.sum() == 17
  np.testing.assert_allclose(found[mask], separate[mask], atol=1e-5)


def test_values_go_where_their_tokens_go(rollout):
  packed = pack(rollout, 14)
  shape = rollout.tokens.shape
  mask = rollout.completion_mask
  for values in (rollout.log_probs, rollout.tokens):
    found = by_token(packed, packed.gather(values), shape)
    np.testing.assert_array_equal(found, np.where(mask, values, 0))
  of_response = np.arange(1.0, 10)
  found = by_token(packed, packed.gather(of_response), shape)
  np.testing.assert_array_equal(found, mask * of_response[:, None])
  targets = by_token(packed, packed.rows.targets, shape)
  np.testing.assert_array_equal(targets, np.where(mask, rollout.tokens, 0))


def test_responses_of_a_row_do_not_see_each_other(model, rollout):
  changed = rollout.replace(tokens=rollout.tokens.copy())
  for response in (1, 3):
    changed.tokens[response, N_PROMPT:] = 5
  found = []
  for one in (rollout, changed):
    packed = pack(one, 30)
    features = all_features(model, packed)
    found.append(by_token(packed, features, one.tokens.shape))
  same = np.delete(np.arange(9), [1, 3])
  np.testing.assert_array_equal(found[0][same], found[1][same])
  # As a control, a changed response does change its own features.
  assert np.abs(found[0][3] - found[1][3]).max() > 1e-3


def test_gradients_are_those_of_separate_rows(model, rollout):
  decoder_, params = model
  d_model = decoder_.config.d_model
  weights = np.random.default_rng(1).normal(
      size=(*rollout.tokens.shape, d_model)
  )

  def gradient(packed):
    def loss(params):
      total = 0.0
      for i in range(packed.count):
        rows = jax.tree.map(lambda x, i=i: x[i], packed.rows)
        found = packing.features(decoder_, params, rows)
        own = weights.reshape(-1, d_model)[packed.index[i]]
        keep = rows.target_mask[..., None]
        total += jnp.sum(jnp.where(keep, own * found, 0.0))
      return total

    return jax.jit(jax.grad(loss))(params)

  one = gradient(pack(rollout, 10, micro_rows=9, keep=None))
  packed = pack(rollout, 30, micro_rows=2)
  assert packed.count == 1 and len(packed.rows.tokens) == 2
  scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(one))
  jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5 * scale),
      one,
      gradient(packed),
  )


def test_the_layout_of_an_example():
  """Two short groups share a row; a long group takes two."""
  rollout = make_rollout([1, 1, 1, 1, 4, 4], [2, 2, 6])
  packed = pack(rollout, 12, micro_rows=2, group=2)
  # Two rows of 6 + 4 tokens, and one of twice 2 + 1 + 1.
  assert packed.count == 2
  rows = packed.rows.prompt.reshape(-1, 12)
  assert [len(set(row) - {-1}) for row in rows[:3]] == [1, 1, 2]
  assert (rows[3:] == -1).all()
  assert packed.padding == pytest.approx(1 - 28 / (4 * 12))
  np.testing.assert_array_equal(
      packed.rows.response.reshape(-1, 12)[2],
      [-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, -1, -1],
  )
  np.testing.assert_array_equal(
      packed.rows.positions.reshape(-1, 12)[2][:8], [0, 1, 2, 2, 0, 1, 2, 2]
  )


def test_shapes_do_not_depend_on_lengths():
  rng = np.random.default_rng(0)
  most = packing.max_micro_batches(8, 4, N_PROMPT, N_NEW, 18, 2)
  for _ in range(200):
    lengths = rng.integers(0, N_NEW + 1, 32)
    prompts = rng.integers(1, N_PROMPT + 1, 8)
    packed = pack(make_rollout(lengths, prompts), 18, group=4)
    assert len(packed.rows.tokens) == most >= packed.count
    assert packed.rows.target_mask.sum() == lengths.sum()
    # Micro-batches that are not computed hold no tokens.
    assert not packed.rows.target_mask[packed.count :].any()


def test_many_responses_are_packed_with_little_padding():
  rng = np.random.default_rng(0)
  lengths = np.minimum(rng.geometric(1 / 60, 64 * 8), 512)
  rollout = make_rollout(lengths, rng.integers(20, 100, 64), 128, 512)
  packed = pack(rollout, 1024, micro_rows=4, group=8, n_new=512)
  assert packed.padding < 0.05
  unpacked = 1 - lengths.sum() / (512 * 512)
  assert unpacked > 0.8


@pytest.mark.parametrize("length", [6, 15])
def test_a_small_batch_is_packed_with_little_padding(length):
  """Groups of 108 or 180 tokens in rows of 192."""
  rollout = make_rollout([length] * 64, [60] * 8, 72, 24)
  packed = pack(rollout, 192, micro_rows=1, group=8, n_new=24)
  assert packed.padding < 0.15
  assert packed.count <= 8 and packed.rows.target_mask.sum() == 64 * length


def test_responses_that_are_not_kept_are_not_computed(rollout):
  keep = np.arange(9) != 4
  packed = pack(rollout, 14, keep=keep)
  wanted = rollout.completion_mask & keep[:, None]
  found = by_token(packed, packed.gather(np.ones(9)), rollout.tokens.shape)
  np.testing.assert_array_equal(found, wanted)


def test_nothing_to_compute_is_one_empty_micro_batch(rollout):
  packed = pack(rollout, 14, keep=np.zeros(9, bool))
  assert packed.count == 1 and packed.padding == 1
  assert not packed.rows.target_mask.any()


def test_a_row_that_is_too_short_is_an_error(rollout):
  with pytest.raises(ValueError, match="row_tokens=9 must be at least 10"):
    pack(rollout, 9)
