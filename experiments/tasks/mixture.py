"""Several tasks, mixed by weight."""

from collections.abc import Sequence
import functools

import numpy as np

from experiments.tasks import base

# Number of consecutive examples in which the shares are exact.
_BLOCK = 1000


class Mixture(base.Task):
  """Several tasks whose training examples alternate at random.

  Each block of 1,000 consecutive examples has a fixed number from each task:
  its share of the weights, rounded. Their order is a permutation that depends
  on the seed. The examples of a task are taken in its own order, without gaps.
  The held-out examples are those of all tasks, one task after another.
  """

  examples_in = ("_blocks",)

  def __init__(
      self,
      name: str,
      seed: int,
      tasks: Sequence[base.Task],
      weights: Sequence[float],
  ):
    """Creates the mixture; see `make_task`.

    Args:
      name: Name of the mixture.
      seed: Random seed of the order of the tasks.
      tasks: At least one task; their names differ.
      weights: One positive number per task.

    Raises:
      ValueError: If a weight is less than a thousandth of their sum.
    """
    self.name = name
    self._seed = seed
    self._tasks = {task.name: task for task in tasks}
    shares = np.asarray(weights, float) / sum(weights)
    for share, task in zip(shares, tasks, strict=True):
      if share < 1 / _BLOCK:
        raise ValueError(
            f"task {name!r}: the weight of {task.name!r} is {share:.1e} of the"
            " sum; raise it to at least a thousandth"
        )
    # Rounded by largest remainder, so that the counts add up to the block.
    counts = np.floor(shares * _BLOCK).astype(int)
    rest = np.argsort(counts - shares * _BLOCK, kind="stable")
    counts[rest[: _BLOCK - counts.sum()]] += 1
    self._counts = counts

  def train(self, index: int) -> base.Example:
    """Returns the example at a position, from one of the tasks."""
    base.check_index(index)
    block, position = divmod(index, _BLOCK)
    which, rank = self._blocks(block)
    part = which[position]
    inner = block * int(self._counts[part]) + int(rank[position])
    return list(self._tasks.values())[part].train(inner)

  def heldout(self) -> list[base.Example]:
    """Returns the held-out examples of all tasks, one task after another."""
    return [x for task in self._tasks.values() for x in task.heldout()]

  def reward(self, example: base.Example, completion: str) -> float:
    """Returns the reward by the task that the example is from."""
    return self._tasks[example.task].reward(example, completion)

  def well_formed(self, example: base.Example, completion: str) -> bool:
    """Returns whether the response has the format of the example's task."""
    return self._tasks[example.task].well_formed(example, completion)

  def has_form(self) -> bool:
    """Returns whether all tasks have an answer format."""
    return all(task.has_form() for task in self._tasks.values())

  @functools.cached_property
  def _blocks(self):
    """The order within a block; the last one is cached."""
    return functools.lru_cache(maxsize=1)(self._order)

  def _order(self, block):
    """The task at each position of a block, and its rank among that task's."""
    which = np.repeat(np.arange(len(self._counts)), self._counts)
    which = np.random.default_rng([self._seed, block]).permutation(which)
    rank = np.zeros(_BLOCK, int)
    for part, count in enumerate(self._counts):
      rank[which == part] = np.arange(count)
    return which, rank
