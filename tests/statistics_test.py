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


def test_groups_have_the_same_weight_whatever_their_sizes():
  rng = np.random.default_rng(1)
  many, few = rng.normal(0.0, 1.0, 900), rng.normal(4.0, 1.0, 100)
  found = statistics.macro_interval([many, few])
  np.testing.assert_allclose(found.mean, (many.mean() + few.mean()) / 2)
  # The variances of both means add, each by half its weight squared.
  error = 1.96 * np.sqrt(many.var() / 900 + few.var() / 100) / 2
  np.testing.assert_allclose(found.high - found.mean, error, rtol=0.05)
  assert statistics.macro_interval([few]) == statistics.interval(few)
  single = statistics.macro_interval([[1.0], [2.0, 4.0]])
  assert single == (2.0, 1.5, 2.5)
  with pytest.raises(ValueError, match="at least one list of numbers"):
    statistics.macro_interval([])
