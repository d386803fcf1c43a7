"""Collects what an update learns from: responses, rewards and advantages."""

from collections.abc import Sequence
import dataclasses
import time
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from experiments import _settings, rewards, tasks
from experiments.learning import losses
from experiments.models.tokenizer import Tokenizer
from experiments.parallel import sharding
from experiments.rewards import overlong
from experiments.rollouts import chat
from experiments.rollouts import sampler as sampler_lib
from experiments.rollouts.rollout import Rollout
from experiments.rollouts.sampling import Sampling
from experiments.tasks import curriculum
from experiments.tasks.curriculum import Curriculum


class Collected(NamedTuple):
  """B responses to N prompts as NumPy arrays; those of a prompt are adjacent.

  Attributes:
    rollout: The responses, `[B, T]` arrays.
    advantages: `[B]` float32.
    keep: `[B]` bool, whether a response is in the loss.
    curriculum: What is now known of the prompts; None without a curriculum.
    metrics: Metrics of the rollout by name.
  """

  rollout: Rollout
  advantages: np.ndarray
  keep: np.ndarray
  curriculum: Curriculum | None
  metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class CollectSettings:
  """What collecting responses reads of a config.

  Attributes:
    seed: Random seed of the responses and of the choice of prompts.
    loss: Name of the loss, which decides what an advantage is.
    sampling: How responses are sampled.
    prompts: Number of prompts of an update.
    responses: Number of responses to each prompt.
    dynamic_tries: How often groups of equal rewards are replaced, at most.
    curriculum: Number of examples to choose from by pass rate; 0 means all, in
      their order.
    overlong: What becomes of cut-off responses, see `overlong.treat`.
    overlong_buffer: Number of tokens over which their penalty grows to 1.
  """

  seed: int
  loss: str
  sampling: Sampling
  prompts: int
  responses: int
  dynamic_tries: int
  curriculum: int
  overlong: str
  overlong_buffer: int

  def __post_init__(self) -> None:
    _settings.check_least(
        self, prompts=1, responses=1, dynamic_tries=0, curriculum=0
    )
    if not self.sampling.temperature > 0:
      raise ValueError(
          f"temperature={self.sampling.temperature} must be positive: greedy"
          " responses to one prompt are all the same"
      )
    if self.curriculum and self.curriculum < self.prompts:
      raise ValueError(
          f"curriculum={self.curriculum} examples must be at least"
          f" rollout.prompts={self.prompts}, or 0 for none"
      )
    overlong.check(
        self.overlong, self.sampling.max_new_tokens, self.overlong_buffer
    )

  @classmethod
  def of_config(cls, config: ml_collections.ConfigDict) -> "CollectSettings":
    """Reads a config like `configs/quickstart.py`.

    Raises:
      ValueError: If a value is out of range; names the field.
    """
    settings = _settings.read(
        cls,
        config.rollout,
        "config.rollout.",
        seed=config.seed,
        loss=config.loss.name,
        sampling=Sampling.of_config(config.rollout),
    )
    losses.find(settings.loss)
    try:
      losses.check_group_size(settings.loss, settings.responses)
    except ValueError as error:
      raise ValueError(f"config.rollout.responses: {error}") from error
    return settings


def sample(
    settings: CollectSettings,
    sampler: sampler_lib.Sampler,
    tokenizer: Tokenizer,
    examples: Sequence[tasks.Example],
    update: int,
    tried: int = 0,
) -> Rollout:
  """Samples the responses of an update, as NumPy arrays.

  Args:
    settings: How the run collects.
    sampler: The policy's engine.
    tokenizer: The model's tokenizer.
    examples: Examples whose prompts are answered, `responses` times each.
    update: Number of updates done before.
    tried: Number of times that examples were drawn for this update before.
  """
  key = jax.random.fold_in(jax.random.key(settings.seed), update)
  if tried:
    key = jax.random.fold_in(key, tried)
  rollout = sampler.sample(
      chat.encode_prompts(tokenizer, examples),
      key,
      settings.sampling,
      group_size=settings.responses,
  )
  return sharding.fetch(rollout)


class Collector:
  """Collects what each update of a run learns from."""

  def __init__(
      self,
      settings: CollectSettings,
      sampler: sampler_lib.Sampler,
      tokenizer: Tokenizer,
      task: tasks.Task,
      scorer: rewards.RewardWorkers,
  ):
    """Keeps its arguments.

    Args:
      settings: How to collect.
      sampler: The policy's engine; the caller updates its weights.
      tokenizer: The model's tokenizer.
      task: Gives the prompts.
      scorer: Gives the rewards of responses.
    """
    self._settings = settings
    self._sampler = sampler
    self._tokenizer = tokenizer
    self._task = task
    self._scorer = scorer

  def initial_curriculum(self) -> Curriculum | None:
    """What is known of the prompts before the first update."""
    size = self._settings.curriculum
    return curriculum.init(size) if size else None

  def collect(self, update: int, seen: Curriculum | None) -> Collected:
    """Collects the responses of one update.

    With `dynamic_tries`, groups whose rewards are all equal, from which nothing
    can be learned, are replaced by groups of further prompts.

    Args:
      update: Number of updates done before.
      seen: What is known of the prompts; None without a curriculum.
    """
    tries = self._settings.dynamic_tries
    useful: list[_Group] = []
    equal: list[_Group] = []
    n, tally = self._settings.prompts, _Tally()
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
    """Draws one round: the groups of `prompts` prompts."""
    c = self._settings
    number = update * (1 + c.dynamic_tries) + tried
    if seen is None:
      positions = number * c.prompts + np.arange(c.prompts)
    else:
      positions = curriculum.choose(seen, c.prompts, seed=c.seed, update=number)
    examples = [self._task.train(int(i)) for i in positions]
    start = time.perf_counter()
    rollout = sample(c, self._sampler, self._tokenizer, examples, update, tried)
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
    """Gives the kept groups their advantages."""
    c = self._settings
    rollout = jax.tree.map(
        lambda *x: np.concatenate(x), *[g.rollout for g in groups]
    )
    treated = overlong.treat(
        np.concatenate([g.rewards for g in groups]),
        rollout.completion_mask.sum(axis=1),
        rollout.finished,
        kind=c.overlong,
        max_new_tokens=c.sampling.max_new_tokens,
        buffer=c.overlong_buffer,
    )
    advantages = losses.find(c.loss).advantages(
        treated.rewards, c.responses, treated.in_baseline
    )
    return Collected(
        rollout, advantages, treated.in_loss, seen, tally.metrics()
    )


class _Group(NamedTuple):
  """The responses to one prompt, and their rewards."""

  rollout: Rollout
  rewards: np.ndarray


class _Tally:
  """Metrics of everything sampled for an update, kept or not."""

  def __init__(self) -> None:
    self.replaced = 0
    self.seconds = np.zeros(2)  # For sampling, and for rewards.
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
    """Metrics by name; lengths in tokens, times in seconds."""
    rewards, lengths = map(np.concatenate, (self._rewards, self._lengths))
    metrics = {
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
    if len(self._parts) > 1:  # A single part is the reward itself.
      for name, values in self._parts.items():
        metrics[f"train/reward/{name}"] = np.concatenate(values).mean()
    return {name: float(value) for name, value in metrics.items()}
