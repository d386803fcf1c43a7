"""Tests of what an update learns from, with the tiny model's own responses."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments import rewards, tasks
from experiments.evaluation import heldout
from experiments.models import decoder
from experiments.models import tiny as tiny_model
from experiments.rollouts import sampler as sampler_lib
from experiments.runs import collect
from experiments.runs.collect import CollectSettings
from experiments.tasks import curriculum
from tests.helpers.configs import tiny_config

GROUP = 16


class FirstDigit(tasks.Addition):
  """Rewards of the first digit: groups differ, and not all of them."""

  def reward(self, example, completion):
    return float(completion[:1] == example.columns["answer"][:1])


@pytest.fixture(scope="module")
def parts():
  loaded = tiny_model.make_tiny(0)
  sampler = sampler_lib.LocalSampler(
      decoder.Decoder(loaded.config),
      loaded.params,
      loaded.tokenizer,
      max_prompt_tokens=16,
  )
  task = FirstDigit("1", 0)
  return sampler, loaded.tokenizer, task


def make(parts, **changes):
  config = tiny_config(
      **{f"rollout.{name}": value for name, value in changes.items()}
  )
  sampler, tokenizer, task = parts
  scorer = rewards.RewardWorkers(task, workers=0)
  return (
      collect.Collector(
          CollectSettings.of_config(config), sampler, tokenizer, task, scorer
      ),
      config,
  )


def rounds(parts, config, update, n):
  """Prompts, rollouts and rewards `[N, GROUP]` of the rounds of an update."""
  sampler, tokenizer, task = parts
  for tried in range(n):
    first = (update * n + tried) * config.rollout.prompts
    examples = [task.train(first + i) for i in range(config.rollout.prompts)]
    rollout = collect.sample(
        CollectSettings.of_config(config),
        sampler,
        tokenizer,
        examples,
        update,
        tried,
    )
    _, earned = heldout.score(task, tokenizer, examples, rollout)
    yield examples, rollout, earned.reshape(-1, GROUP)


def test_what_is_collected_is_what_was_sampled(parts):
  collector, config = make(parts)
  found = collector.collect(3, None)
  ((_, rollout, earned),) = rounds(parts, config, 3, 1)
  jax.tree.map(np.testing.assert_array_equal, found.rollout, rollout)
  assert found.keep.all() and found.curriculum is None
  centred = earned - earned.mean(axis=1, keepdims=True)
  right = centred / (earned.std(axis=1, keepdims=True) + 1e-4)
  np.testing.assert_allclose(
      found.advantages, right.reshape(-1), rtol=1e-4, atol=1e-6
  )
  assert found.metrics["train/reward"] == pytest.approx(earned.mean())
  equal = np.ptp(earned, axis=1) == 0
  assert found.metrics["train/equal_groups"] == equal.mean()
  again = collector.collect(3, None)
  jax.tree.map(np.testing.assert_array_equal, again.rollout, rollout)


def test_groups_without_a_signal_are_drawn_again(parts):
  collector, config = make(parts, dynamic_tries=2)
  found = collector.collect(1, None)
  useful, equal, at_first = [], [], None
  for _, rollout, earned in rounds(parts, config, 1, 3):
    for prompt in range(config.rollout.prompts):
      own = slice(prompt * GROUP, (prompt + 1) * GROUP)
      different = np.ptp(earned[prompt]) > 0
      (useful if different else equal).append(rollout.tokens[own])
    at_first = len(equal) if at_first is None else at_first
    if len(useful) >= config.rollout.prompts:
      break
  assert 0 < at_first  # There is something to replace,
  n = config.rollout.prompts
  wanted = (useful + equal)[:n]
  np.testing.assert_array_equal(found.rollout.tokens, np.concatenate(wanted))
  replaced = at_first - max(n - len(useful), 0)
  assert found.metrics["rollout/replaced_groups"] == replaced > 0


def test_a_curriculum_chooses_the_prompts_and_learns(parts):
  collector, config = make(parts, curriculum=12)
  seen = curriculum.init(12)
  found = collector.collect(0, seen)
  chosen = curriculum.choose(seen, 8, seed=config.seed, update=0)
  assert set(np.flatnonzero(found.curriculum.counts)) == set(chosen)
  sampler, tokenizer, task = parts
  examples = [task.train(int(i)) for i in chosen]
  rollout = collect.sample(
      CollectSettings.of_config(config), sampler, tokenizer, examples, 0
  )
  np.testing.assert_array_equal(found.rollout.tokens, rollout.tokens)


def test_cut_off_responses_are_filtered(parts):
  collector, _ = make(parts, overlong="filter")
  found = collector.collect(0, None)
  assert 0 < found.rollout.finished.mean() < 1
  np.testing.assert_array_equal(found.keep, found.rollout.finished)
  assert not found.advantages[~found.keep].any()


def test_the_rollout_stays_a_record_of_arrays(parts):
  collector, _ = make(parts)
  found = collector.collect(0, None).rollout
  for field in dataclasses.fields(found):
    assert isinstance(getattr(found, field.name), np.ndarray)
