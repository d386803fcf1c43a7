"""Tables and figure of cosines by rank, from saved rows.

What a row calls `one`, `fixed` and `refreshed` is explained in `run.compare`.
"""

from collections.abc import Iterable, Sequence
import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.reporting import figures, tables
from experiments.studies.gradient_sweeps import GradientRow
from experiments.studies.rank_reconstruction import cosines, sweep

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

BASES = ("one", "fixed", "refreshed")
_LABELS = {"plain": "AᵀS", "least_squares": "least squares"}
_NOTES = """\
Mean over layers, modules and points (smallest to largest of them); predicted:
√(r/(r+d_in)) for AᵀS and √(r/d_in) for least squares, which is what AᵀS is for
orthonormal rows. One: a gradient of one batch, with a basis of its own. Fixed,
refreshed: the sum of the window's gradients, with one basis for all of them or
one for each. Differences: the largest in size of any module's mean over layers
at any point. All: the cosine of all kernels' gradients as one vector, mean over
points.
"""


def select(rows: Iterable[GradientRow], **wanted: Any) -> list[GradientRow]:
  """Returns the rows that have these values."""
  return [r for r in rows if all(r[k] == x for k, x in wanted.items())]


def layers(rows: Iterable[GradientRow], basis: str) -> np.ndarray:
  """Returns all cosines of single kernels, float64 `[n]`."""
  values = [
      x for row in rows for batch in row["cosine"].get(basis, []) for x in batch
  ]
  return np.asarray(values, np.float64)


def of_all(rows: Sequence[GradientRow], basis: str) -> str:
  """Formats the cosine of all kernels as one vector, mean over points."""
  rows = [row for row in rows if basis in row["products"]]
  if not rows:
    return "-"
  values: list[float] = []
  for point in sorted({row["point"] for row in rows}):
    products = [r["products"][basis] for r in select(rows, point=point)]
    inner, rebuilt, gradient = np.sum(products, axis=0).T  # By batch.
    values.extend(inner / np.sqrt(rebuilt * gradient))
  return f"{np.mean(values):.3f}"


def gap(rows: Sequence[GradientRow], basis: str, other: str) -> str:
  """Formats the largest difference of two means over the layers of a row."""
  differences = [
      float(layers([row], basis).mean() - layers([row], other).mean())
      for row in rows
      if basis in row["cosine"] and other in row["cosine"]
  ]
  return f"{max(differences, key=abs):+.3f}" if differences else "-"


def prediction(rows: Iterable[GradientRow]) -> float:
  """Returns the predicted cosine, mean over the modules of the rows."""
  return float(np.mean([predicted_of(row) for row in rows]))


def predicted_of(row: GradientRow) -> float:
  """Returns the predicted cosine of a row's kernels."""
  projects = row["distribution"] == "orthonormal"
  method = "least_squares" if projects else row["method"]
  return float(cosines.predicted(row["rank"], row["d_in"], method))


def ranks(rows: Iterable[GradientRow]) -> list[int]:
  """Returns the ranks of the rows, ascending."""
  return sorted({row["rank"] for row in rows})


def settings(rows: Iterable[GradientRow]) -> list[tuple[str, str]]:
  """Returns pairs of distribution and method, in the order of the sweep."""
  there = {(row["distribution"], row["method"]) for row in rows}
  order = [(d, m) for d in sweep.DISTRIBUTIONS for m in cosines.methods(d)]
  return [x for x in order if x in there]


def table(rows: Sequence[GradientRow]) -> str:
  """Tabulates cosines by basis, method and rank, and by module for AᵀS.

  Args:
    rows: Rows of the sweep, not necessarily all.

  Returns:
    Two Markdown tables with notes.
  """
  head = ["basis", "method", "rank", "predicted", *BASES]
  head += ["fixed - one", "refreshed - fixed", *(f"all: {x}" for x in BASES)]
  lines = []
  for distribution, method in settings(rows):
    for rank in ranks(rows):
      some = select(rows, distribution=distribution, method=method, rank=rank)
      cells = [distribution, _LABELS[method], str(rank)]
      cells.append(f"{prediction(some):.3f}")
      cells += [_range(layers(some, x)) for x in BASES]
      cells += [gap(some, "fixed", "one"), gap(some, "refreshed", "fixed")]
      cells += [of_all(some, x) for x in BASES]
      lines.append(cells)
  return f"{tables.markdown(head, lines)}\n{_by_module(rows)}\n{_NOTES}"


