"""How good a model is on held-out prompts: pass@k and maj@k, by task."""

from collections.abc import Mapping, Sequence
from typing import Any

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

PyTree = Any

# Metrics by name, of one task.
Metrics = dict[str, intervals.Interval]

# A reward that is a sum of weighted parts misses its total by a rounding.
_ROUNDING = 1e-5


def respond(
    model: decoder.Decoder,
    params: PyTree,
    tokenizer: Tokenizer,
    examples: Sequence[tasks.Example],
    key: jax.Array,
    *,
    max_prompt_tokens: int,
    max_new_tokens: int,
    temperature: float,
    group_size: int = 1,
) -> Rollout:
  """Responses to the examples' prompts; arguments as for `rollout.generate`.

  Args:
    model: the decoder.
    params: its parameters.
    tokenizer: the model's tokenizer.
    examples: one per prompt.
    key: a `jax.random` key.
    max_prompt_tokens: length that prompts are padded to.
    max_new_tokens: limit of a response in tokens.
    temperature: 0 is greedy decoding.
    group_size: responses to each prompt; they are adjacent.

  Returns:
    A rollout of `len(examples) * group_size` responses.

  Raises:
    ValueError: a prompt is longer than `max_prompt_tokens`.
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
  """Text and reward of each response of `respond`.

  Returns:
    The completions, and `[len(completions)]` float32 rewards.
  """
  repeated, completions = chat.pair(tokenizer, examples, rollout)
  return completions, tasks.checked_rewards(task, repeated, completions)


def collect(
    sampler: sampler_lib.Sampler,
    tokenizer: Tokenizer,
    task: tasks.Task,
    examples: Sequence[tasks.Example],
    sampling: Sampling,
    key: jax.Array,
    *,
    samples: int = 1,
    workers: rewards_lib.RewardWorkers | None = None,
) -> list[Sample]:
  """Samples responses to the examples' prompts, and scores them.

  Args:
    sampler: what answers; it bounds how many responses are decoded at once.
    tokenizer: the model's.
    task: whose rewards the samples get, unless there are workers.
    examples: problems of the task, or of a mixture.
    sampling: how to choose tokens.
    key: a `jax.random` key.
    samples: responses to each prompt.
    workers: score in other processes with a time limit. If their reward has a
      part `correctness`, the samples get that part alone.

  Returns:
    `len(examples) * samples` samples; those of one prompt are adjacent.

  Raises:
    ValueError: a prompt is too long for the sampler.
  """
  prompts = chat.encode_prompts(tokenizer, examples)
  _check_lengths(prompts, sampler.max_prompt_tokens)
  rollout = sampler.sample(prompts, key, sampling, group_size=samples)
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
          prompt=texts[row // samples],
          completion=completion,
          reward=float(rewards[row]),
          tokens=int(lengths[row]),
          finished=bool(rollout.finished[row]),
          task=examples[row // samples].task or task.name,
      )
      for row, completion in enumerate(completions)
  ]


def _check_lengths(prompts, limit):
  """Refuses prompts that are longer than a sampler takes."""
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
  """Metrics of each task, with bootstrap intervals over its problems.

  Args:
    samples: of `collect`.
    group_size: responses to each prompt, n.
    ks: for each k, `pass@k` (see `passk.pass_at_k`), and above 1 `maj@k`.
    correct_at: the reward from which on a response is right, for `pass@k`.

  Returns:
    By the name of the task: `pass@k`, `maj@k`, `reward` (mean), `tokens` (mean
    length of a response), `finished` (fraction that ended by themselves). With
    several tasks also `macro average`, in which each has the same weight.

  Raises:
    ValueError: a k is not 1 to n.
  """
  groups: dict[str, list[Sequence[Sample]]] = {}
  for start in range(0, len(samples), group_size):
    group = samples[start : start + group_size]
    groups.setdefault(group[0].task, []).append(group)
  values = {
      task: _by_problem(found, ks, correct_at) for task, found in groups.items()
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


def _by_problem(groups, ks, correct_at):
  """Each metric of each problem of one task, `[N]` by name."""
  of = lambda name: np.array([[getattr(s, name) for s in g] for g in groups])
  rewards = of("reward")
  correct = np.sum(rewards >= correct_at - _ROUNDING, axis=1)
  answers = [[pass_at_k.answer(s.completion) for s in g] for g in groups]
  columns = {
      f"pass@{k}": pass_at_k.pass_at_k(rewards.shape[1], correct, k) for k in ks
  }
  columns |= {
      f"maj@{k}": pass_at_k.maj_at_k(answers, rewards, k) for k in ks if k > 1
  }
  for name in ("reward", "tokens", "finished"):
    columns[name] = of(name).mean(axis=1)
  return columns


def evaluate(
    sampler: sampler_lib.Sampler,
    tokenizer: Tokenizer,
    task: tasks.Task,
    *,
    max_new_tokens: int,
    max_prompts: int,
    workers: rewards_lib.RewardWorkers | None = None,
) -> tuple[dict[str, float], list[Sample]]:
  """Decodes greedily and asks the task for rewards.

  Args:
    sampler: what answers.
    tokenizer: the model's tokenizer.
    task: whose held-out examples are used.
    max_new_tokens: limit of a completion in tokens.
    max_prompts: how many of the held-out examples, at most.
    workers: see `collect`.

  Returns:
    Metrics: `accuracy` (mean reward), `length` (mean tokens of a completion)
    and `finished` (fraction that ended by themselves); and every sample.

  Raises:
    ValueError: a prompt is too long for the sampler.
  """
  samples = collect(
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
  """The metrics as text: a line for each task and metric."""
  lines = []
  for task, columns in metrics.items():
    lines.append(task)
    for name, found in columns.items():
      lines.append(f"  {name:10} {found}")
  return "\n".join(lines)
