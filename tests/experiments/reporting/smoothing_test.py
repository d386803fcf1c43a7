"""Tests of running means."""

import numpy as np

from experiments.reporting import smoothing


def test_a_running_mean_has_one_value_per_full_window():
  values = np.array([1.0, 3.0, 5.0, 1.0])
  means = smoothing.running_mean(values, 2)
  np.testing.assert_allclose(means, [2.0, 4.0, 3.0])
  np.testing.assert_allclose(smoothing.running_mean(values, 1), values)


def test_a_window_wider_than_the_curve_takes_all_of_it():
  values = np.array([1.0, 3.0, 5.0, 1.0])
  np.testing.assert_allclose(smoothing.running_mean(values, 9), [2.5])
