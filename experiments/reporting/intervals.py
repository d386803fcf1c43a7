"""Means with bootstrap intervals."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import stats

_RESAMPLES = 10_000


class Interval(NamedTuple):
  """A mean and a bootstrap interval around it."""

  mean: float
  low: float
  high: float

  def __str__(self) -> str:
    return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


def interval(
    values: Sequence[float] | np.ndarray, confidence: float = 0.95
) -> Interval:
  """Computes the mean of independent values and its bootstrap interval.

  This is a percentile bootstrap. Its seed is fixed, so the same values always
  give the same interval.

  Args:
    values: One per independent unit (a batch, a seed), at least one.
    confidence: Share of the resampled means that the interval covers.

  Returns:
    The mean with its interval, which has no width for a single value.

  Raises:
    ValueError: If there are no values, or one is not finite.
  """
  return macro_interval([values], confidence)


def macro_interval(
    groups: Sequence[Sequence[float] | np.ndarray], confidence: float = 0.95
) -> Interval:
  """Computes the mean of the groups' means and its bootstrap interval.

  Every group has the same weight, and is resampled independently.

  Args:
    groups: The independent values of each group (a task), at least one in each.
    confidence: Share of the resampled means that the interval covers.

  Returns:
    The mean with its interval, as `interval` returns it.

  Raises:
    ValueError: If there are no groups, a group has no values, or a value is not
      finite.
  """
  arrays = tuple(_finite(values) for values in groups)
  if not arrays:
    raise ValueError("groups must hold at least one list of numbers, got none")
  mean = float(np.mean([values.mean() for values in arrays]))
  if all(np.ptp(values) == 0 for values in arrays):
    return Interval(mean, mean, mean)
  bounds = stats.bootstrap(
      # SciPy cannot resample a single value; repeating it changes no mean.
      tuple(np.repeat(v, 2) if v.size == 1 else v for v in arrays),
      lambda *parts, axis: np.mean([p.mean(axis=axis) for p in parts], axis=0),
      vectorized=True,
      # Number of resamples in memory at once.
      batch=max(1, 10_000_000 // sum(v.size for v in arrays)),
      n_resamples=_RESAMPLES,
      confidence_level=confidence,
      method="percentile",
      rng=np.random.default_rng(0),
  ).confidence_interval
  return Interval(mean, float(bounds.low), float(bounds.high))


def _finite(values: npt.ArrayLike) -> np.ndarray:
  """Returns the values as float64 `[n]`, with n at least 1."""
  array = np.asarray(values, np.float64)
  if array.ndim != 1 or not array.size or not np.isfinite(array).all():
    raise ValueError(
        f"values={values!r} must be a list of at least one finite number"
    )
  return array
