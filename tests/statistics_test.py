"""Bootstrap intervals against what is known of them."""

import numpy as np
import pytest

from experiments import statistics


def test_the_interval_of_many_values_is_that_of_the_normal_law():
  values = np.random.default_rng(0).normal(3.0, 2.0, 400)
  found = statistics.interval(values)
  np.testing.assert_allclose(found.mean, values.mean())
  error = 1.96 * values.std() / np.sqrt(values.size)
  np.testing.assert_allclose(found.high - found.mean, error, rtol=0.05)
  np.testing.assert_allclose(found.mean - found.low, error, rtol=0.05)
  narrow = statistics.interval(values, confidence=0.5)
  assert found.low < narrow.low < narrow.high < found.high
  assert statistics.interval(values) == found


def test_one_value_and_equal_values_have_no_width():
  assert statistics.interval([2.0]) == (2.0, 2.0, 2.0)
  assert statistics.interval([2.0, 2.0]) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [[1.0]]])
def test_bad_values(values):
  with pytest.raises(ValueError, match="at least one finite number"):
    statistics.interval(values)
