"""Chooses the prompts to train on by how often each was solved.

A group of responses that all pass or all fail teaches nothing, and a pass rate
p of ½ teaches most: the variance of passing is p (1 - p). Prompts are therefore
drawn in proportion to that variance, with a floor below which none falls.

Axis letter: N examples of the pool, by training index 0 ... N - 1.
"""

from flax import struct
import numpy as np
from numpy.typing import ArrayLike

# Share of the draws that is uniform over the pool.
_FLOOR = 0.1
# Factor on earlier counts at each visit: they come from an older policy.
_MEMORY = 0.5


@struct.dataclass
class Curriculum:
  """The responses seen for each example of the pool; part of checkpoints.

  Attributes:
    counts: `[N]` float32, responses seen, with older ones discounted.
    passes: `[N]` float32, how many of them passed.
  """

  counts: np.ndarray
  passes: np.ndarray


def init(size: int) -> Curriculum:
  """Makes a pool of `size` examples that have not been seen.

  Raises:
    ValueError: If the pool is empty.
  """
  if size < 1:
    raise ValueError(f"size must be at least 1 example, got {size}")
  return Curriculum(np.zeros(size, np.float32), np.zeros(size, np.float32))


def probabilities(state: Curriculum) -> np.ndarray:
  """Computes the probability that each example is drawn next.

  `0.9 w / Σw + 0.1 / N` with `w = p (1 - p)` and the pass rate
  `p = (passes + 1) / (counts + 2)` (Laplace's rule), which is ½ for an example
  that was never seen, and never exactly 0 or 1.

  Args:
    state: What has been seen.

  Returns:
    `[N]` float64 that sum to 1, each at least `0.1 / N`.
  """
  rate = (np.float64(state.passes) + 1) / (np.float64(state.counts) + 2)
  weight = rate * (1 - rate)
  return (1 - _FLOOR) * weight / weight.sum() + _FLOOR / weight.size


def choose(state: Curriculum, n: int, *, seed: int, update: int) -> np.ndarray:
  """Draws the examples of an update, without replacement.

  A pure function of its arguments, so that a resumed run draws the same.

  Args:
    state: What had been seen before the update.
    n: Number of examples to draw, 1 to N.
    seed: Random seed of the run, at least 0.
    update: Number of updates done before.

  Returns:
    `[n]` int64, distinct training indices in the order drawn.

  Raises:
    ValueError: If the pool has fewer than n examples.
  """
  size = state.counts.size
  if not 1 <= n <= size:
    raise ValueError(
        f"n must be 1 to the pool's {size} examples, got {n}: enlarge the pool"
        " or lower the prompts per update"
    )
  # The first n arrivals of an exponential race are draws without replacement.
  uniform = np.random.default_rng([seed, update]).random(size)
  arrival = -np.log1p(-uniform) / probabilities(state)
  return np.argsort(arrival, kind="stable")[:n]


def observe(
    state: Curriculum, indices: ArrayLike, passed: ArrayLike
) -> Curriculum:
  """Counts the responses of an update.

  Args:
    state: What had been seen before.
    indices: `[n]` int, distinct training indices.
    passed: `[n, responses]` bool, or float in `[0, 1]`.

  Returns:
    The new state; the old one is unchanged.

  Raises:
    ValueError: If an index is outside the pool or occurs twice, or `passed` is
      not in `[0, 1]`.
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
        f"passed must be 0 to 1, got {passed.min()} to {passed.max()}: clip"
        " the rewards, or compare them with a threshold"
    )
  counts, passes = np.array(state.counts), np.array(state.passes)
  counts[indices] = _MEMORY * counts[indices] + passed.shape[1]
  passes[indices] = _MEMORY * passes[indices] + passed.sum(axis=1)
  return Curriculum(counts, passes)
