"""Tests of the batches that a step learns from."""

import jax
import numpy as np
import pytest

from experiments.learning import batches, losses
from experiments.learning.batches import BatchSettings
from experiments.rollouts.rollout import Rollout
from tests.helpers.configs import tiny_config

PROMPT, NEW, GROUP = 16, 2, 16


def make_rollout(lengths, prompt_length):
  """Responses of these lengths, 16 to each of 8 prompts of one length."""
  rng = np.random.default_rng(0)
  shape = (8 * GROUP, PROMPT + NEW)
  place = np.arange(shape[1])[None]
  ends = PROMPT + np.asarray(lengths)[:, None]
  mask = (place >= PROMPT) & (place < ends)
  return Rollout(
      tokens=rng.integers(14, size=shape).astype(np.int32),
      valid=(place >= PROMPT - prompt_length) & (place < ends),
      completion_mask=mask,
      log_probs=np.where(mask, rng.normal(size=shape), 0).astype(np.float32),
      finished=np.ones(8 * GROUP, bool),
  )


def test_of_several_row_lengths_the_one_that_computes_least_is_taken():
  config = tiny_config(
      **{"loss.row_tokens": (20, 26, 44), "loss.micro_rows": 1}
  )
  rng = np.random.default_rng(0)
  # Groups of 26, 20 and 22 tokens; two of the last ones share a row of 44.
  for lengths, prompt, wanted in ((1, 10, 26), (1, 4, 20), (1, 6, 44)):
    batch, packed = batches.make_batch(
        BatchSettings.of_config(config),
        make_rollout([lengths] * 128, prompt),
        rng.normal(size=128),
    )
    assert batch.rows.tokens.shape[-1] == wanted
    assert packed.padding == 0


@pytest.mark.parametrize("name", sorted(losses.LOSSES))
def test_tokens_have_what_their_response_has(name):
  config = tiny_config(**{"loss.name": name})
  rng = np.random.default_rng(1)
  lengths = rng.integers(1, NEW + 1, 8 * GROUP)
  rollout = make_rollout(lengths, 9)
  advantages = rng.normal(size=128).astype(np.float32)
  keep = rng.random(128) < 0.8
  batch, packed = batches.make_batch(
      BatchSettings.of_config(config), rollout, advantages, keep=keep
  )
  weights = losses.LOSSES[name].weights(lengths, NEW, keep)
  mask = batch.tokens.mask
  of = packed.index[mask] // (PROMPT + NEW)
  np.testing.assert_array_equal(batch.tokens.weights[mask], weights[of])
  np.testing.assert_array_equal(batch.tokens.advantages[mask], advantages[of])
  np.testing.assert_array_equal(
      batch.tokens.old_log_probs[mask],
      rollout.log_probs.reshape(-1)[packed.index[mask]],
  )
  counts = np.bincount(of, minlength=128)
  np.testing.assert_array_equal(counts, np.where(keep, lengths, 0))


def test_probe_rows_are_of_different_prompts():
  config = tiny_config(**{"kl.probe_responses": 10})
  # 8 prompts with 16 responses each.
  rows = batches.probe_rows(BatchSettings.of_config(config))
  assert list(rows) == [0, 16, 32, 48, 64, 80, 96, 112, 1, 17]


def test_a_probe_without_generated_tokens_is_an_error():
  empty = make_rollout([0] * 128, 9)
  settings = BatchSettings.of_config(tiny_config())
  with pytest.raises(ValueError, match=r"no generated token.*probe_responses"):
    batches.make_batch(settings, empty, np.zeros(128))


def test_the_abstract_batch_is_one_in_the_longest_rows():
  config = tiny_config(**{"loss.row_tokens": (24, 40)})
  full = make_rollout([NEW] * 128, PROMPT)
  shapes = batches.abstract_batch(BatchSettings.of_config(config))
  one = tiny_config(**{"loss.row_tokens": (40,)})
  batch, packed = batches.make_batch(
      BatchSettings.of_config(one), full, np.zeros(128)
  )
  assert packed.count == len(shapes.rows.tokens)
  like = lambda x: (x.shape, x.dtype)
  batch = jax.tree.map(like, batch.replace(count=None))
  assert batch == jax.tree.map(like, shapes)
