"""Tests of the numbers that analyses take from rows, on hand-made rows."""

import numpy as np
import pytest

from experiments.reporting import figures
from experiments.reporting.intervals import Interval
from experiments.studies import curves, sweeps


def row(part="p", cell="c", seed=0, reward=(0.0, 1.0), **of):
  """A row of two evaluations; `of` is by name without its group."""
  reward = [float(x) for x in reward]
  return {
      "part": part,
      "cell": cell,
      "seed": seed,
      "overrides": of.get("overrides", {}),
      "curves": {
          "train/reward": reward,
          "time/rollout": [9.0] + [1.0] * (len(reward) - 1),
          "time/update": [9.0] + [2.0] * (len(reward) - 1),
      },
      "evals": {
          "update": [0.0, float(len(reward))],
          "eval/accuracy": [0.1, 0.7],
      },
      "seconds": 1.0,
  }


def test_rows_come_in_the_sweeps_order_and_by_seed():
  cells = (sweeps.Cell("b", {}), sweeps.Cell("a", {}), sweeps.Cell("none", {}))
  part = sweeps.Part("p", dict, cells, (0, 1))
  rows = [row(cell="x"), row(cell="a", seed=1), row(cell="b"), row(cell="a")]
  rows.append(row(part="q"))
  found = curves.by_cell(rows, (part,))
  assert {name: list(of) for name, of in found.items()} == {
      "p": ["b", "a", "x"],
      "q": ["c"],
  }
  assert [one["seed"] for one in found["p"]["a"]] == [0, 1]
  assert curves.by_cell([], (part,)) == {}


def test_numbers_of_a_run():
  run = row(reward=[0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 0.5])
  assert curves.mean_reward(run) == pytest.approx(3.5 / 7)
  # A third of seven updates is two.
  assert curves.tail_reward(run) == pytest.approx(0.75)
  assert curves.tail_reward(row(reward=[0.3])) == pytest.approx(0.3)
  assert curves.accuracy(run) == 0.7
  assert curves.seconds(run) == 3.0  # Not the 18 of the first one.
  assert curves.skipped(run) is None
  run["curves"]["kl/skipped"] = [0.0, 1.0, 2.0]
  assert curves.skipped(run) == 2
  run["curves"]["kl/realised"] = [1.0, None]
  np.testing.assert_array_equal(curves.curve(run, "kl/realised"), [1.0, np.nan])
  assert curves.curve(run, "kl/budget").shape == (0,)


def test_running_means():
  values = np.array([1.0, 3.0, 5.0, 1.0])
  np.testing.assert_allclose(curves.running_mean(values, 2), [2.0, 4.0, 3.0])
  np.testing.assert_allclose(curves.running_mean(values, 9), [2.5])
  # From 4 down to 3; the lower first one is no drop.
  assert curves.worst_drop(values, 2) == pytest.approx(1.0)
  assert curves.worst_drop(np.array([1.0, 2.0, 3.0]), 2) == 0.0
  # The first window that reaches 2 ends with the second update.
  assert curves.first_reaching(values, 2.0, 2) == 2
  assert curves.first_reaching(values, 3.5, 2) == 3
  assert curves.first_reaching(values, 4.5, 2) is None


def test_differences_are_paired_and_averaged_within_a_seed():
  before = [row(cell=k, seed=s, reward=[0.0]) for s in (0, 1) for k in "ab"]
  after = [
      row(cell="a", seed=0, reward=[0.1]),
      row(cell="b", seed=0, reward=[0.3]),
      row(cell="a", seed=1, reward=[0.6]),
      row(cell="z", seed=0, reward=[9.0]),  # Without a partner.
      row(cell="a", seed=5, reward=[9.0]),
  ]
  key = lambda one: one["cell"]
  found = curves.paired(after, before, key, curves.mean_reward)
  assert found == pytest.approx([(0.1 + 0.3) / 2, 0.6])
  assert curves.paired(after[3:], before, key, curves.mean_reward) == []
  assert curves.over_seeds([], curves.mean_reward) is None
  assert curves.over_seeds(before, lambda one: None) is None


def test_entries_of_a_table():
  assert curves.markdown(["a", "b"], [[None, 3], ["x", 0.12345]]) == (
      "| a | b |\n| --- | --- |\n| - | 3 |\n| x | 0.123 |\n"
  )
  assert curves.text(Interval(0.5, 0.25, 0.75)) == "0.5 [0.25, 0.75]"
  assert curves.text(Interval(0.5, 0.5, 0.5)) == "0.5"
  # Of two values the interval reaches both.
  assert curves.signed([-0.25, 1.25]) == "+0.500 [-0.250, +1.250]"
  assert curves.signed([0.5]) == "+0.500"
  assert curves.signed([]) == "-"


def test_a_band_spans_the_seeds():
  axes = figures.make_figure(2, 2).subplots()
  runs = [np.array([0.0, 2.0, 4.0]), np.array([2.0, 4.0, 6.0, 8.0])]
  curves.plot_spread(axes, runs, "label", width=2, step=10.0)
  (line,) = axes.lines
  np.testing.assert_allclose(line.get_xdata(), [20.0, 30.0])
  np.testing.assert_allclose(line.get_ydata(), [2.0, 4.0])
  (band,) = axes.collections
  assert band.get_datalim(axes.transData).bounds == (20.0, 1.0, 10.0, 4.0)
