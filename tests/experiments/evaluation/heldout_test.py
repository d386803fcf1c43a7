"""Tests of sampling and scoring held-out prompts with the tiny model."""

import jax
import numpy as np
import pytest

from experiments import rewards, tasks
from experiments.evaluation import heldout
from experiments.evaluation.samples_page import Sample
from experiments.models import decoder, tiny
from experiments.rollouts import chat, sampler
from experiments.rollouts.sampling import Sampling

SAMPLING = Sampling(max_new_tokens=6, temperature=1.0)


@pytest.fixture(scope="module")
def loaded():
  return tiny.make_tiny(0)


def make_sampler(loaded, max_prompt_tokens=16):
  return sampler.LocalSampler(
      decoder.Decoder(loaded.config),
      loaded.params,
      loaded.tokenizer,
      max_prompt_tokens=max_prompt_tokens,
      slots=1,  # One program, whatever the number of responses.
  )


def sample(task, completion, reward, tokens=2, finished=True):
  return Sample("?", completion, reward, tokens, finished, task)


def test_every_response_is_scored_beside_its_prompt(loaded):
  """Three responses each to two prompts, decoded one at a time."""
  task = tasks.make_task("addition", seed=0)
  examples = task.heldout()[:2]
  run = lambda key: heldout.sample_and_score(
      make_sampler(loaded),
      loaded.tokenizer,
      task,
      examples,
      SAMPLING,
      jax.random.key(key),
      group_size=3,
  )
  samples = run(0)
  assert len(samples) == 6
  assert run(0) == samples
  assert run(1) != samples
  for i, one in enumerate(samples):
    example = examples[i // 3]
    ids = chat.encode_prompts(loaded.tokenizer, [example])[0]
    assert one.prompt == loaded.tokenizer.decode(ids, skip_special=False)
    assert one.reward == task.reward(example, one.completion)
    assert 1 <= one.tokens <= 6 and (one.finished or one.tokens == 6)
    assert one.task == "addition"


def test_correctness_counts_and_not_the_form_of_an_answer(loaded):
  """With workers, which here score in this process, without a time limit."""
  task = tasks.make_task("addition", seed=0)
  examples = task.heldout()[:2]
  samples = heldout.sample_and_score(
      make_sampler(loaded),
      loaded.tokenizer,
      task,
      examples,
      SAMPLING,
      jax.random.key(0),
      group_size=3,
      workers=rewards.RewardWorkers(
          task, f"correctness + 0.5*{__name__}:length", workers=0
      ),
  )
  for i, one in enumerate(samples):
    assert one.reward == task.reward(examples[i // 3], one.completion)


def length(example, completion):
  """A reward that never equals correctness."""
  del example
  return len(completion) + 7


def test_metrics_by_task_and_their_average():
  rows = [
      *[sample("a", c, r) for c, r in (("8", 1.0), ("9", 0.0), ("9", 0.0))],
      *[sample("a", c, r) for c, r in (("1", 1.0), ("1", 1.0), ("2", 0.0))],
      *[sample("b", "?", 0.5, tokens=4, finished=False) for _ in range(3)],
  ]
  metrics = heldout.summarize(rows, 3, ks=(1, 3))
  means = {t: {n: i.mean for n, i in c.items()} for t, c in metrics.items()}
  assert means["a"] == pytest.approx(
      {
          "pass@1": 0.5,  # (1/3 + 2/3) / 2.
          "pass@3": 1.0,
          "maj@3": 0.5,
          "reward": 0.5,
          "tokens": 2.0,
          "finished": 1.0,
      }
  )
  # A reward of 0.5 is correct only if `correct_at` allows it.
  assert means["b"]["pass@3"] == means["b"]["maj@3"] == 0.0
  assert means["macro average"]["pass@3"] == 0.5
  assert means["macro average"]["tokens"] == 3.0
  lenient = heldout.summarize(rows, 3, ks=(1,), correct_at=0.5)
  assert lenient["b"]["pass@1"].mean == 1.0
  assert "pass@3     1 [1, 1]" in heldout.to_table(metrics)
  one = heldout.summarize(rows[:3], 3)
  assert list(one) == ["a"]


def test_a_sum_of_parts_that_rounds_is_right():
  reward = float(np.float32(0.9) + np.float32(0.1) - np.float32(1e-7))
  assert reward < 1.0
  metrics = heldout.summarize([sample("a", "8", reward)], 1)
  assert metrics["a"]["pass@1"].mean == 1.0


def test_long_prompts_are_named(loaded):
  task = tasks.make_task("addition", seed=0)
  examples = task.heldout()[:3]
  longer = examples[1].prompt[0]["content"] + " 1" * 9
  examples[1] = examples[1]._replace(
      prompt=[{"role": "user", "content": longer}]
  )
  lengths = map(len, chat.encode_prompts(loaded.tokenizer, examples))
  assert list(lengths) == [12, 21, 12]
  match = r"prompt 1 has 21 tokens.*=16: raise it .*has 21"
  with pytest.raises(ValueError, match=match):
    heldout.sample_and_score(
        make_sampler(loaded),
        loaded.tokenizer,
        task,
        examples,
        SAMPLING,
        jax.random.key(0),
    )
