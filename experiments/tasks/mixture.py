"""Several tasks, mixed by weight."""

from collections.abc import Sequence
import functools

import numpy as np

from experiments.tasks import base

# Examples that the shares are exact over.
_BLOCK = 1000


class Mixture(base.Task):
  """Several tasks whose training examples alternate at random.

  Of each 1,000 consecutive examples, a fixed number is of each task: its share
  of the weights, rounded. Their order is a permutation by the seed. Each task
  is walked through by its own index without gaps, so one epoch of it is one of
  its epochs. The held-out examples are those of all tasks, one after another.
  """

  examples_in = ("_blocks",)

  def __init__(
      self,
      name: str,
      seed: int,
      tasks: Sequence[base.Task],
      weights: Sequence[float],
  ):
    """See `make_task`.

    Args:
      name: of the mixture.
      seed: order of the tasks.
      tasks: at least one; of different names.
      weights: one positive number per task.

    Raises:
      ValueError: for a weight under a thousandth of their sum.
    """
    self.name = name
    self._seed = seed
    self._tasks = {task.name: task for task in tasks}
    shares = np.asarray(weights, float) / sum(weights)
    for share, task in zip(shares, tasks, strict=True):
      if share < 1 / _BLOCK:
        raise ValueError(
            f"task {name!r}: the weight of {task.name!r} is {share:.1e} of the"
            " sum and must be at least a thousandth"
        )
    # Largest remainders: the counts add up to the block.
    counts = np.floor(shares * _BLOCK).astype(int)
    rest = np.argsort(counts - shares * _BLOCK, kind="stable")
    counts[rest[: _BLOCK - counts.sum()]] += 1
    self._counts = counts

  def train(self, index: int) -> base.Example:
    """The example at a position, of one of the tasks."""
    base.check_index(index)
    block, position = divmod(index, _BLOCK)
    which, rank = self._blocks(block)
    part = which[position]
    inner = block * int(self._counts[part]) + int(rank[position])
    return list(self._tasks.values())[part].train(inner)

  def heldout(self) -> list[base.Example]:
    """The held-out examples of all tasks, one after another."""
    return [x for task in self._tasks.values() for x in task.heldout()]

  def reward(self, example: base.Example, completion: str) -> float:
    """The reward of the task that the example is from."""
    return self._tasks[example.task].reward(example, completion)

  def well_formed(self, example: base.Example, completion: str) -> bool:
    """As the task that the example is from says."""
    return self._tasks[example.task].well_formed(example, completion)

  def has_form(self) -> bool:
    """Whether all its tasks have a form of answers."""
    return all(task.has_form() for task in self._tasks.values())

  @functools.cached_property
  def _blocks(self):
    """The order within a block, the last one kept."""
    return functools.lru_cache(maxsize=1)(self._order)

  def _order(self, block):
    """Task at each position, and its number among those of the task."""
    which = np.repeat(np.arange(len(self._counts)), self._counts)
    which = np.random.default_rng([self._seed, block]).permutation(which)
    rank = np.zeros(_BLOCK, int)
    for part, count in enumerate(self._counts):
      rank[which == part] = np.arange(count)
    return which, rank
