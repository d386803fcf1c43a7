"""Means with bootstrap intervals."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
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
  """Mean of independent values with its percentile bootstrap interval.

  The same values give the same interval: the resampling has a fixed seed.

  Args:
    values: one per independent unit (a batch, a seed), at least one.
    confidence: share of the resampled means within the interval.

  Returns:
    The interval; of no width for a single value.

  Raises:
    ValueError: no values, or one that is not finite.
  """
  return macro_interval([values], confidence)


def macro_interval(
    groups: Sequence[Sequence[float] | np.ndarray], confidence: float = 0.95
) -> Interval:
  """Mean of the groups' means, each group resampled by itself.

  Args:
    groups: independent values of each group (a task), at least one in each.
    confidence: share of the resampled means within the interval.

  Returns:
    The interval, as that of `interval`; every group has the same weight.

  Raises:
    ValueError: no groups, one without values, or a value that is not finite.
  """
  arrays = tuple(_finite(values) for values in groups)
  if not arrays:
    raise ValueError("groups must hold at least one list of numbers, got none")
  mean = float(np.mean([values.mean() for values in arrays]))
  if all(np.ptp(values) == 0 for values in arrays):
    return Interval(mean, mean, mean)
  found = stats.bootstrap(
      # SciPy cannot resample a single value, which is itself in any resample.
      tuple(np.repeat(v, 2) if v.size == 1 else v for v in arrays),
      lambda *parts, axis: np.mean([p.mean(axis=axis) for p in parts], axis=0),
      vectorized=True,
      # Resamples that are in memory at once.
      batch=max(1, 10_000_000 // sum(v.size for v in arrays)),
      n_resamples=_RESAMPLES,
      confidence_level=confidence,
      method="percentile",
      rng=np.random.default_rng(0),
  ).confidence_interval
  return Interval(mean, float(found.low), float(found.high))


def _finite(values):
  """The values as float64 `[n]`, n at least 1."""
  array = np.asarray(values, np.float64)
  if array.ndim != 1 or not array.size or not np.isfinite(array).all():
    raise ValueError(
        f"values={values!r} must be a list of at least one finite number"
    )
  return array
