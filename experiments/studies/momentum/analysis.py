"""Tables and figure of LoGRA's settings, from saved rows.

The factorial is the part `small`: every combination of rank, basis and
preconditioner.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import pathlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from experiments.reporting import figures, tables
from experiments.studies import curves
from experiments.studies.momentum import sweep
from experiments.studies.sweeps import RunRow

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

Statistic = Callable[[RunRow], float]

# What runs are compared by; the second is less noisy.
STATISTICS: dict[str, Statistic] = {
    "held-out accuracy": curves.accuracy,
    "mean reward": curves.mean_reward,
}
_ADVISED = "rank 16, fixed, momentum, row_adam"
_NOTES = """\
Mean over seeds [95 % bootstrap interval over seeds]. Held-out accuracy: greedy,
after the last update. Mean reward: training reward of all updates, the area
under the curve. A difference pairs runs by seed and by the factors that it does
not name, and averages the pairs of a seed before the interval is taken over
seeds. The best LoGRA cell is the one with the highest mean of that column: its
difference is chosen to be large.
"""


class Factors(NamedTuple):
  """The levels of a LoGRA cell.

  Attributes:
    rank: Rank of the sketches.
    basis: A name in `sweep.BASES`.
    preconditioner: One of `sweep.PRECONDITIONERS`.
  """

  rank: int
  basis: str
  preconditioner: str


class Effect(NamedTuple):
  """A comparison of two levels of one factor.

  Attributes:
    factor: A field of `Factors`.
    before: The level that is compared with.
    after: The level whose effect is shown.
    basis: Only runs with this basis are compared; `""` means any.
  """

  factor: str
  before: Any
  after: Any
  basis: str = ""

  def __str__(self) -> str:
    name = "" if self.factor == "preconditioner" else f"{self.factor} "
    where = f" ({self.basis})" if self.basis else ""
    return f"{name}{self.after} - {name}{self.before}{where}"


EFFECTS = (
    Effect("basis", "fixed", "fixed, momentum"),
    Effect("basis", "refreshed", "fixed"),
    Effect("basis", "refreshed", "fixed, momentum"),
    *(
        Effect("rank", 16, rank, basis)
        for rank in (4, 64, 256)
        for basis in ("", *sweep.BASES)
    ),
    *(
        Effect("preconditioner", "row_adam", name)
        for name in sweep.PRECONDITIONERS
        if name != "row_adam"
    ),
)


def factors_of(overrides: Mapping[str, Any]) -> Factors | None:
  """Returns the levels of a cell with these overrides; None if it is dense."""
  if "optimizer.preconditioner" not in overrides:
    return None
  bases = (
      name
      for name, values in sweep.BASES.items()
      if values.items() <= overrides.items()
  )
  return Factors(
      overrides["optimizer.rank"],
      next(bases),
      overrides["optimizer.preconditioner"],
  )


def effect_by_seed(
    rows: Iterable[RunRow], effect: Effect, statistic: Statistic
) -> list[float]:
  """Returns paired differences `after - before`, one per seed.

  Args:
    rows: Rows of the factorial.
    effect: The levels that are compared.
    statistic: What is compared.
  """
  after, before = [], []
  for row in rows:
    levels = factors_of(row["overrides"])
    if levels is None or effect.basis not in ("", levels.basis):
      continue
    level = levels._asdict()[effect.factor]
    if level == effect.after:
      after.append(row)
    elif level == effect.before:
      before.append(row)

  def others(row):
    levels = factors_of(row["overrides"])
    assert levels is not None
    return tuple(x for x in levels._asdict().items() if x[0] != effect.factor)

  return curves.paired(after, before, statistic, others)


def best_cell(
    cells: dict[str, list[RunRow]], statistic: Statistic
) -> str | None:
  """Returns the LoGRA cell with the highest mean over seeds, if there is any.

  Cells with fewer seeds than others are not considered.
  """
  logra = {
      name: x for name, x in cells.items() if factors_of(x[0]["overrides"])
  }
  most = max((len(x) for x in logra.values()), default=0)
  means = {
      name: float(np.mean([statistic(row) for row in x]))
      for name, x in logra.items()
      if len(x) == most
  }
  return max(means, key=lambda name: means[name], default=None)


def table(rows: Sequence[RunRow]) -> str:
  """Tabulates the factorial, effects and controls, then the other parts.

  Args:
    rows: Rows of the sweep, not necessarily all.

  Returns:
    Markdown tables with notes.
  """
  parts = curves.rows_by_cell(rows, sweep.FULL)
  out = ""
  for part, cells in parts.items():
    if part == "small":
      out += _factorial(cells) + _effects(cells) + _against_controls(cells)
    elif part == "budgets":
      out += _budgets(by_budget(rows))
    else:
      out += f"### {part}\n\n{_cells(cells)}\n"
  return out + _NOTES


def by_budget(rows: Sequence[RunRow]) -> dict[float, dict[str, list[RunRow]]]:
  """Groups the rows of cells that were run with several budgets.

  Returns:
    A dict of budget to basis to rows, by ascending budget, including the budget
    of the part `small`.
  """
  wanted = {factors_of(cell.overrides) for cell in sweep.BUDGETS}
  budgets: dict[float, dict[str, list[RunRow]]] = {}
  for row in rows:
    levels = factors_of(row["overrides"])
    if levels is None or row["part"] not in ("small", "budgets"):
      continue
    if levels in wanted:
      budget = float(curves.curve(row, "kl/budget")[0])
      budgets.setdefault(budget, {}).setdefault(levels.basis, []).append(row)
  return dict(sorted(budgets.items()))


def _budgets(budgets: dict[float, dict[str, list[RunRow]]]) -> str:
  """Tabulates both bases by budget, and what momentum adds."""
  before, after = "refreshed", "fixed, momentum"
  lines = []
  for budget, bases in budgets.items():
    old, new = bases.get(before, []), bases.get(after, [])
    line: list[Any] = [f"{budget:g}", f"{len(old)}, {len(new)}"]
    for statistic in STATISTICS.values():
      line.append(curves.over_seeds(old, statistic))
      line.append(curves.over_seeds(new, statistic))
      line.append(tables.signed(curves.paired(new, old, statistic)))
    lines.append(line)
  head = ["KL budget", "seeds"]
  for title in STATISTICS:
    head += [f"{title}: {before}", after, "difference"]
  return (
      "### small: rank 16, row_adam, by KL budget\n\n"
      f"{tables.markdown(head, lines)}\n"
  )


def _factorial(cells: dict[str, list[RunRow]]) -> str:
  """Tabulates the factorial by statistic, and the controls."""
  out = ""
  most = max(len(rows) for rows in cells.values())
  for title, statistic in STATISTICS.items():
    lines = []
    for rank in sweep.RANKS:
      for basis in sweep.BASES:
        of_line = [cells.get(name, []) for name in _cell_names(rank, basis)]
        if any(of_line):
          entries = [_entry(rows, statistic, most) for rows in of_line]
          lines.append([f"rank {rank}, {basis}", *entries])
    head = ["", *sweep.PRECONDITIONERS]
    out += f"### small: {title}\n\n{tables.markdown(head, lines)}\n"
  dense = {
      cell.name: cells[cell.name]
      for cell in sweep.CONTROLS
      if cell.name in cells
  }
  out += f"n = {most} seeds where not said otherwise.\n\n"
  return f"{out}### small: controls\n\n{_cells(dense)}\n"


def _entry(rows: Sequence[RunRow], statistic: Statistic, most: int) -> str:
  """Formats mean and interval, and the number of seeds if below `most`."""
  few = f", n = {len(rows)}" if 0 < len(rows) < most else ""
  return tables.text(curves.over_seeds(rows, statistic)) + few


def _cell_names(rank: int, basis: str) -> list[str]:
  """Returns the cells of a rank and a basis, one per preconditioner.

  The name is empty if there is no such cell.
  """
  names = dict.fromkeys(sweep.PRECONDITIONERS, "")
  for cell in sweep.FACTORIAL:
    levels = factors_of(cell.overrides)
    if levels is not None and levels[:2] == (rank, basis):
      names[levels.preconditioner] = cell.name
  return list(names.values())


def _cells(cells: dict[str, list[RunRow]]) -> str:
  """Tabulates cells."""
  head = ["cell", "seeds", *STATISTICS, "tail reward"]
  statistics = [*STATISTICS.values(), curves.tail_reward]
  return tables.markdown(
      head,
      (
          [cell, len(rows), *(curves.over_seeds(rows, x) for x in statistics)]
          for cell, rows in cells.items()
      ),
  )


def _effects(cells: dict[str, list[RunRow]]) -> str:
  """Tabulates the effects of the factors."""
  rows = [row for x in cells.values() for row in x]
  lines = []
  for effect in EFFECTS:
    differences = [
        effect_by_seed(rows, effect, statistic)
        for statistic in STATISTICS.values()
    ]
    seeds = len(differences[0])
    lines.append([str(effect), seeds, *map(tables.signed, differences)])
  head = ["difference", "seeds", *STATISTICS]
  return f"### small: effects\n\n{tables.markdown(head, lines)}\n"


def _against_controls(cells: dict[str, list[RunRow]]) -> str:
  """Tabulates the best and the advised LoGRA cell minus each dense control."""
  best = {name: best_cell(cells, x) for name, x in STATISTICS.items()}
  lines = []
  for control in sweep.CONTROLS:
    for label in ("best LoGRA cell", _ADVISED):
      differences = [
          curves.paired(
              cells.get((best[name] or "") if "best" in label else label, []),
              cells.get(control.name, []),
              statistic,
          )
          for name, statistic in STATISTICS.items()
      ]
      name = f"{label} - {control.name}"
      seeds = len(differences[0])
      lines.append([name, seeds, *map(tables.signed, differences)])
  chosen = "; ".join(f"by {name} {cell}" for name, cell in best.items())
  head = ["difference", "seeds", *STATISTICS]
  return (
      f"### small: LoGRA against dense\n\n{tables.markdown(head, lines)}\n"
      f"Best LoGRA cell: {chosen}.\n\n"
  )


def figure_of(rows: Sequence[RunRow]) -> "Figure":
  """Draws the factorial as heat maps, and curves of some cells."""
  parts = curves.rows_by_cell(rows, sweep.FULL)
  figure = figures.make_figure(15, 10)
  panels = figure.subplot_mosaic("AAABBB;CCDDEE", height_ratios=(3, 2))
  for panel, (title, statistic) in zip("AB", STATISTICS.items(), strict=True):
    _draw_heat(panels[panel], parts.get("small", {}), title, statistic)
  logra, dense = sweep.TELLING[:-1], sweep.CONTROLS
  names = [cell.name for cell in logra + dense]
  for panel, part in zip("CE", ("small", "smollm2"), strict=True):
    cells = parts.get(part, {})
    _draw_curves(
        panels[panel],
        f"{part}: telling cells",
        {name: cells[name] for name in names if name in cells},
    )
  for i, (budget, bases) in enumerate(by_budget(rows).items()):
    of_budget = {
        f"{basis}, {budget:g}": bases[basis]
        for basis in ("refreshed", "fixed, momentum")
        if basis in bases
    }
    title = "small: rank 16, by KL budget"
    _draw_curves(panels["D"], title, of_budget, color=f"C{i}")
  return figure


def _draw_curves(
    axes: "Axes", title: str, cells: dict[str, list[RunRow]], **style: Any
) -> None:
  """Draws reward by update; dense or refreshed cells have dashed lines."""
  for name, rows in cells.items():
    rewards = [curves.curve(row, curves.REWARD) for row in rows]
    line = "--" if name.startswith(("dense", "refreshed")) else "-"
    figures.plot_spread(axes, rewards, name, width=5, ls=line, **style)
  figures.finish(axes, title, "update", "reward, 5-update means")


def _draw_heat(
    axes: "Axes",
    cells: dict[str, list[RunRow]],
    title: str,
    statistic: Statistic,
) -> None:
  """Draws means over seeds as a heat map with numbers."""
  levels = [(rank, basis) for basis in sweep.BASES for rank in sweep.RANKS]
  means = np.full((len(levels), len(sweep.PRECONDITIONERS)), np.nan)
  for i, (rank, basis) in enumerate(levels):
    for j, name in enumerate(_cell_names(rank, basis)):
      if name in cells:
        means[i, j] = np.mean([statistic(row) for row in cells[name]])
        axes.text(j, i, f"{means[i, j]:.3f}", ha="center", va="center")
  if np.isfinite(means).any():
    axes.imshow(means, aspect="auto", cmap="summer")
  axes.set_xticks(range(len(sweep.PRECONDITIONERS)), sweep.PRECONDITIONERS)
  labels = [f"rank {rank}, {basis}" for rank, basis in levels]
  axes.set_yticks(range(len(levels)), labels)
  axes.set_title(f"small: {title}, mean over seeds")


def draw(rows: Sequence[RunRow], out: pathlib.Path) -> None:
  """Writes `table.md` and `momentum.png` into `out`."""
  figures.save(out, "momentum", table(rows), figure_of(rows))
