"""Which prompts to train on next, by how often each was solved.

A group of responses that all pass or all fail teaches nothing, and a pass rate
of ½ teaches most: the variance of a pass is p (1 - p). So prompts are drawn in
proportion to that variance, with a floor that starves none.

Axis letter: N examples of the pool, by training index 0 ... N - 1.
"""

from typing import Any

from flax import struct
import numpy as np

# Part of the draws that is uniform over the pool.
_FLOOR = 0.1
# What a visit leaves of earlier counts: the policy that made them is gone.
_MEMORY = 0.5


@struct.dataclass
class Curriculum:
  """What has been seen of the pool; goes into checkpoints as it is.

  Attributes:
    counts: `[N]` float32, responses seen, older ones discounted.
    passes: `[N]` float32, how many of them passed.
  """

  counts: np.ndarray
  passes: np.ndarray


def init(size: int) -> Curriculum:
  """A pool of `size` examples, none seen."""
  if size < 1:
    raise ValueError(f"size must be at least 1 example, got {size}")
  return Curriculum(np.zeros(size, np.float32), np.zeros(size, np.float32))


def probabilities(state: Curriculum) -> np.ndarray:
  """Chance of each example to be the next one.

  `0.9 w / Σw + 0.1 / N` with `w = p (1 - p)` and the rate
  `p = (passes + 1) / (counts + 2)` (Laplace's rule), which is ½ for an example
  that was never seen and never quite 0 or 1.

  Args:
    state: what has been seen.

  Returns:
    `[N]` float64 that sum to 1, each at least `0.1 / N`.
  """
  rate = (np.float64(state.passes) + 1) / (np.float64(state.counts) + 2)
  weight = rate * (1 - rate)
  return (1 - _FLOOR) * weight / weight.sum() + _FLOOR / weight.size


def choose(state: Curriculum, n: int, *, seed: int, update: int) -> np.ndarray:
  """Draws the examples of an update, without replacement.

  A pure function of its arguments: a resumed run draws the same.

  Args:
    state: what had been seen before the update.
    n: examples to draw; at most N.
    seed: of the run, at least 0.
    update: updates done before.

  Returns:
    `[n]` int64 training indices, distinct, in the order drawn.

  Raises:
    ValueError: if the pool has fewer than n examples.
  """
  size = state.counts.size
  if not 1 <= n <= size:
    raise ValueError(
        f"n must be 1 to the pool's {size} examples, got {n}: enlarge the pool"
        " or lower the prompts per update"
    )
  # The n first of exponential races are draws without replacement.
  uniform = np.random.default_rng([seed, update]).random(size)
  arrival = -np.log1p(-uniform) / probabilities(state)
  return np.argsort(arrival, kind="stable")[:n]


def observe(state: Curriculum, indices: Any, passed: Any) -> Curriculum:
  """Counts the responses of an update.

  Args:
    state: what had been seen before.
    indices: `[n]` int, distinct training indices.
    passed: `[n, responses]` bool, or float of `[0, 1]`.

  Returns:
    The new state; the old one is unchanged.

  Raises:
    ValueError: for indices outside the pool or twice, or a pass that is not in
      `[0, 1]`.
  """
  indices = np.asarray(indices)
  passed = np.asarray(passed, np.float32)
  if passed.ndim != 2 or passed.shape[0] != indices.size:
    raise ValueError(
        f"passed must have shape [{indices.size}, responses], got"
        f" {passed.shape}"
    )
  inside = (indices >= 0) & (indices < state.counts.size)
  if not inside.all() or np.unique(indices).size != indices.size:
    raise ValueError(
        f"indices must be distinct and 0 to {state.counts.size - 1}, got"
        f" {indices.tolist()}"
    )
  if not np.all((passed >= 0) & (passed <= 1)):
    raise ValueError(
        f"passed must be 0 to 1, got {passed.min()} to {passed.max()}: say"
        " from which reward on a response passes"
    )
  counts, passes = np.array(state.counts), np.array(state.passes)
  counts[indices] = _MEMORY * counts[indices] + passed.shape[1]
  passes[indices] = _MEMORY * passes[indices] + passed.sum(axis=1)
  return Curriculum(counts, passes)
