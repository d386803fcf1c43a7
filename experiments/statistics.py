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
  values = np.asarray(values, np.float64)
  if values.ndim != 1 or not values.size or not np.isfinite(values).all():
    raise ValueError(
        f"values={values!r} must be a list of at least one finite number"
    )
  mean = float(values.mean())
  if values.size == 1 or np.ptp(values) == 0:
    return Interval(mean, mean, mean)
  found = stats.bootstrap(
      (values,),
      np.mean,
      n_resamples=_RESAMPLES,
      confidence_level=confidence,
      method="percentile",
      rng=np.random.default_rng(0),
  ).confidence_interval
  return Interval(mean, float(found.low), float(found.high))
