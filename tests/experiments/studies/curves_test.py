"""Tests of groups of rows and statistics of runs, on hand-made rows."""

import numpy as np
import pytest

from experiments.studies import curves, sweeps
from tests.helpers.study_rows import make_row


def test_rows_come_in_the_sweeps_order_and_by_seed():
  cells = (sweeps.Cell("b", {}), sweeps.Cell("a", {}), sweeps.Cell("none", {}))
  part = sweeps.Part("p", dict, cells, (0, 1))
  rows = [
      make_row(cell="x"),
      make_row(cell="a", seed=1),
      make_row(cell="b"),
      make_row(cell="a"),
  ]
  rows.append(make_row(part="q"))
  groups = curves.rows_by_cell(rows, (part,))
  assert {name: list(cells) for name, cells in groups.items()} == {
      "p": ["b", "a", "x"],
      "q": ["c"],
  }
  assert [row["seed"] for row in groups["p"]["a"]] == [0, 1]
  assert curves.rows_by_cell([], (part,)) == {}


def test_numbers_of_a_run():
  run = make_row(reward=[0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 0.5])
  assert curves.mean_reward(run) == pytest.approx(3.5 / 7)
  # A third of seven updates is rounded to two.
  assert curves.tail_reward(run) == pytest.approx(0.75)
  assert curves.tail_reward(make_row(reward=[0.3])) == pytest.approx(0.3)
  assert curves.accuracy(run) == 0.7
  assert curves.seconds(run) == 3.0  # Not 18, as in the first update.
  assert curves.skipped(run) is None
  run["curves"]["kl/skipped"] = [0.0, 1.0, 2.0]
  assert curves.skipped(run) == 2
  run["curves"]["kl/realised"] = [1.0, None]
  np.testing.assert_array_equal(curves.curve(run, "kl/realised"), [1.0, np.nan])
  assert curves.curve(run, "kl/budget").shape == (0,)


def test_drops_and_first_updates_are_those_of_the_running_mean():
  values = np.array([1.0, 3.0, 5.0, 1.0])  # Running means: 2, 4, 3.
  # The running mean drops from 4 to 3; that it begins at 2 is no drop.
  assert curves.worst_drop(values, 2) == pytest.approx(1.0)
  assert curves.worst_drop(np.array([1.0, 2.0, 3.0]), 2) == 0.0
  # The first window that reaches 2 ends with the second update.
  assert curves.first_reaching(values, 2.0, 2) == 2
  assert curves.first_reaching(values, 3.5, 2) == 3
  assert curves.first_reaching(values, 4.5, 2) is None


def test_differences_are_paired_and_averaged_within_a_seed():
  before = [
      make_row(cell=k, seed=s, reward=[0.0]) for s in (0, 1) for k in "ab"
  ]
  after = [
      make_row(cell="a", seed=0, reward=[0.1]),
      make_row(cell="b", seed=0, reward=[0.3]),
      make_row(cell="a", seed=1, reward=[0.6]),
      make_row(cell="z", seed=0, reward=[9.0]),  # Without a partner.
      make_row(cell="a", seed=5, reward=[9.0]),
  ]
  key = lambda row: row["cell"]
  differences = curves.paired(after, before, curves.mean_reward, key)
  assert differences == pytest.approx([(0.1 + 0.3) / 2, 0.6])
  assert curves.paired(after[3:], before, curves.mean_reward, key) == []
  # Without a key, all runs of a seed can be pairs.
  one = curves.paired(after[3:4], before, curves.mean_reward)
  assert one == pytest.approx([9.0])
  assert curves.over_seeds([], curves.mean_reward) is None
  assert curves.over_seeds(before, lambda row: None) is None
