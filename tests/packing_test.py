"""Tests of packed rows against one row for each response."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments import decoder, packing, tiny
from experiments.rollout import Rollout

N_PROMPT, N_NEW, GROUP = 6, 4, 3


def _rollout(seed=0):
  """Two prompts of different lengths, three responses each."""
  rng = np.random.default_rng(seed)
  prompts = np.repeat(rng.integers(3, 14, (2, N_PROMPT)), GROUP, axis=0)
  new = rng.integers(3, 14, (2 * GROUP, N_NEW))
  lengths = np.array([4, 1, 2, 3, 4, 2])
  mask = np.arange(N_NEW) < lengths[:, None]
  prompt_valid = np.arange(N_PROMPT) >= np.repeat([0, 3], GROUP)[:, None]
  tokens = np.concatenate([prompts, new], axis=1)
  nothing = np.zeros((2 * GROUP, N_PROMPT), bool)
  completion_mask = np.concatenate([nothing, mask], axis=1)
  return Rollout(
      tokens=jnp.asarray(tokens, jnp.int32),
      valid=jnp.asarray(np.concatenate([prompt_valid, mask], axis=1)),
      completion_mask=jnp.asarray(completion_mask),
      log_probs=jnp.zeros(tokens.shape),
      finished=jnp.ones(2 * GROUP, bool),
  )


def _model():
  loaded = tiny.make_tiny(0)
  return decoder.Decoder(loaded.config), loaded.params


def _features(model, params, rollout, k):
  run = lambda params, rollout: packing.features(
      model, params, packing.pack(rollout, N_NEW, k)
  )
  return np.asarray(jax.jit(run)(params, rollout))


def test_packed_features_are_those_of_separate_rows():
  model, params = _model()
  rollout = _rollout()
  hidden = jax.jit(
      lambda params, rollout: model.apply(
          {"params": params}, rollout.tokens, rollout.valid, method="hidden"
      )
  )
  separate = hidden(params, rollout)[:, N_PROMPT - 1 : -1]
  keep = np.asarray(rollout.completion_mask)[:, N_PROMPT:]
  for k in (1, GROUP):
    packed = packing.pack(rollout, N_NEW, k)
    assert packed.tokens.shape == (2 * GROUP // k, N_PROMPT + k * N_NEW)
    found = _features(model, params, rollout, k)
    np.testing.assert_allclose(
        found[keep], np.asarray(separate)[keep], atol=1e-5
    )


def test_responses_of_a_row_do_not_see_each_other():
  model, params = _model()
  rollout = _rollout()
  changed = rollout.replace(
      tokens=rollout.tokens.at[1, N_PROMPT:].set(5).at[3, N_PROMPT:].set(5)
  )
  features = [_features(model, params, r, GROUP) for r in (rollout, changed)]
  same = np.array([True, False, True, False, True, True])
  np.testing.assert_array_equal(features[0][same], features[1][same])
  # The test could tell: a changed response does change its own features.
  assert np.abs(features[0][3] - features[1][3]).max() > 1e-3


def test_gradients_are_those_of_separate_rows():
  model, params = _model()
  rollout = _rollout()
  weights = jax.random.normal(
      jax.random.key(1), (2 * GROUP, N_NEW, model.config.d_model)
  )
  weights *= rollout.completion_mask[:, N_PROMPT:, None]

  def loss(params, k):
    packed = packing.pack(rollout, N_NEW, k)
    return jnp.sum(weights * packing.features(model, params, packed))

  grad = jax.jit(jax.grad(loss), static_argnums=1)
  one, all_of_a_group = (grad(params, k) for k in (1, GROUP))
  scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(one))
  for x, y in zip(
      jax.tree.leaves(one), jax.tree.leaves(all_of_a_group), strict=True
  ):
    np.testing.assert_allclose(x, y, atol=1e-5 * scale)
