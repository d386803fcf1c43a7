"""Markdown tables, and how numbers are written in them."""

from collections.abc import Iterable, Sequence
from typing import Any

from experiments.reporting import intervals
from experiments.reporting.intervals import Interval


def markdown(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
  """Makes a Markdown table that ends with a newline.

  Args:
    head: Names of the columns.
    lines: Rows of entries, each of which is formatted by `text`.
  """
  rows = [list(head), ["---"] * len(head)]
  rows += [[text(entry) for entry in line] for line in lines]
  return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def text(value: Interval | float | int | str | None) -> str:
  """Formats an entry: floats get three significant digits, None becomes `-`.

  An interval without width, such as that of a single run, is written as its
  mean.
  """
  if value is None:
    return "-"
  if isinstance(value, Interval):
    return _interval(value, ".3g")
  return f"{value:.3g}" if isinstance(value, float) else str(value)


def signed(differences: Sequence[float]) -> str:
  """Formats the mean of differences with its interval and signs.

  Args:
    differences: One per independent unit, such as a seed.

  Returns:
    An entry like `+0.012 [-0.003, +0.030]`, or `-` if there are none.
  """
  if not differences:
    return "-"
  return _interval(intervals.interval(differences), "+.3f")


def _interval(value: Interval, form: str) -> str:
  mean, low, high = (format(x, form) for x in value)
  return mean if low == high else f"{mean} [{low}, {high}]"
