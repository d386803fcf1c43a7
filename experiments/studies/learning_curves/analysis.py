"""Tables and figure of the methods' learning curves, from saved rows."""

from collections.abc import Mapping, Sequence
import pathlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from experiments import _optional
from experiments.reporting import figures, tables
from experiments.reporting.units import MIB
from experiments.studies import curves
from experiments.studies.learning_curves import memory, sweep
from experiments.studies.sweeps import RunRow

if TYPE_CHECKING:
  from matplotlib.figure import Figure

# Method to name in `memory.BUDGETS` to sizes in bytes.
Sizes = Mapping[str, Mapping[str, Mapping[str, int]]]

_HEAD = (
    "method",
    "KL budget",
    "seeds",
    "mean reward",
    "tail reward",
    "held-out accuracy",
    "seconds an update",
    "peak, MiB",
)
_NOTES = """\
Mean over seeds [95 % bootstrap interval over seeds]. Mean reward: training
reward of all updates, the area under the curve. Tail reward: of the last third.
Held-out accuracy: greedy, after the last update. Without a budget, the learning
rate is the one of the grid with the highest tail reward; at an edge of the grid
a better one may lie outside. Differences are paired by seed. Seconds: median
over updates and seeds, rollout included, compilation not. Peak: memory of the
compiled update as the compiler states it, weights included.
"""


class MethodRuns(NamedTuple):
  """The runs of a method with and without a budget.

  Attributes:
    budget: Rows with the budget, one per seed.
    rates: Rows without it, by learning rate in ascending order.
  """

  budget: list[RunRow]
  rates: dict[float, list[RunRow]]

  def best_rate(self) -> float | None:
    """Returns the rate with the highest mean tail reward, if there is any."""
    mean = lambda rate: np.mean([*map(curves.tail_reward, self.rates[rate])])
    return max(self.rates, key=mean, default=None)

  def at_best_rate(self) -> list[RunRow]:
    """Returns the rows of the best rate, which are none without rates."""
    rate = self.best_rate()
    return [] if rate is None else self.rates[rate]

  def at_edge(self, rate: float) -> bool:
    """Returns whether a rate is the lowest or the highest that was measured."""
    return rate in (min(self.rates), max(self.rates))


def runs_by_method(rows: Sequence[RunRow]) -> dict[str, MethodRuns]:
  """Groups rows by label of the method, in the order of the sweep."""
  methods: dict[str, MethodRuns] = {}
  for cells in curves.rows_by_cell(rows, sweep.FULL).values():
    for cell, of_cell in cells.items():
      runs = methods.setdefault(cell.rpartition(", ")[0], MethodRuns([], {}))
      rate = of_cell[0]["overrides"].get("optimizer.learning_rate")
      if rate is None:
        runs.budget.extend(of_cell)
      else:
        runs.rates[rate] = of_cell
  return {
      label: MethodRuns(runs.budget, dict(sorted(runs.rates.items())))
      for label, runs in methods.items()
  }


def table(rows: Sequence[RunRow], sizes: Sizes | None = None) -> str:
  """Tabulates methods with and without budget, and rewards by learning rate.

  Args:
    rows: Rows of the sweep, not necessarily all.
    sizes: What `memory.read` returned, for the column of memory.

  Returns:
    Markdown tables with notes.
  """
  methods = runs_by_method(rows)
  with_budget, without = [], []
  for label, runs in methods.items():
    peaks = [_peak(sizes or {}, label, name) for name in memory.BUDGETS]
    if runs.budget:
      with_budget.append(_line(label, "1e-3", runs.budget, peaks[0]))
    rate = runs.best_rate()
    if rate is not None:
      edge = " (edge of the grid)" if runs.at_edge(rate) else ""
      name = f"none, learning rate {rate:g}{edge}"
      without.append(_line(label, name, runs.rates[rate], peaks[1]))
  return (
      f"### KL budget and no budget\n\n"
      f"{tables.markdown(_HEAD, with_budget + without)}\n"
      f"### Against dense AdamW\n\n{_against_dense(methods)}\n"
      f"### Tail reward by learning rate, no budget\n\n{_grid(methods)}\n"
      f"{_NOTES}"
  )


