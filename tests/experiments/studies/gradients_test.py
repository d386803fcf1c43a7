"""Tests of gradients and KL at points of a run, on the tiny model."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.configs import tiny
from experiments.learning import packing, train_step
from experiments.learning.train_step import UpdateSettings
from experiments.runs import loop
from experiments.studies import gradients
import logra_jax


@pytest.fixture(scope="module")
def source(tmp_path_factory):
  folder = tmp_path_factory.mktemp("gradients")
  return gradients.GradientSource(tiny.get_config(), folder, (0,), 4)


@pytest.mark.slow
def test_a_point_is_where_the_training_program_would_be(tmp_path):
  config = tiny.get_config().unlock()
  config.updates = 2
  state = loop.train(config.lock(), tmp_path / "run").state
  source = gradients.GradientSource(config, tmp_path / "points", (0, 2), 4)
  before, after = (gradients.targets_of(source.params(i)) for i in (0, 2))
  assert len(after) == 7
  for path, want in gradients.targets_of(state.params).items():
    np.testing.assert_allclose(after[path], want, atol=1e-6)
    assert np.abs(after[path] - before[path]).max() > 1e-5


def test_gradient_is_the_one_that_the_learner_sketches(source):
  params = source.params(0)
  batch = source.batch(params, 0, 1)
  assert batch.advantages.shape == (4 * source.config.rollout.responses,)
  g = source.gradient(params, 0, 1)
  # The learner's own update, which keeps its sketches as the optimizer's state.
  config = tiny.get_config().unlock()
  config.kl.enabled = False
  keep = optax.GradientTransformation(
      lambda x: jax.tree.map(jnp.zeros_like, x), lambda g, s, p=None: (g, g)
  )
  tx = logra_jax.sketch(4, inner=keep, seed=7, refresh=False)
  step = jax.jit(
      train_step.make_train_step(
          source.model, tx, UpdateSettings.of_config(config)
      )
  )
  state, _ = step(
      train_step.init_state(params, tx), source.learner_batch(batch)
  )
  a = gradients.draw_bases(g, 4, "rademacher", 7)
  assert set(state.opt_state.inner) == set(g)
  for path, s in state.opt_state.inner.items():
    np.testing.assert_allclose(a[path] @ g[path], s, atol=2e-5)
    assert np.abs(s).max() > 1e-3


def test_kl_is_that_of_the_librarys_probe(source):
  params = source.params(0)
  config, model = source.config, source.model
  g = source.gradient(params, 0, 1)
  rollout = gradients.first_responses(
      source.batch(params, 0, 0), config.rollout.responses, 3, 4
  )
  predicted = gradients.kl_fn(model, config)(params, rollout, 4, g)
  rows = packing.all_rows(rollout, 1, config.rollout.max_new_tokens)

  @jax.jit
  def probed(params, updates):
    probe = logra_jax.kl_probe(
        lambda p, b: packing.features(model, p, b["rows"]),
        params,
        (),
        {"rows": rows, "completion_mask": rows.target_mask},
        head_fn=lambda p, h: model.apply({"params": p}, h, method="head"),
        temperature=config.rollout.temperature,
    )
    return probe(updates)

  nothing = jax.tree.map(jnp.zeros_like, params)
  want = probed(params, gradients.with_targets(nothing, g))
  np.testing.assert_allclose(predicted, want, rtol=1e-4)


def test_own_gain_of_the_gradient_is_the_slope_of_the_loss(source):
  """`⟨G, G⟩` is the slope along G of an independent implementation."""
  params = source.params(0)
  g = source.gradient(params, 0, 0)
  batch = source.batch(params, 0, 0)
  rollout, model = batch.rollout, source.model
  n_new = source.config.rollout.max_new_tokens

  @jax.jit
  def logits(params):
    # A token is predicted by the features of the position before it.
    hidden = model.apply(
        {"params": params}, rollout.tokens, rollout.valid, method="hidden"
    )[:, -n_new - 1 : -1]
    return model.apply({"params": params}, hidden, method="head")

  def loss(size):
    moved = {
        p: x + size * g[p] for p, x in gradients.targets_of(params).items()
    }
    z = np.asarray(logits(gradients.with_targets(params, moved)), np.float64)
    z /= source.config.rollout.temperature
    log_p = z - np.log(np.exp(z).sum(-1, keepdims=True))
    tokens = rollout.tokens[:, -n_new:, None]
    ratio = np.exp(
        np.take_along_axis(log_p, tokens, -1)[..., 0]
        - rollout.log_probs[:, -n_new:]
    )
    mask = rollout.completion_mask[:, -n_new:]
    gain = ratio * np.asarray(batch.advantages)[:, None]
    return -(gain * mask).sum() / mask.sum()

  size = 1e-2
  slope = (loss(size) - loss(-size)) / (2 * size)
  np.testing.assert_allclose(slope, gradients.inner_product(g, g), rtol=2e-2)


def test_gradients_are_computed_once_and_then_read(source):
  params = source.params(0)
  first = source.gradient(params, 0, 0)
  again = gradients.GradientSource(source.config, source.folder, (0,), 4)
  again._gradient = None  # Computing a gradient again would fail.
  for path, x in again.gradient(params, 0, 0).items():
    assert np.array_equal(x, first[path])
    assert np.array_equal(again.gradients_of(params, 0, 1, path)[0], x)
  with pytest.raises(ValueError, match="prompts=99"):
    gradients.GradientSource(source.config, source.folder, (0,), 99)
