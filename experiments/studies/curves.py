"""What the analyses of sweeps share: rows by cell, and statistics of runs.

A row is what `sweeps.measure_run` returns: one run of one cell with one seed. A
curve has one value per update; values that were not finite are NaN. A
statistic is a function of a row, such as `mean_reward`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from experiments.reporting import intervals, smoothing
from experiments.reporting.intervals import Interval
from experiments.studies.sweeps import Part, RunRow

REWARD = "train/reward"
# Computing rewards takes hardly any time, and is left out.
_SECONDS = ("time/rollout", "time/update")


def rows_by_cell(
    rows: Iterable[RunRow], parts: Sequence[Part] = ()
) -> dict[str, dict[str, list[RunRow]]]:
  """Groups rows by part and cell, each group sorted by seed.

  Args:
    rows: Rows of any number of runs, in any order.
    parts: The sweep, which gives the order of parts and cells. Cells that it
      does not have come last, in the order of the rows.

  Returns:
    A dict of part to cell to rows, with only the parts and cells that have
    rows.
  """
  rows = sorted(rows, key=lambda row: row["seed"])
  order = [(part.name, cell.name) for part in parts for cell in part.cells]
  order += [(row["part"], row["cell"]) for row in rows]
  groups: dict[str, dict[str, list[RunRow]]] = {}
  for part, cell in dict.fromkeys(order):
    group = [row for row in rows if (row["part"], row["cell"]) == (part, cell)]
    if group:
      groups.setdefault(part, {})[cell] = group
  return groups


def curve(row: RunRow, name: str) -> np.ndarray:
  """Returns a metric of one run, float64 `[updates]`, or `[0]` without it."""
  return np.asarray(row["curves"].get(name, []), np.float64)


def evaluations(row: RunRow, name: str) -> tuple[np.ndarray, np.ndarray]:
  """Returns the updates done before each evaluation, and `eval/name` there.

  Both are float64 `[evaluations]`.
  """
  columns = row["evals"]
  return (
      np.asarray(columns["update"], np.float64),
      np.asarray(columns[f"eval/{name}"], np.float64),
  )


def accuracy(row: RunRow) -> float:
  """Returns the held-out accuracy after the last update."""
  return float(evaluations(row, "accuracy")[1][-1])


def mean_reward(row: RunRow) -> float:
  """Returns the mean training reward of all updates (area under the curve)."""
  return float(curve(row, REWARD).mean())


def tail_reward(row: RunRow) -> float:
  """Returns the mean training reward of the last third of the updates."""
  values = curve(row, REWARD)
  return float(values[-max(1, round(values.size / 3)) :].mean())


def seconds(row: RunRow) -> float:
  """Returns the median seconds per update, with rollout, without compiling."""
  return float(np.median(sum(curve(row, name) for name in _SECONDS)))


def skipped(row: RunRow) -> int | None:
  """Returns the number of skipped updates; None for a run without a budget."""
  counts = curve(row, "kl/skipped")
  return int(counts[-1]) if counts.size else None


def worst_drop(values: np.ndarray, width: int = 5) -> float:
  """Returns how far the running mean fell below its earlier maximum, at most.

  Args:
    values: `[n]`, at least one value.
    width: Number of values in a running mean.
  """
  means = smoothing.running_mean(values, width)
  return float(np.max(np.maximum.accumulate(means) - means))


def first_reaching(
    values: np.ndarray, threshold: float, width: int = 5
) -> int | None:
  """Returns the updates done when the running mean first reached a threshold.

  Args:
    values: `[n]`, at least one value.
    threshold: What the running mean must not be below.
    width: Number of values in a running mean.

  Returns:
    The number of updates, or None if the threshold was never reached.
  """
  means = smoothing.running_mean(values, width)
  reached = np.flatnonzero(means >= threshold)
  return int(reached[0]) + min(width, len(values)) if reached.size else None


def over_seeds(
    rows: Sequence[RunRow], statistic: Callable[[RunRow], float | None]
) -> Interval | None:
  """Returns the mean of a statistic over runs, with a bootstrap interval.

  Args:
    rows: The runs, one per seed.
    statistic: Returns None for a run to be left out.

  Returns:
    None if no run has the statistic.
  """
  values = [statistic(row) for row in rows]
  numbers = [value for value in values if value is not None]
  return intervals.interval(numbers) if numbers else None


def paired(
    after: Iterable[RunRow],
    before: Iterable[RunRow],
    statistic: Callable[[RunRow], float],
    key: Callable[[RunRow], Any] = lambda row: None,
) -> list[float]:
  """Returns differences `after - before` of runs with the same seed and key.

  The differences of one seed are averaged, because only seeds are independent.

  Args:
    after: Runs with the change.
    before: Runs without it.
    statistic: What is compared.
    key: What the runs of a pair have in common in addition to the seed.

  Returns:
    One difference per seed that has a pair.
  """
  old = {(row["seed"], key(row)): statistic(row) for row in before}
  differences: dict[int, list[float]] = {}
  for row in after:
    value = old.get((row["seed"], key(row)))
    if value is not None:
      differences.setdefault(row["seed"], []).append(statistic(row) - value)
  return [float(np.mean(values)) for values in differences.values()]
