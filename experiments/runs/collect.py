"""What an update learns from: prompts, responses, rewards and advantages."""

from collections.abc import Sequence
import time
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from experiments import rewards, tasks
from experiments.learning import losses
from experiments.models.tokenizer import Tokenizer
from experiments.parallel import sharding
from experiments.rewards import overlong
from experiments.rollouts import chat, sampling
from experiments.rollouts import sampler as sampler_lib
from experiments.rollouts.rollout import Rollout
from experiments.tasks import curriculum
from experiments.tasks.curriculum import Curriculum


class Collected(NamedTuple):
  """B responses to N prompts, those of a prompt adjacent; NumPy arrays.

  Attributes:
    rollout: `[B, T]` arrays.
    advantages: `[B]` float32.
    keep: `[B]` bool, responses that the loss is of.
    curriculum: what has now been seen of the pool; None without one.
    metrics: of the rollout, by name.
  """

  rollout: Rollout
  advantages: np.ndarray
  keep: np.ndarray
  curriculum: Curriculum | None
  metrics: dict[str, float]


def sample(
    config: ml_collections.ConfigDict,
    sampler: sampler_lib.Sampler,
    tokenizer: Tokenizer,
    examples: Sequence[tasks.Example],
    update: int,
    tried: int = 0,
) -> Rollout:
  """The groups of responses that a run draws in an update, as NumPy arrays.

  Args:
    config: of the run.
    sampler: of the policy.
    tokenizer: the model's.
    examples: whose prompts are answered, `config.rollout.responses` times each.
    update: number of updates done before.
    tried: how often examples were drawn for this update before.
  """
  key = jax.random.fold_in(jax.random.key(config.seed), update)
  if tried:
    key = jax.random.fold_in(key, tried)
  rollout = sampler.sample(
      chat.encode_prompts(tokenizer, examples),
      key,
      sampling.of_config(config.rollout),
      group_size=config.rollout.responses,
  )
  return sharding.fetch(rollout)