def _line(
    label: str, budget: str, rows: Sequence[RunRow], peak: str | None
) -> list[Any]:
  """Returns the entries of a method, as `_HEAD` names them."""
  return [
      label,
      budget,
      len(rows),
      curves.over_seeds(rows, curves.mean_reward),
      curves.over_seeds(rows, curves.tail_reward),
      curves.over_seeds(rows, curves.accuracy),
      f"{_seconds(rows):.3f}",
      peak,
  ]


def _against_dense(methods: Mapping[str, MethodRuns]) -> str:
  """Tabulates differences from dense AdamW, paired by seed."""
  dense = methods.get("dense_adam", MethodRuns([], {}))
  lines = [
      [f"{label} - dense_adam"]
      + [
          tables.signed(curves.paired(after, before, statistic))
          for after, before in (
              (runs.budget, dense.budget),
              (runs.at_best_rate(), dense.at_best_rate()),
          )
          for statistic in (curves.mean_reward, curves.accuracy)
      ]
      for label, runs in methods.items()
      if label != "dense_adam"
  ]
  head = ["difference"]
  for budget in ("budget", "no budget"):
    head += [f"{budget}: mean reward", f"{budget}: held-out accuracy"]
  return tables.markdown(head, lines)


def _seconds(rows: Sequence[RunRow]) -> float:
  """Returns the median over seeds of the seconds per update."""
  return float(np.median([curves.seconds(row) for row in rows]))


def _peak(sizes: Sizes, label: str, name: str) -> str | None:
  """Formats the peak of a method's program in MiB."""
  if label not in sizes:
    return None
  return f"{sizes[label][name]['peak_bytes'] / MIB:.1f}"


def _grid(methods: Mapping[str, MethodRuns]) -> str:
  """Tabulates tail reward by method and learning rate."""
  rates = sorted({rate for runs in methods.values() for rate in runs.rates})
  lines = [
      [label]
      + [
          curves.over_seeds(runs.rates.get(rate, []), curves.tail_reward)
          for rate in rates
      ]
      for label, runs in methods.items()
      if runs.rates
  ]
  return tables.markdown(["method", *(f"{rate:g}" for rate in rates)], lines)


def figure_of(rows: Sequence[RunRow]) -> "Figure":
  """Draws reward by updates and by seconds, with and without a budget."""
  figure = figures.make_figure(13, 10)
  panels = figure.subplots(2, 2, sharey=True)
  for label, runs in runs_by_method(rows).items():
    rate = runs.best_rate()
    name = label if rate is None else f"{label}, {rate:g}"
    color = _color(label)
    for axes, of_cell, text in zip(
        panels, (runs.budget, runs.at_best_rate()), (label, name), strict=True
    ):
      if of_cell:
        rewards = [curves.curve(row, curves.REWARD) for row in of_cell]
        figures.plot_spread(axes[0], rewards, text, width=5, color=color)
        step = _seconds(of_cell)
        figures.plot_spread(
            axes[1], rewards, text, width=5, step=step, color=color
        )
  titles = ("KL budget", "no budget, best learning rate of the grid")
  for title, axes in zip(titles, panels, strict=True):
    figures.finish(axes[0], title, "update", "mean reward, 5-update means")
    figures.finish(axes[1], title, "seconds", "mean reward, 5-update means")
  return figure


def _color(label: str) -> tuple[float, ...]:
  """Returns the color of a method: a hue per optimizer, light for low ranks."""
  name, _, rank = label.partition(" rank ")
  hues = {"dense_adam": "Greys", "logra": "Oranges"}
  hues |= {"lora": "Blues", "galore": "Greens"}
  shade = 0.9 if not rank else 0.3 + 0.6 * (np.log2(int(rank)) - 2) / 6
  colormaps = _optional.require("matplotlib", "train").colormaps
  return colormaps[hues[name]](shade)


def draw(rows: Sequence[RunRow], out: pathlib.Path) -> None:
  """Writes `table.md` and `learning_curves.png` into `out`."""
  text = table(rows, memory.read(out))
  figures.save(out, "learning_curves", text, figure_of(rows))
