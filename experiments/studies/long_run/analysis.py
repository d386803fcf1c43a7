"""Tables and pictures of the long runs, from saved rows.

Spans are shares of the run: a twelfth is 100 of 1,200 updates.
"""

from collections.abc import Sequence
import pathlib
from typing import Any

import numpy as np

from experiments.reporting import figures
from experiments.studies import curves
from experiments.studies.long_run import sweep
from experiments.studies.sweeps import Row

COLLAPSE = 0.9  # Of the earlier maximum; lower is a collapse.
_NOTES = f"""\
Means are of the training reward. Lowest: after the first quarter of the run,
where the budget has fallen, the running mean over a 24th of the run (50 of
1,200 updates) as a share of its highest value up to then; below {COLLAPSE} is
called a collapse. Weight norm: Frobenius norm of all parameters.
"""


def windows(row: Row) -> np.ndarray:
  """Running mean reward over a 24th of the run, float64 `[windows]`."""
  values = curves.curve(row, curves.REWARD)
  return curves.running_mean(values, max(1, values.size // 24))


def lowest_share(row: Row) -> float:
  """The lowest running mean after the first quarter, of its earlier maximum.

  At least 0, at most 1; 0 too where nothing was ever right.
  """
  means = windows(row)
  highest = np.maximum.accumulate(means)
  shares = means / np.where(highest > 0, highest, 1.0)
  return float(shares[means.size // 4 :].min())


def blocks(row: Row) -> np.ndarray:
  """Mean reward of each twelfth of the run, float64 `[12]`.

  A run of fewer updates has one block an update.
  """
  values = curves.curve(row, curves.REWARD)
  parts = np.array_split(values, min(12, values.size))
  return np.array([part.mean() for part in parts])


def verdict(rows: Sequence[Row]) -> str:
  """One line: how many of the runs collapsed."""
  shares = [lowest_share(row) for row in rows]
  collapsed = sum(share < COLLAPSE for share in shares)
  length = min(curves.curve(row, curves.REWARD).size for row in rows)
  skipped = sum(curves.skipped(row) or 0 for row in rows)
  return (
      f"{collapsed} of {len(rows)} runs of at least {length} updates collapsed;"
      f" lowest share of an earlier maximum {min(shares):.3f}; {skipped} steps"
      " skipped.\n"
  )


def table(rows: Sequence[Row]) -> str:
  """Markdown: mean reward by twelfths, one line a run; then the rest."""
  runs = [
      (f"{cell}, seed {row['seed']}", row)
      for cells in curves.by_cell(rows, sweep.FULL).values()
      for cell, of_cell in cells.items()
      for row in of_cell
  ]
  length = max(curves.curve(row, curves.REWARD).size for row in rows)
  n = min(12, length)
  ends = [f"to {round(length * (i + 1) / n)}" for i in range(n)]
  reward = curves.markdown(
      ["run", *ends],
      [[name, *(f"{x:.3f}" for x in blocks(row))] for name, row in runs],
  )
  head = ["run", "updates", "held-out accuracy first, best, last"]
  head += ["lowest", "skipped steps", "weight norm first, last"]
  head += ["realised / budget KL, median", "largest"]
  rest = curves.markdown(head, [[name, *_line(row)] for name, row in runs])
  return (
      f"{verdict(rows)}\n### Mean reward\n\n{reward}\n"
      f"### Runs\n\n{rest}\n{_NOTES}"
  )


def _line(row: Row) -> list[Any]:
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


def figure_of(rows: Sequence[Row]) -> Any:
  """The picture: reward, KL and budget, weight norm, held-out accuracy."""
  figure = figures.make_figure(12, 8)
  reward, kl, norm, accuracy = figure.subplots(2, 2).flat
  number = 0
  for cells in curves.by_cell(rows, sweep.FULL).values():
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
  curves.finish(
      reward, "training reward, running mean", "update", "mean reward"
  )
  curves.finish(kl, "realised KL of one update", "update", "nats per token")
  curves.finish(norm, "norm of all weights", "update", "Frobenius norm")
  curves.finish(accuracy, "held-out accuracy (greedy)", "update", "accuracy")
  return figure


def draw(rows: Sequence[Row], out: pathlib.Path) -> None:
  """Writes `table.md` and `long_run.png` into `out`."""
  curves.save(out, "long_run", table(rows), figure_of(rows))