def _range(values: np.ndarray) -> str:
  """Formats mean, smallest and largest of any number of values."""
  if not values.size:
    return "-"
  low, high = values.min(), values.max()
  return f"{values.mean():.3f} ({low:.3f} to {high:.3f})"


def _by_module(rows: Sequence[GradientRow]) -> str:
  """Tabulates cosines by module: Rademacher, AᵀS, one batch."""
  rows = select(rows, distribution="rademacher", method="plain")
  lines = []
  for module in dict.fromkeys(row["module"] for row in rows):
    some = select(rows, module=module)
    cells = [module, some[0]["d_in"]]
    for rank in ranks(rows):
      at = select(some, rank=rank)
      cells.append(f"{layers(at, 'one').mean():.3f}, {prediction(at):.3f}")
    lines.append(cells)
  head = ["module", "d_in", *(f"rank {rank}" for rank in ranks(rows))]
  return (
      "Rademacher, AᵀS, one batch, by module: measured, predicted.\n\n"
      f"{tables.markdown(head, lines)}"
  )


def figure_of(rows: Sequence[GradientRow]) -> "Figure":
  """Draws cosine by rank: for each d_in, for each basis, and over a window."""
  figure = figures.make_figure(14, 4.5)
  by_width, by_basis, over_window = figure.subplots(1, 3, sharey=True)
  _draw_widths(by_width, select(rows, distribution="rademacher"))
  for distribution, method in settings(rows):
    some = select(rows, distribution=distribution, method=method)
    _draw_line(by_basis, some, "one", f"{distribution}, {_LABELS[method]}")
  plain = select(rows, distribution="rademacher", method="plain")
  for basis in ("fixed", "refreshed"):
    _draw_line(over_window, plain, basis, basis)
  by_width.set(title="Rademacher, one batch (lines: predicted)")
  by_width.set(ylabel="cosine")
  by_basis.set(title="one batch, mean over kernels")
  over_window.set(title="Rademacher AᵀS, sum over a window")
  for axes in (by_width, by_basis, over_window):
    axes.set_xscale("log", base=2)
    axes.set_xticks(ranks(rows), [str(r) for r in ranks(rows)])
    axes.set(xlabel="rank")
    axes.set_ylim(0.0, 1.0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
  return figure


def _draw_widths(axes: "Axes", rows: Sequence[GradientRow]) -> None:
  """Draws measured points and predicted curves for each method and d_in."""
  x = np.geomspace(min(ranks(rows)), max(ranks(rows)), 100)
  colors = iter(f"C{i}" for i in range(10))
  for method in cosines.METHODS:
    for d_in in sorted({row["d_in"] for row in rows}):
      some = select(rows, method=method, d_in=d_in)
      color = next(colors)
      label = f"{_LABELS[method]}, d_in {d_in}"
      axes.plot(x, cosines.predicted(x, d_in, method), color=color)
      spread = [layers(select(some, rank=r), "one") for r in ranks(some)]
      means = np.asarray([s.mean() for s in spread])
      low = means - [s.min() for s in spread]
      high = [s.max() for s in spread] - means
      axes.errorbar(
          ranks(some),
          means,
          (low, high),
          fmt="o",
          color=color,
          markersize=4,
          capsize=2,
          label=label,
      )


def _draw_line(
    axes: "Axes", rows: Sequence[GradientRow], basis: str, label: str
) -> None:
  """Draws the mean over kernels by rank, and their range as a band."""
  spread = [layers(select(rows, rank=r), basis) for r in ranks(rows)]
  axes.plot(ranks(rows), [x.mean() for x in spread], "o-", label=label)
  axes.fill_between(
      ranks(rows),
      [x.min() for x in spread],
      [x.max() for x in spread],
      alpha=0.15,
  )


def draw(rows: Sequence[GradientRow], out: pathlib.Path) -> None:
  """Writes `table.md` and `rank_reconstruction.png` into `out`."""
  figures.save(out, "rank_reconstruction", table(rows), figure_of(rows))
