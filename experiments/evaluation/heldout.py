"""Measures a model on held-out prompts: pass@k, maj@k and mean rewards."""

from collections.abc import Mapping, Sequence

import chex
import jax
import numpy as np

from experiments import rewards as rewards_lib
from experiments import tasks
from experiments.evaluation import pass_at_k
from experiments.evaluation.samples_page import Sample
from experiments.models import decoder
from experiments.models.tokenizer import Tokenizer
from experiments.parallel import sharding
from experiments.reporting import intervals
from experiments.rollouts import chat
from experiments.rollouts import sampler as sampler_lib
from experiments.rollouts.rollout import Rollout
from experiments.rollouts.sampling import Sampling

# The metrics of one task by name.
Metrics = dict[str, intervals.Interval]

# A sum of weighted parts can miss the full reward by a rounding error.
_ROUNDING = 1e-5


def respond(
    model: decoder.Decoder,
    params: chex.ArrayTree,
    tokenizer: Tokenizer,
    examples: Sequence[tasks.Example],
    key: jax.Array,
    *,
    max_prompt_tokens: int,
    max_new_tokens: int,
    temperature: float,
    group_size: int = 1,
) -> Rollout:
  """Samples responses to the examples' prompts in this process.

  Args:
    model: The decoder.
    params: The parameters of `model`.
    tokenizer: The tokenizer of the model.
    examples: The examples, one per prompt.
    key: A `jax.random` key.
    max_prompt_tokens: Length that prompts are padded to.
    max_new_tokens: Longest response in tokens.
    temperature: Sampling temperature; 0 means greedy decoding.
    group_size: Number of responses to each prompt.

  Returns:
    A rollout of `len(examples) * group_size` responses; responses to the same
    prompt are adjacent.

  Raises:
    ValueError: If a prompt is longer than `max_prompt_tokens`.
  """
  sampler = sampler_lib.LocalSampler(
      model, params, tokenizer, max_prompt_tokens=max_prompt_tokens
  )
  return sampler.sample(
      chat.encode_prompts(tokenizer, examples),
      key,
      Sampling(max_new_tokens=max_new_tokens, temperature=temperature),
      group_size=group_size,
  )


def score(
    task: tasks.Task,
    tokenizer: Tokenizer,
    examples: Sequence[tasks.Example],
    rollout: Rollout,
) -> tuple[list[str], np.ndarray]:
  """Scores the responses of a rollout with the task's own reward.

  Args:
    task: The task of the examples.
    tokenizer: The tokenizer of the model.
    examples: The examples that were answered.
    rollout: B responses, equally many adjacent ones to each example.

  Returns:
    The text of each response, and its reward, `[B]` float32.
  """
  repeated, completions = chat.pair(tokenizer, examples, rollout)
  return completions, tasks.checked_rewards(task, repeated, completions)


