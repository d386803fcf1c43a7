"""Running means of noisy curves."""

import numpy as np


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
  """Computes the mean of every `width` adjacent values.

  Args:
    values: `[n]`, at least one value.
    width: At least 1. If it is above n, the mean of all values is computed.

  Returns:
    `[n - width + 1]`, or `[1]` if `width` is above n. The first entry is the
    mean of the first `width` values.
  """
  width = min(width, len(values))
  return np.convolve(values, np.full(width, 1 / width), mode="valid")
