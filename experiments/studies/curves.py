"""What the analyses of sweeps share: rows by cell, numbers of curves, pictures.

A row is a line of `sweeps.run_one`: one run of one cell with one seed. A curve
has a value an update; values that were not finite are NaN.
"""

from collections.abc import Callable, Iterable, Sequence
import os
import pathlib
from typing import Any

import numpy as np

from experiments.reporting import intervals
from experiments.reporting.intervals import Interval
from experiments.studies import sweeps

REWARD = "train/reward"
# Seconds of an update; the reward's computation takes none to speak of.
_SECONDS = ("time/rollout", "time/update")


def by_cell(
    rows: Iterable[sweeps.Row], parts: Sequence[sweeps.Part] = ()
) -> dict[str, dict[str, list[sweeps.Row]]]:
  """Rows by part and cell, each list sorted by seed.

  Args:
    rows: in any order, of as many runs as there are.
    parts: the sweep, for the order of parts and cells; what it does not have
      comes last, in the order of the rows.

  Returns:
    Part to cell to rows; only parts and cells that have rows.
  """
  rows = sorted(rows, key=lambda row: row["seed"])
  order = [(part.name, cell.name) for part in parts for cell in part.cells]
  order += [(row["part"], row["cell"]) for row in rows]
  found: dict[str, dict[str, list[sweeps.Row]]] = {}
  for part, cell in dict.fromkeys(order):
    one = [row for row in rows if (row["part"], row["cell"]) == (part, cell)]
    if one:
      found.setdefault(part, {})[cell] = one
  return found


def curve(row: sweeps.Row, name: str) -> np.ndarray:
  """A metric of one run, float64 `[updates]`; empty where it has none."""
  return np.asarray(row["curves"].get(name, []), np.float64)


def evaluations(row: sweeps.Row, name: str) -> tuple[np.ndarray, np.ndarray]:
  """Updates done and values of `eval/name`, float64 `[evaluations]` each."""
  found = row["evals"]
  return (
      np.asarray(found["update"], np.float64),
      np.asarray(found[f"eval/{name}"], np.float64),
  )


def accuracy(row: sweeps.Row) -> float:
  """Held-out accuracy after the last update."""
  return float(evaluations(row, "accuracy")[1][-1])


def mean_reward(row: sweeps.Row) -> float:
  """Mean training reward of all updates: the area under the curve."""
  return float(curve(row, REWARD).mean())


def tail_reward(row: sweeps.Row) -> float:
  """Mean training reward of the last third of the updates."""
  values = curve(row, REWARD)
  return float(values[-max(1, round(values.size / 3)) :].mean())


def seconds(row: sweeps.Row) -> float:
  """Median seconds of an update, its rollout included, compilation not."""
  return float(np.median(sum(curve(row, name) for name in _SECONDS)))


def skipped(row: sweeps.Row) -> int | None:
  """Updates that were skipped; None where nothing counts them."""
  counts = curve(row, "kl/skipped")
  return int(counts[-1]) if counts.size else None


def running_mean(values: np.ndarray, width: int) -> np.ndarray:
  """Means of `width` values in a row; of all, where there are fewer.

  Args:
    values: `[n]`, at least one.
    width: at least 1.

  Returns:
    `[n - width + 1]`, or `[1]`; the first is of the first `width` values.
  """
  width = min(width, len(values))
  return np.convolve(values, np.full(width, 1 / width), mode="valid")


def worst_drop(values: np.ndarray, width: int = 5) -> float:
  """How far the running mean fell below its earlier maximum, at most."""
  means = running_mean(values, width)
  return float(np.max(np.maximum.accumulate(means) - means))


def first_reaching(
    values: np.ndarray, threshold: float, width: int = 5
) -> int | None:
  """Updates done when the running mean was first at `threshold` or above."""
  means = running_mean(values, width)
  found = np.flatnonzero(means >= threshold)
  return int(found[0]) + min(width, len(values)) if found.size else None


def over_seeds(
    rows: Sequence[sweeps.Row], number: Callable[[sweeps.Row], float | None]
) -> Interval | None:
  """A number of each run: its mean over runs with a bootstrap interval.

  Returns:
    None if no run has the number.
  """
  values = [number(row) for row in rows]
  found = [value for value in values if value is not None]
  return intervals.interval(found) if found else None


def paired(
    after: Iterable[sweeps.Row],
    before: Iterable[sweeps.Row],
    key: Callable[[sweeps.Row], Any],
    number: Callable[[sweeps.Row], float],
) -> list[float]:
  """Differences `after - before` of runs that have the same seed and `key`.

  The differences of one seed are averaged: seeds are what is independent.

  Args:
    after: runs with the change.
    before: runs without.
    key: what else a pair has in common.
    number: of a run.

  Returns:
    One difference a seed, of the seeds that have a pair.
  """
  old = {(row["seed"], key(row)): number(row) for row in before}
  differences: dict[int, list[float]] = {}
  for row in after:
    value = old.get((row["seed"], key(row)))
    if value is not None:
      differences.setdefault(row["seed"], []).append(number(row) - value)
  return [float(np.mean(values)) for values in differences.values()]


def text(value: Interval | float | int | str | None) -> str:
  """An entry of a table: three significant digits, `-` for None.

  An interval of no width, as of a single run, is written as its mean.
  """
  if value is None:
    return "-"
  if isinstance(value, Interval):
    return _interval(value, ".3g")
  return f"{value:.3g}" if isinstance(value, float) else str(value)


def signed(differences: Sequence[float]) -> str:
  """Differences as an entry of a table: `+0.012 [-0.003, +0.030]`, or `-`."""
  if not differences:
    return "-"
  return _interval(intervals.interval(differences), "+.3f")


def _interval(value: Interval, form: str) -> str:
  mean, low, high = (format(x, form) for x in value)
  return mean if low == high else f"{mean} [{low}, {high}]"


def markdown(
    head: Sequence[str],
    lines: Iterable[Sequence[Any]],
) -> str:
  """A Markdown table of `text` entries, with a newline at its end."""
  rows = [list(head), ["---"] * len(head)]
  rows += [[text(entry) for entry in line] for line in lines]
  return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def plot_spread(
    axes: Any,
    curves: Sequence[np.ndarray],
    label: str,
    *,
    width: int = 1,
    step: float = 1.0,
    **style: Any,
) -> None:
  """Draws the mean of several curves as a line and their range as a band.

  Args:
    axes: of matplotlib.
    curves: one a seed; as many values as the shortest has are drawn.
    label: of the line.
    width: running means of that many values, each drawn at its last one.
    step: what the x axis advances by between two values.
    **style: of the line, `color` of the band too.
  """
  length = min(len(values) for values in curves)
  means = np.stack([running_mean(x[:length], width) for x in curves])
  x = step * np.arange(length - means.shape[1] + 1, length + 1)
  (line,) = axes.plot(x, means.mean(0), label=label, **style)
  if len(means) > 1:
    color = line.get_color()
    axes.fill_between(x, means.min(0), means.max(0), color=color, alpha=0.15)


def finish(axes: Any, title: str, xlabel: str, ylabel: str) -> None:
  """Title, names of the axes, grid, and a legend if anything has a label."""
  axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
  axes.grid(alpha=0.3)
  if axes.get_legend_handles_labels()[0]:
    axes.legend(fontsize=7)


def save(
    out: str | os.PathLike[str], name: str, table: str, figure: Any
) -> None:
  """Writes `out/table.md` and `out/name.png`."""
  out = pathlib.Path(out)
  (out / "table.md").write_text(table, encoding="utf-8")
  figure.savefig(out / f"{name}.png", dpi=150)
