"""Tests of bootstrap intervals against those of the normal law."""

import numpy as np
import pytest

from experiments.reporting import intervals


def test_the_interval_of_many_values_is_that_of_the_normal_law():
  values = np.random.default_rng(0).normal(3.0, 2.0, 400)
  spread = intervals.interval(values)
  np.testing.assert_allclose(spread.mean, values.mean())
  error = 1.96 * values.std() / np.sqrt(values.size)
  np.testing.assert_allclose(spread.high - spread.mean, error, rtol=0.05)
  np.testing.assert_allclose(spread.mean - spread.low, error, rtol=0.05)
  narrow = intervals.interval(values, confidence=0.5)
  assert spread.low < narrow.low < narrow.high < spread.high
  assert intervals.interval(values) == spread


def test_one_value_and_equal_values_have_no_width():
  assert intervals.interval([2.0]) == (2.0, 2.0, 2.0)
  assert intervals.interval([2.0, 2.0]) == (2.0, 2.0, 2.0)


@pytest.mark.parametrize("values", [[], [1.0, float("nan")], [[1.0]]])
def test_bad_values(values):
  with pytest.raises(ValueError, match="at least one finite number"):
    intervals.interval(values)


def test_groups_have_the_same_weight_whatever_their_sizes():
  rng = np.random.default_rng(1)
  many, few = rng.normal(0.0, 1.0, 900), rng.normal(4.0, 1.0, 100)
  spread = intervals.macro_interval([many, few])
  np.testing.assert_allclose(spread.mean, (many.mean() + few.mean()) / 2)
  # The variances of both means add, each by half its weight squared.
  error = 1.96 * np.sqrt(many.var() / 900 + few.var() / 100) / 2
  np.testing.assert_allclose(spread.high - spread.mean, error, rtol=0.05)
  assert intervals.macro_interval([few]) == intervals.interval(few)
  single = intervals.macro_interval([[1.0], [2.0, 4.0]])
  assert single == (2.0, 1.5, 2.5)
  with pytest.raises(ValueError, match="at least one list of numbers"):
    intervals.macro_interval([])