def sample_and_score(
    sampler: sampler_lib.Sampler,
    tokenizer: Tokenizer,
    task: tasks.Task,
    examples: Sequence[tasks.Example],
    sampling: Sampling,
    key: jax.Array,
    *,
    group_size: int = 1,
    workers: rewards_lib.RewardWorkers | None = None,
) -> list[Sample]:
  """Samples responses to the examples' prompts and scores them.

  Args:
    sampler: Samples the responses.
    tokenizer: The tokenizer of the model.
    task: The task, whose own reward is used if there are no workers.
    examples: Examples of the task; those of a mixture name their own tasks.
    sampling: How to choose tokens and when to stop.
    key: A `jax.random` key.
    group_size: Number of responses to each prompt.
    workers: Processes that score responses with a time limit. If their reward
      has a part named `correctness`, only that part counts.

  Returns:
    `len(examples) * group_size` samples; those of one prompt are adjacent.

  Raises:
    ValueError: If a prompt is too long for the sampler.
  """
  prompts = chat.encode_prompts(tokenizer, examples)
  _check_lengths(prompts, sampler.max_prompt_tokens)
  rollout = sampler.sample(prompts, key, sampling, group_size=group_size)
  rollout = sharding.fetch(rollout)
  repeated, completions = chat.pair(tokenizer, examples, rollout)
  if workers is None:
    rewards = tasks.checked_rewards(task, repeated, completions)
  else:
    scores = workers.score(repeated, completions)
    rewards = scores.parts.get("correctness", scores.total)
  lengths = np.sum(rollout.completion_mask, axis=1)
  texts = [tokenizer.decode(ids, skip_special=False) for ids in prompts]
  return [
      Sample(
          prompt=texts[row // group_size],
          completion=completion,
          reward=float(rewards[row]),
          tokens=int(lengths[row]),
          finished=bool(rollout.finished[row]),
          task=examples[row // group_size].task or task.name,
      )
      for row, completion in enumerate(completions)
  ]


def _check_lengths(prompts: Sequence[Sequence[int]], limit: int) -> None:
  """Refuses prompts of more than `limit` tokens."""
  lengths = list(map(len, prompts))
  for index, length in enumerate(lengths):
    if length > limit:
      raise ValueError(
          f"prompt {index} has {length} tokens, more than max_prompt_tokens="
          f"{limit}: raise it (the longest of these {len(prompts)} prompts has"
          f" {max(lengths)}) or shorten the prompt"
      )


def summarize(
    samples: Sequence[Sample],
    group_size: int,
    ks: Sequence[int] = (1,),
    correct_at: float = 1.0,
) -> dict[str, Metrics]:
  """Computes the metrics of each task, with bootstrap intervals over problems.

  Args:
    samples: The result of `sample_and_score`.
    group_size: Number of responses to each prompt, n.
    ks: Computes `pass@k` for each of these k (see `pass_at_k.pass_at_k`), and
      `maj@k` for those above 1.
    correct_at: For `pass@k`, the least reward of a correct response.

  Returns:
    For each task, the metrics `pass@k`, `maj@k`, `reward` (mean), `tokens`
    (mean length of a response) and `finished` (fraction of responses that ended
    before the length limit). If there are several tasks, also those of
    `macro average`, in which every task has the same weight.

  Raises:
    ValueError: If a k is not between 1 and n.
  """
  groups: dict[str, list[Sequence[Sample]]] = {}
  for start in range(0, len(samples), group_size):
    group = samples[start : start + group_size]
    groups.setdefault(group[0].task, []).append(group)
  values = {
      task: _by_problem(own, ks, correct_at) for task, own in groups.items()
  }
  metrics = {
      task: {name: intervals.interval(x) for name, x in columns.items()}
      for task, columns in values.items()
  }
  if len(values) > 1:
    names = next(iter(values.values()))
    metrics["macro average"] = {
        name: intervals.macro_interval([c[name] for c in values.values()])
        for name in names
    }
  return metrics


def _by_problem(
    groups: Sequence[Sequence[Sample]], ks: Sequence[int], correct_at: float
) -> dict[str, np.ndarray]:
  """The metrics of each of N problems of one task, `[N]` arrays by name."""
  field = lambda name: np.array([[getattr(s, name) for s in g] for g in groups])
  rewards = field("reward")
  correct = np.sum(rewards >= correct_at - _ROUNDING, axis=1)
  answers = [[pass_at_k.answer(s.completion) for s in g] for g in groups]
  columns = {
      f"pass@{k}": pass_at_k.pass_at_k(rewards.shape[1], correct, k) for k in ks
  }
  columns |= {
      f"maj@{k}": pass_at_k.maj_at_k(answers, rewards, k) for k in ks if k > 1
  }
  for name in ("reward", "tokens", "finished"):
    columns[name] = field(name).mean(axis=1)
  return columns


def evaluate_greedily(
    sampler: sampler_lib.Sampler,
    tokenizer: Tokenizer,
    task: tasks.Task,
    *,
    max_new_tokens: int,
    max_prompts: int,
    workers: rewards_lib.RewardWorkers | None = None,
) -> tuple[dict[str, float], list[Sample]]:
  """Scores one greedy response to each held-out prompt of a task.

  Args:
    sampler: Samples the responses.
    tokenizer: The tokenizer of the model.
    task: The task.
    max_new_tokens: Longest response in tokens.
    max_prompts: Most held-out prompts to use; the first ones are taken.
    workers: See `sample_and_score`.

  Returns:
    The metrics `accuracy` (mean reward), `length` (mean length of a response in
    tokens) and `finished` (fraction of responses that ended before the length
    limit); and the samples.

  Raises:
    ValueError: If a prompt is too long for the sampler.
  """
  samples = sample_and_score(
      sampler,
      tokenizer,
      task,
      task.heldout()[:max_prompts],
      Sampling(max_new_tokens=max_new_tokens, temperature=0.0),
      jax.random.key(0),  # Greedy decoding draws nothing.
      workers=workers,
  )
  mean = lambda name: float(np.mean([getattr(s, name) for s in samples]))
  metrics = {
      "accuracy": mean("reward"),
      "length": mean("tokens"),
      "finished": mean("finished"),
  }
  return metrics, samples


def to_table(metrics: Mapping[str, Metrics]) -> str:
  """Formats the metrics as text, with a line for each task and metric."""
  lines = []
  for task, columns in metrics.items():
    lines.append(task)
    for name, interval in columns.items():
      lines.append(f"  {name:10} {interval}")
  return "\n".join(lines)
