"""Tables and figure of the KL budgets, from saved rows."""

from collections.abc import Mapping, Sequence
import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.reporting import figures, tables
from experiments.studies import curves
from experiments.studies.kl_budget import sweep
from experiments.studies.sweeps import RunRow

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

_HEAD = (
    "budget, nats per token",
    "seeds",
    "tail reward",
    "held-out accuracy",
    "worst drop",
    "largest KL",
    "skipped steps",
    "realised / predicted KL",
)
_NOTES = """\
Mean over seeds [95 % bootstrap interval over seeds]. Tail reward: mean training
reward of the last third of the updates. Worst drop: of the 5-update running
mean of the training reward from its earlier maximum. Largest KL: realised by
one update, over all updates and seeds. Skipped steps: of all seeds. Realised /
predicted KL: median [5 %, 95 %] over all updates of all seeds. Without a budget
no KL is measured (-). Differences are paired by seed.
"""


def kl_pairs(rows: Sequence[RunRow]) -> tuple[np.ndarray, np.ndarray]:
  """Returns predicted and realised KL of the steps that were not skipped.

  Returns:
    Float64 `[steps]` each, empty for runs without a budget.
  """
  pairs = [
      (curves.curve(row, "kl/predicted"), curves.curve(row, "kl/realised"))
      for row in rows
  ]
  predicted = np.concatenate([x for x, y in pairs if x.size == y.size])
  realised = np.concatenate([y for x, y in pairs if x.size == y.size])
  taken = np.isfinite(predicted) & (predicted > 0) & np.isfinite(realised)
  return predicted[taken], realised[taken]


def table(rows: Sequence[RunRow]) -> str:
  """Tabulates cells by part, and differences of the annealed budget.

  Args:
    rows: Rows of the sweep, not necessarily all.

  Returns:
    Markdown tables with notes.
  """
  out = ""
  for part, cells in curves.rows_by_cell(rows, sweep.FULL).items():
    lines = [_line(cell, runs) for cell, runs in cells.items()]
    out += f"### {part}\n\n{tables.markdown(_HEAD, lines)}\n"
    out += f"### {part}: annealed against the others\n\n{_annealed(cells)}\n"
  return out + _NOTES


def _annealed(cells: Mapping[str, Sequence[RunRow]]) -> str:
  """Tabulates differences of the annealed budget from each other one."""
  lines = []
  for name in (name for name in cells if name.startswith("annealed")):
    for other in (other for other in cells if other != name):
      differences = [
          curves.paired(cells[name], cells[other], statistic)
          for statistic in (curves.tail_reward, curves.accuracy)
      ]
      label = f"annealed - {other}"
      seeds = len(differences[0])
      lines.append([label, seeds, *map(tables.signed, differences)])
  head = ["difference", "seeds", "tail reward", "held-out accuracy"]
  return tables.markdown(head, lines)


def _line(cell: str, rows: Sequence[RunRow]) -> list[Any]:
  """Returns the entries of a cell, as `_HEAD` names them."""
  predicted, realised = kl_pairs(rows)
  drop = lambda row: curves.worst_drop(curves.curve(row, curves.REWARD))
  skipped = [curves.skipped(row) for row in rows]
  return [
      cell,
      len(rows),
      curves.over_seeds(rows, curves.tail_reward),
      curves.over_seeds(rows, curves.accuracy),
      curves.over_seeds(rows, drop),
      float(realised.max()) if realised.size else None,
      None if None in skipped else sum(skipped),
      _ratio(realised / predicted) if realised.size else None,
  ]


def _ratio(values: np.ndarray) -> str:
  """Formats the median of ratios with their 5th and 95th percentile."""
  low, median, high = np.percentile(values, [5, 50, 95])
  return f"{median:.2f} [{low:.2f}, {high:.2f}]"


def figure_of(rows: Sequence[RunRow]) -> "Figure":
  """Draws reward by update, and realised by predicted KL, for each part."""
  parts = curves.rows_by_cell(rows, sweep.FULL)
  figure = figures.make_figure(12, 4.5 * len(parts))
  panels = figure.subplots(len(parts), 2, squeeze=False)
  for (part, cells), (left, right) in zip(parts.items(), panels, strict=True):
    for number, (cell, runs) in enumerate(cells.items()):
      color = f"C{number}"
      rewards = [curves.curve(row, curves.REWARD) for row in runs]
      dashes = "--" if curves.skipped(runs[0]) is None else "-"  # No budget.
      figures.plot_spread(left, rewards, cell, width=5, color=color, ls=dashes)
      predicted, realised = kl_pairs(runs)
      if predicted.size:
        right.plot(predicted, realised, ".", color=color, ms=3, label=cell)
    _finish(part, left, right)
  return figure


def _finish(part: str, left: "Axes", right: "Axes") -> None:
  """Labels both axes, and draws the diagonal on the right one."""
  figures.finish(
      left,
      f"{part}: training reward, range over seeds",
      "update",
      "5-update means",
  )
  if right.lines:
    right.set(xscale="log", yscale="log")
    ends = [*right.get_xlim(), *right.get_ylim()]
    ends = [min(ends), max(ends)]
    right.plot(ends, ends, "k-", linewidth=0.8)
  figures.finish(
      right,
      f"{part}: KL of one update, nats per token",
      "predicted",
      "realised",
  )


def draw(rows: Sequence[RunRow], out: pathlib.Path) -> None:
  """Writes `table.md` and `kl_budget.png` into `out`."""
  figures.save(out, "kl_budget", table(rows), figure_of(rows))