class Collector:
  """Collects what the updates of a run learn from."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      sampler: sampler_lib.Sampler,
      tokenizer: Tokenizer,
      task: tasks.Task,
      scorer: rewards.RewardWorkers,
  ):
    """Keeps the parts.

    Args:
      config: a config like `configs/quickstart.py`.
      sampler: of the policy; its weights are the caller's to update.
      tokenizer: the model's.
      task: gives the prompts.
      scorer: gives the rewards of responses.
    """
    self._config = config
    self._sampler = sampler
    self._tokenizer = tokenizer
    self._task = task
    self._scorer = scorer

  def initial_curriculum(self) -> Curriculum | None:
    """What is known of the pool before the first update."""
    size = self._config.rollout.curriculum
    return curriculum.init(size) if size else None

  def collect(self, update: int, seen: Curriculum | None) -> Collected:
    """The responses of one update.

    With `rollout.dynamic_tries`, groups whose rewards are all equal, from
    which nothing can be learned, make room for groups of further prompts.

    Args:
      update: updates done before.
      seen: what is known of the curriculum's pool; None without one.
    """
    tries = self._config.rollout.dynamic_tries
    useful: list[_Group] = []
    equal: list[_Group] = []
    n, tally = self._config.rollout.prompts, _Tally()
    for tried in range(1 + tries):
      drawn, seen = self._draw(update, tried, seen, tally)
      for group in drawn:
        alike = tries > 0 and np.ptp(group.rewards) == 0
        (equal if alike else useful).append(group)
      if not tried:
        at_first = len(equal)
      if len(useful) >= n:
        break
    tally.replaced = at_first - max(n - len(useful), 0)
    return self._weigh((useful + equal)[:n], seen, tally)

  def _draw(self, update, tried, seen, tally):
    """One round: the groups of `rollout.prompts` prompts."""
    c = self._config.rollout
    number = update * (1 + c.dynamic_tries) + tried
    if seen is None:
      positions = number * c.prompts + np.arange(c.prompts)
    else:
      positions = curriculum.choose(
          seen, c.prompts, seed=self._config.seed, update=number
      )
    examples = [self._task.train(int(i)) for i in positions]
    start = time.perf_counter()
    rollout = sample(
        self._config, self._sampler, self._tokenizer, examples, update, tried
    )
    sampled = time.perf_counter()
    scores = self._scorer.score(*chat.pair(self._tokenizer, examples, rollout))
    tally.add(rollout, scores, c.responses)
    tally.seconds += np.array([sampled - start, time.perf_counter() - sampled])
    of_prompt = scores.total.reshape(c.prompts, c.responses)
    if seen is not None:
      passed = np.clip(of_prompt, 0.0, 1.0)
      seen = curriculum.observe(seen, positions, passed)
    rows = np.arange(c.prompts * c.responses).reshape(of_prompt.shape)
    groups = [
        _Group(jax.tree.map(lambda x, own=own: x[own], rollout), earned)
        for own, earned in zip(rows, of_prompt, strict=True)
    ]
    return groups, seen

  def _weigh(self, groups, seen, tally):
    """Advantages of the groups that were kept."""
    c = self._config
    rollout = jax.tree.map(
        lambda *x: np.concatenate(x), *[g.rollout for g in groups]
    )
    treated = overlong.treat(
        np.concatenate([g.rewards for g in groups]),
        rollout.completion_mask.sum(axis=1),
        rollout.finished,
        kind=c.rollout.overlong,
        max_new_tokens=c.rollout.max_new_tokens,
        buffer=c.rollout.overlong_buffer,
    )
    advantages = losses.LOSSES[c.loss.name].advantages(
        treated.rewards, c.rollout.responses, treated.in_baseline
    )
    return Collected(
        rollout, advantages, treated.in_loss, seen, tally.metrics()
    )


class _Group(NamedTuple):
  """The responses to one prompt, and what they earned."""

  rollout: Rollout
  rewards: np.ndarray


class _Tally:
  """Metrics of all that was sampled for an update, kept or not."""

  def __init__(self) -> None:
    self.replaced = 0
    self.seconds = np.zeros(2)  # Of sampling, of rewards.
    self._rewards: list[np.ndarray] = []
    self._lengths: list[np.ndarray] = []
    self._finished: list[np.ndarray] = []
    self._parts: dict[str, list[np.ndarray]] = {}
    self._equal: list[np.ndarray] = []
    self._failed = {"timeouts": 0, "errors": 0}

  def add(self, rollout: Rollout, scores: Any, group_size: int) -> None:
    """Counts one round."""
    self._rewards.append(scores.total)
    self._equal.append(np.ptp(scores.total.reshape(-1, group_size), axis=1))
    self._lengths.append(rollout.completion_mask.sum(axis=1))
    self._finished.append(rollout.finished)
    for name, values in scores.parts.items():
      self._parts.setdefault(name, []).append(values)
    self._failed["timeouts"] += scores.timeouts
    self._failed["errors"] += scores.errors

  def metrics(self) -> dict[str, float]:
    """Numbers by name; lengths in tokens, times in seconds."""
    rewards, lengths = map(np.concatenate, (self._rewards, self._lengths))
    found = {
        "train/reward": rewards.mean(),
        "train/reward_std": rewards.std(),
        "train/equal_groups": (np.concatenate(self._equal) == 0).mean(),
        "rollout/length": lengths.mean(),
        "rollout/length_max": lengths.max(),
        "rollout/finished": np.concatenate(self._finished).mean(),
        "rollout/tokens_per_second": lengths.sum() / self.seconds[0],
        "rollout/replaced_groups": self.replaced,
        "rollout/reward_timeouts": self._failed["timeouts"],
        "rollout/reward_errors": self._failed["errors"],
        "time/rollout": self.seconds[0],
        "time/reward": self.seconds[1],
    }
    if len(self._parts) > 1:  # Else it is the reward itself.
      for name, values in self._parts.items():
        found[f"train/reward/{name}"] = np.concatenate(values).mean()
    return {name: float(value) for name, value in found.items()}
