"""Tables and figure of the long runs, from saved rows.

Windows and blocks are shares of a run: a twelfth is 100 of 1,200 updates.
"""

from collections.abc import Sequence
import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.reporting import figures, smoothing, tables
from experiments.studies import curves
from experiments.studies.long_run import sweep
from experiments.studies.sweeps import RunRow

if TYPE_CHECKING:
  from matplotlib.figure import Figure

# A run collapses if its reward falls below this share of its earlier maximum.
COLLAPSE = 0.9
_NOTES = f"""\
Means are of the training reward. Lowest: after the first quarter of the run,
where the budget has fallen, the running mean over a 24th of the run (50 of
1,200 updates) as a share of its highest value up to then; below {COLLAPSE} is
called a collapse. Weight norm: Frobenius norm of all parameters.
"""


def windows(row: RunRow) -> np.ndarray:
  """Returns the running mean reward over a 24th of the run, float64 `[n]`."""
  values = curves.curve(row, curves.REWARD)
  return smoothing.running_mean(values, max(1, values.size // 24))


def lowest_share(row: RunRow) -> float:
  """Returns the lowest share of its earlier maximum that reward fell to.

  It is that of running means after the first quarter of the run, from 0 to 1.
  It is 0 if no response was ever right.
  """
  means = windows(row)
  highest = np.maximum.accumulate(means)
  shares = means / np.where(highest > 0, highest, 1.0)
  return float(shares[means.size // 4 :].min())


def blocks(row: RunRow) -> np.ndarray:
  """Returns the mean reward of each twelfth of the run, float64 `[12]`.

  A run of fewer than 12 updates has one block per update.
  """
  values = curves.curve(row, curves.REWARD)
  parts = np.array_split(values, min(12, values.size))
  return np.array([part.mean() for part in parts])


def verdict(rows: Sequence[RunRow]) -> str:
  """Says in one line how many of the runs collapsed."""
  shares = [lowest_share(row) for row in rows]
  collapsed = sum(share < COLLAPSE for share in shares)
  length = min(curves.curve(row, curves.REWARD).size for row in rows)
  skipped = sum(curves.skipped(row) or 0 for row in rows)
  return (
      f"{collapsed} of {len(rows)} runs of at least {length} updates collapsed;"
      f" lowest share of an earlier maximum {min(shares):.3f}; {skipped} steps"
      " skipped.\n"
  )


def table(rows: Sequence[RunRow]) -> str:
  """Tabulates reward by twelfths of a run, and the other numbers of a run.

  Args:
    rows: Rows of the sweep, not necessarily all.

  Returns:
    Markdown: the verdict, two tables with a line per run, and notes.
  """
  runs = [
      (f"{cell}, seed {row['seed']}", row)
      for cells in curves.rows_by_cell(rows, sweep.FULL).values()
      for cell, of_cell in cells.items()
      for row in of_cell
  ]
  length = max(curves.curve(row, curves.REWARD).size for row in rows)
  n = min(12, length)
  ends = [f"to {round(length * (i + 1) / n)}" for i in range(n)]
  reward = tables.markdown(
      ["run", *ends],
      [[name, *(f"{x:.3f}" for x in blocks(row))] for name, row in runs],
  )
  head = ["run", "updates", "held-out accuracy first, best, last"]
  head += ["lowest", "skipped steps", "weight norm first, last"]
  head += ["realised / budget KL, median", "largest"]
  rest = tables.markdown(head, [[name, *_line(row)] for name, row in runs])
  return (
      f"{verdict(rows)}\n### Mean reward\n\n{reward}\n"
      f"### Runs\n\n{rest}\n{_NOTES}"
  )


def _line(row: RunRow) -> list[Any]:
  """Returns the entries of a run in the second table."""
  _, accuracy = curves.evaluations(row, "accuracy")
  _, norm = curves.evaluations(row, "weight_norm")
  share = curves.curve(row, "kl/realised") / curves.curve(row, "kl/budget")
  return [
      curves.curve(row, curves.REWARD).size,
      f"{accuracy[0]:.3f}, {accuracy.max():.3f}, {accuracy[-1]:.3f}",
      f"{lowest_share(row):.3f}",
      curves.skipped(row),
      f"{norm[0]:.4g}, {norm[-1]:.4g}",
      f"{np.nanmedian(share):.2f}",
      f"{np.nanmax(share):.2f}",
  ]


def figure_of(rows: Sequence[RunRow]) -> "Figure":
  """Draws reward, KL and budget, weight norm, and held-out accuracy."""
  figure = figures.make_figure(12, 8)
  reward, kl, norm, accuracy = figure.subplots(2, 2).flat
  number = 0
  for cells in curves.rows_by_cell(rows, sweep.FULL).values():
    for cell, of_cell in cells.items():
      color = f"C{number}"
      number += 1
      for i, row in enumerate(of_cell):
        label = None if i else cell
        style = {"color": color, "label": label, "linewidth": 1}
        means = windows(row)
        size = curves.curve(row, curves.REWARD).size
        reward.plot(np.arange(size - means.size, size) + 1, means, **style)
        norm.plot(*curves.evaluations(row, "weight_norm"), **style)
        accuracy.plot(*curves.evaluations(row, "accuracy"), **style)
        updates = np.arange(size) + 1
        kl.plot(updates, curves.curve(row, "kl/realised"), ".", ms=2, **style)
  kl.plot(updates, curves.curve(row, "kl/budget"), "k--", lw=1, label="budget")
  kl.set_yscale("log")
  figures.finish(
      reward, "training reward, running mean", "update", "mean reward"
  )
  figures.finish(kl, "realised KL of one update", "update", "nats per token")
  figures.finish(norm, "norm of all weights", "update", "Frobenius norm")
  figures.finish(accuracy, "held-out accuracy (greedy)", "update", "accuracy")
  return figure


def draw(rows: Sequence[RunRow], out: pathlib.Path) -> None:
  """Writes `table.md` and `long_run.png` into `out`."""
  figures.save(out, "long_run", table(rows), figure_of(rows))
