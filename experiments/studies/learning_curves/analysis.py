"""Tables and pictures of the methods' learning curves, from saved rows."""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any, NamedTuple

import numpy as np

from experiments import _optional
from experiments.reporting import figures
from experiments.studies import curves
from experiments.studies.learning_curves import memory, sweep
from experiments.studies.sweeps import Row

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


class Runs(NamedTuple):
  """A method's runs with and without a budget.

  Attributes:
    budget: rows with the budget, one a seed.
    rates: rows without one, by learning rate, ascending.
  """

  budget: list[Row]
  rates: dict[float, list[Row]]

  def best_rate(self) -> float | None:
    """The rate with the highest mean tail reward; None without rows."""
    mean = lambda rate: np.mean([*map(curves.tail_reward, self.rates[rate])])
    return max(self.rates, key=mean, default=None)

  def at_best_rate(self) -> list[Row]:
    """The rows of that rate; none without rows."""
    rate = self.best_rate()
    return [] if rate is None else self.rates[rate]

  def at_edge(self, rate: float) -> bool:
    """Whether `rate` is the lowest or the highest that was measured."""
    return rate in (min(self.rates), max(self.rates))


def methods(rows: Sequence[Row]) -> dict[str, Runs]:
  """Runs by method, in the sweep's order."""
  found: dict[str, Runs] = {}
  for cells in curves.by_cell(rows, sweep.FULL).values():
    for cell, of_cell in cells.items():
      runs = found.setdefault(cell.rpartition(", ")[0], Runs([], {}))
      rate = of_cell[0]["overrides"].get("optimizer.learning_rate")
      if rate is None:
        runs.budget.extend(of_cell)
      else:
        runs.rates[rate] = of_cell
  return {
      label: Runs(runs.budget, dict(sorted(runs.rates.items())))
      for label, runs in found.items()
  }


def table(
    rows: Sequence[Row],
    sizes: Mapping[str, Mapping[str, Mapping[str, int]]] | None = None,
) -> str:
  """Markdown: methods with and without budget; tail reward by learning rate.

  Args:
    rows: of the sweep.
    sizes: of `memory.read`.
  """
  found = methods(rows)
  with_budget, without = [], []
  for label, runs in found.items():
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
      f"{curves.markdown(_HEAD, with_budget + without)}\n"
      f"### Against dense AdamW\n\n{_against_dense(found)}\n"
      f"### Tail reward by learning rate, no budget\n\n{_grid(found)}\n{_NOTES}"
  )


def _line(label: str, budget: str, rows: Sequence[Row], peak: Any) -> list[Any]:
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


def _against_dense(found: Mapping[str, Runs]) -> str:
  """Differences from dense AdamW, paired by seed."""
  dense = found.get("dense_adam", Runs([], {}))
  lines = [
      [f"{label} - dense_adam"]
      + [
          curves.signed(curves.paired(after, before, lambda row: None, number))
          for after, before in (
              (runs.budget, dense.budget),
              (runs.at_best_rate(), dense.at_best_rate()),
          )
          for number in (curves.mean_reward, curves.accuracy)
      ]
      for label, runs in found.items()
      if label != "dense_adam"
  ]
  head = ["difference"]
  for budget in ("budget", "no budget"):
    head += [f"{budget}: mean reward", f"{budget}: held-out accuracy"]
  return curves.markdown(head, lines)


def _seconds(rows: Sequence[Row]) -> float:
  return float(np.median([curves.seconds(row) for row in rows]))


def _peak(
    sizes: Mapping[str, Mapping[str, Mapping[str, int]]], label: str, name: str
) -> str | None:
  if label not in sizes:
    return None
  return f"{sizes[label][name]['peak_bytes'] / 2**20:.1f}"


def _grid(found: Mapping[str, Runs]) -> str:
  """Tail reward of each learning rate that was measured."""
  rates = sorted({rate for runs in found.values() for rate in runs.rates})
  lines = [
      [label]
      + [
          curves.over_seeds(runs.rates.get(rate, []), curves.tail_reward)
          for rate in rates
      ]
      for label, runs in found.items()
      if runs.rates
  ]
  return curves.markdown(["method", *(f"{rate:g}" for rate in rates)], lines)


def figure_of(rows: Sequence[Row]) -> Any:
  """The picture: reward by updates and by seconds, with and without budget."""
  figure = figures.make_figure(13, 10)
  panels = figure.subplots(2, 2, sharey=True)
  found = methods(rows)
  for label, runs in found.items():
    rate = runs.best_rate()
    name = label if rate is None else f"{label}, {rate:g}"
    style = {"color": _color(label), "width": 5}
    for axes, of_cell, text in zip(
        panels, (runs.budget, runs.at_best_rate()), (label, name), strict=True
    ):
      if of_cell:
        values = [curves.curve(row, curves.REWARD) for row in of_cell]
        curves.plot_spread(axes[0], values, text, **style)
        step = _seconds(of_cell)
        curves.plot_spread(axes[1], values, text, step=step, **style)
  titles = ("KL budget", "no budget, best learning rate of the grid")
  for title, axes in zip(titles, panels, strict=True):
    curves.finish(axes[0], title, "update", "mean reward, 5-update means")
    curves.finish(axes[1], title, "seconds", "mean reward, 5-update means")
  return figure


def _color(label: str) -> Any:
  """A hue a method, lighter for lower ranks."""
  name, _, rank = label.partition(" rank ")
  hues = {"dense_adam": "Greys", "logra": "Oranges"}
  hues |= {"lora": "Blues", "galore": "Greens"}
  shade = 0.9 if not rank else 0.3 + 0.6 * (np.log2(int(rank)) - 2) / 6
  colormaps = _optional.require("matplotlib", "train").colormaps
  return colormaps[hues[name]](shade)


def draw(rows: Sequence[Row], out: pathlib.Path) -> None:
  """Writes `table.md` and `learning_curves.png` into `out`."""
  text = table(rows, memory.read(out))
  curves.save(out, "learning_curves", text, figure_of(rows))
