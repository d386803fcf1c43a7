"""Tests of Markdown tables and of their entries."""

from experiments.reporting import tables
from experiments.reporting.intervals import Interval


def test_entries_of_a_table():
  assert tables.markdown(["a", "b"], [[None, 3], ["x", 0.12345]]) == (
      "| a | b |\n| --- | --- |\n| - | 3 |\n| x | 0.123 |\n"
  )
  assert tables.text(Interval(0.5, 0.25, 0.75)) == "0.5 [0.25, 0.75]"
  assert tables.text(Interval(0.5, 0.5, 0.5)) == "0.5"
  # The interval of two values reaches both.
  assert tables.signed([-0.25, 1.25]) == "+0.500 [-0.250, +1.250]"
  assert tables.signed([0.5]) == "+0.500"
  assert tables.signed([]) == "-"
