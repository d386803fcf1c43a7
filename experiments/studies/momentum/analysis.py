"""Tables and pictures of the factorial, from saved rows."""

from collections.abc import Callable, Iterable, Mapping, Sequence
import pathlib
from typing import Any, NamedTuple

import numpy as np

from experiments.reporting import figures
from experiments.studies import curves
from experiments.studies.momentum import sweep
from experiments.studies.sweeps import Row

# What a run is judged by; the second is less noisy.
MEASURES: dict[str, Callable[[Row], float]] = {
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
  """The levels of a LoGRA cell."""

  rank: int
  basis: str
  preconditioner: str


class Effect(NamedTuple):
  """A comparison of two levels of one factor.

  Attributes:
    factor: a field of `Factors`.
    before: level that is compared with.
    after: level that is judged.
    basis: only runs with that basis; `""` means any.
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


def factors(overrides: Mapping[str, Any]) -> Factors | None:
  """The levels of a run, by what it overrides; None for a dense control."""
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


def effect(
    rows: Iterable[Row], of: Effect, number: Callable[[Row], float]
) -> list[float]:
  """Paired differences `of.after - of.before`, one a seed."""
  after, before = [], []
  for row in rows:
    levels = factors(row["overrides"])
    if levels is None or of.basis not in ("", levels.basis):
      continue
    level = levels._asdict()[of.factor]
    if level == of.after:
      after.append(row)
    elif level == of.before:
      before.append(row)

  def others(row):
    levels = factors(row["overrides"])
    assert levels is not None
    return tuple(x for x in levels._asdict().items() if x[0] != of.factor)

  return curves.paired(after, before, others, number)


def best_cell(
    cells: dict[str, list[Row]], number: Callable[[Row], float]
) -> str | None:
  """The LoGRA cell of the highest mean over seeds, of those with all seeds."""
  logra = {name: x for name, x in cells.items() if factors(x[0]["overrides"])}
  most = max((len(x) for x in logra.values()), default=0)
  means = {
      name: float(np.mean([number(row) for row in x]))
      for name, x in logra.items()
      if len(x) == most
  }
  return max(means, key=lambda name: means[name], default=None)


def table(rows: Sequence[Row]) -> str:
  """Markdown: factorial, effects and controls; then the other parts' cells."""
  parts = curves.by_cell(rows, sweep.FULL)
  out = ""
  for part, cells in parts.items():
    if part == "small":
      out += _factorial(cells) + _effects(cells) + _against_controls(cells)
    elif part == "budgets":
      out += _budgets(by_budget(rows))
    else:
      out += f"### {part}\n\n{_cells(cells)}\n"
  return out + _NOTES


def by_budget(rows: Sequence[Row]) -> dict[float, dict[str, list[Row]]]:
  """Rows of the cells that were run with several budgets.

  Returns:
    Budget, ascending, to basis to rows; that of the part `small` is one.
  """
  wanted = {factors(cell.overrides) for cell in sweep.BUDGETS}
  found: dict[float, dict[str, list[Row]]] = {}
  for row in rows:
    levels = factors(row["overrides"])
    if levels is None or row["part"] not in ("small", "budgets"):
      continue
    if levels in wanted:
      budget = float(curves.curve(row, "kl/budget")[0])
      found.setdefault(budget, {}).setdefault(levels.basis, []).append(row)
  return dict(sorted(found.items()))


def _budgets(found: dict[float, dict[str, list[Row]]]) -> str:
  """One line a budget: both bases, and what momentum adds."""
  before, after = "refreshed", "fixed, momentum"
  lines = []
  for budget, bases in found.items():
    old, new = bases.get(before, []), bases.get(after, [])
    line: list[Any] = [f"{budget:g}", f"{len(old)}, {len(new)}"]
    for number in MEASURES.values():
      gain = curves.paired(new, old, lambda row: None, number)
      line += [curves.over_seeds(old, number), curves.over_seeds(new, number)]
      line.append(curves.signed(gain))
    lines.append(line)
  head = ["KL budget", "seeds"]
  for title in MEASURES:
    head += [f"{title}: {before}", after, "difference"]
  return (
      "### small: rank 16, row_adam, by KL budget\n\n"
      f"{curves.markdown(head, lines)}\n"
  )


def _factorial(cells: dict[str, list[Row]]) -> str:
  """One table a measure, and the controls."""
  out = ""
  most = max(len(rows) for rows in cells.values())
  for title, number in MEASURES.items():
    lines = []
    for rank in sweep.RANKS:
      for basis in sweep.BASES:
        of_line = [cells.get(name, []) for name in _names(rank, basis)]
        if any(of_line):
          entries = [_entry(rows, number, most) for rows in of_line]
          lines.append([f"rank {rank}, {basis}", *entries])
    head = ["", *sweep.PRECONDITIONERS]
    out += f"### small: {title}\n\n{curves.markdown(head, lines)}\n"
  dense = {
      cell.name: cells[cell.name]
      for cell in sweep.CONTROLS
      if cell.name in cells
  }
  out += f"n = {most} seeds where not said otherwise.\n\n"
  return f"{out}### small: controls\n\n{_cells(dense)}\n"


def _entry(
    rows: Sequence[Row], number: Callable[[Row], float], most: int
) -> str:
  """Mean and interval, and the seeds where there are fewer than `most`."""
  few = f", n = {len(rows)}" if 0 < len(rows) < most else ""
  return curves.text(curves.over_seeds(rows, number)) + few


def _names(rank: int, basis: str) -> list[str]:
  """The cells of a line of the factorial, by preconditioner."""
  names = dict.fromkeys(sweep.PRECONDITIONERS, "")
  for cell in sweep.FACTORIAL:
    levels = factors(cell.overrides)
    if levels is not None and levels[:2] == (rank, basis):
      names[levels.preconditioner] = cell.name
  return list(names.values())


def _cells(cells: dict[str, list[Row]]) -> str:
  """One line a cell."""
  head = ["cell", "seeds", *MEASURES, "tail reward"]
  numbers = [*MEASURES.values(), curves.tail_reward]
  return curves.markdown(
      head,
      (
          [cell, len(x), *(curves.over_seeds(x, number) for number in numbers)]
          for cell, x in cells.items()
      ),
  )


def _effects(cells: dict[str, list[Row]]) -> str:
  rows = [row for x in cells.values() for row in x]
  lines = []
  for one in EFFECTS:
    found = [effect(rows, one, number) for number in MEASURES.values()]
    lines.append([str(one), len(found[0]), *map(curves.signed, found)])
  head = ["difference", "seeds", *MEASURES]
  return f"### small: effects\n\n{curves.markdown(head, lines)}\n"


def _against_controls(cells: dict[str, list[Row]]) -> str:
  """The best and the advised LoGRA cell minus each dense control."""
  best = {name: best_cell(cells, number) for name, number in MEASURES.items()}
  lines = []
  for control in sweep.CONTROLS:
    for label in ("best LoGRA cell", _ADVISED):
      found = [
          curves.paired(
              cells.get((best[name] or "") if "best" in label else label, []),
              cells.get(control.name, []),
              lambda row: None,
              number,
          )
          for name, number in MEASURES.items()
      ]
      name = f"{label} - {control.name}"
      lines.append([name, len(found[0]), *map(curves.signed, found)])
  chosen = "; ".join(f"by {name} {cell}" for name, cell in best.items())
  head = ["difference", "seeds", *MEASURES]
  return (
      f"### small: LoGRA against dense\n\n{curves.markdown(head, lines)}\n"
      f"Best LoGRA cell: {chosen}.\n\n"
  )


def figure_of(rows: Sequence[Row]) -> Any:
  """The picture: the factorial as heat maps, and curves of telling cells."""
  parts = curves.by_cell(rows, sweep.FULL)
  figure = figures.make_figure(15, 10)
  panels = figure.subplot_mosaic("AAABBB;CCDDEE", height_ratios=(3, 2))
  for axes, (title, number) in zip("AB", MEASURES.items(), strict=True):
    _draw_heat(panels[axes], parts.get("small", {}), title, number)
  logra, dense = sweep.TELLING[:-1], sweep.CONTROLS
  names = [cell.name for cell in logra + dense]
  for axes, part in zip("CE", ("small", "smollm2"), strict=True):
    cells = parts.get(part, {})
    _draw_curves(
        panels[axes],
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
    axes: Any, title: str, cells: dict[str, list[Row]], **style: Any
) -> None:
  """Training reward by update; dashed: dense, or of a refreshed basis."""
  for name, rows in cells.items():
    values = [curves.curve(row, curves.REWARD) for row in rows]
    line = "--" if name.startswith(("dense", "refreshed")) else "-"
    curves.plot_spread(axes, values, name, width=5, ls=line, **style)
  curves.finish(axes, title, "update", "reward, 5-update means")


def _draw_heat(
    axes: Any,
    cells: dict[str, list[Row]],
    title: str,
    number: Callable[[Row], float],
) -> None:
  """Means over seeds, written into their fields."""
  levels = [(rank, basis) for basis in sweep.BASES for rank in sweep.RANKS]
  means = np.full((len(levels), len(sweep.PRECONDITIONERS)), np.nan)
  for i, (rank, basis) in enumerate(levels):
    for j, name in enumerate(_names(rank, basis)):
      if name in cells:
        means[i, j] = np.mean([number(row) for row in cells[name]])
        axes.text(j, i, f"{means[i, j]:.3f}", ha="center", va="center")
  if np.isfinite(means).any():
    axes.imshow(means, aspect="auto", cmap="summer")
  axes.set_xticks(range(len(sweep.PRECONDITIONERS)), sweep.PRECONDITIONERS)
  labels = [f"rank {rank}, {basis}" for rank, basis in levels]
  axes.set_yticks(range(len(levels)), labels)
  axes.set_title(f"small: {title}, mean over seeds")


def draw(rows: Sequence[Row], out: pathlib.Path) -> None:
  """Writes `table.md` and `momentum.png` into `out`."""
  curves.save(out, "momentum", table(rows), figure_of(rows))
