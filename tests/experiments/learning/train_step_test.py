"""Tests of one update on rollouts of a real, random, tiny model."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments.learning import batches, train_step
from experiments.learning.batches import BatchSettings
from experiments.learning.train_step import UpdateSettings
from experiments.runs import checkpoints, collect, loop
from experiments.runs.collect import CollectSettings
from tests.helpers import trees
from tests.helpers.configs import tiny_config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """The parts of a run that has not started yet."""
  path = tmp_path_factory.mktemp("parts")
  config = tiny_config()
  saved = checkpoints.Checkpoints(path / "c")
  return loop.Run(config, path, saved, loop.make_mesh(config))


def test_micro_batches_and_packing_do_not_change_the_update(run):
  collected = run.collector.collect(0, None)
  assert np.any(collected.advantages != 0)  # There is something to learn.
  results, counts = [], []
  for changes in ({}, {"loss.micro_rows": 128, "loss.row_tokens": (18,)}):
    config = tiny_config(**changes)
    batch, packed = batches.make_batch(
        BatchSettings.of_config(config),
        collected.rollout,
        collected.advantages,
    )
    counts.append(packed.count)
    settings = UpdateSettings.of_config(config)
    tx = settings.make_optimizer()
    step = jax.jit(train_step.make_train_step(run.model, tx, settings))
    state = train_step.init_state(run.state.params, tx)
    results.append(step(state, batch))
  assert counts[0] > counts[1] == 1
  (one, one_metrics), (other, other_metrics) = results
  for name, value in one_metrics.items():
    np.testing.assert_allclose(
        value, other_metrics[name], rtol=1e-3, atol=1e-6, err_msg=name
    )
  start = trees.leaves(run.state.params)
  for name, value in trees.leaves(one.params).items():
    step, other_step = value - start[name], trees.leaves(other.params)[name]
    other_step = other_step - start[name]
    # Factors are rounded to bfloat16, with 8 bits.
    np.testing.assert_allclose(
        step, other_step, atol=0.02 * np.abs(step).max() + 1e-12, err_msg=name
    )


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"rollout.top_k": 3, "rollout.temperature": 0.7},
        {"rollout.top_p": 0.6, "rollout.min_new_tokens": 2},
    ],
)
def test_sampler_and_trainer_have_one_distribution(run, how):
  """Before any update, the trainer's log-probs are those of the sampler."""
  config = tiny_config(
      **how, **{"loss.correction": "token", "kl.mismatch": True}
  )
  collector = collect.Collector(
      CollectSettings.of_config(config),
      run.sampler,
      run.tokenizer,
      run.task,
      run.scorer,
  )
  rollout, advantages, *_ = collector.collect(0, None)
  batch, packed = batches.make_batch(
      BatchSettings.of_config(config), rollout, advantages
  )
  prepare = train_step.make_prepare(
      run.model, UpdateSettings.of_config(config), run.tokenizer.eos_ids
  )
  finished = packed.gather(rollout.finished)
  prepared, metrics = jax.jit(prepare)(run.state.params, None, batch, finished)
  mask = batch.tokens.mask
  sampled = batch.tokens.old_log_probs[mask]
  np.testing.assert_allclose(
      np.asarray(prepared.tokens.old_log_probs)[mask], sampled, atol=2e-5
  )
  assert sampled.min() < -0.1  # Not all tokens are certain.
  np.testing.assert_allclose(
      prepared.tokens.weights, batch.tokens.weights, rtol=1e-4
  )
  assert abs(prepared.mismatch) < 1e-5
  assert metrics["train/off_policy_kl"] < 1e-5
  if how:  # They would differ if the trainer did not truncate as well.
    prepare = train_step.make_prepare(
        run.model,
        UpdateSettings.of_config(tiny_config(**{"loss.epochs": 2})),
    )
    wrong, _ = jax.jit(prepare)(run.state.params, None, batch, finished)
    off = np.asarray(wrong.tokens.old_log_probs)[mask] - sampled
    assert np.abs(off).max() > 0.1


def test_a_gap_of_the_sampler_is_corrected_and_off_the_budget(run):
  config = tiny_config(
      **{
          "loss.correction": "token",
          "loss.correction_cap": 1.5,
          "kl.mismatch": True,
      }
  )
  rollout, advantages, *_ = run.collector.collect(0, None)
  true = rollout.log_probs
  gap = np.where(np.arange(true.shape[1]) % 2, 0.1, -1.0).astype(np.float32)
  off = dataclasses.replace(rollout, log_probs=true + gap)
  batch, packed = batches.make_batch(
      BatchSettings.of_config(config), off, advantages
  )
  finished = np.ones_like(batch.tokens.mask)
  prepare = jax.jit(
      train_step.make_prepare(run.model, UpdateSettings.of_config(config))
  )
  prepared, metrics = prepare(run.state.params, None, batch, finished)
  mask = batch.tokens.mask
  gaps = packed.gather(np.broadcast_to(gap, true.shape).copy())[mask]
  ratio = np.minimum(np.exp(-gaps), 1.5)
  weights = np.asarray(prepared.tokens.weights)[mask]
  np.testing.assert_allclose(
      weights / batch.tokens.weights[mask], ratio, rtol=1e-4
  )
  np.testing.assert_allclose(prepared.mismatch, gaps.mean(), atol=1e-4)
  assert metrics["train/truncated_weights"] == pytest.approx((gaps < 0).mean())
