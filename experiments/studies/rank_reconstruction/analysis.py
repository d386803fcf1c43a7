"""Tables and pictures of cosines by rank, from saved rows."""

from collections.abc import Iterable, Sequence
import pathlib
from typing import Any

import numpy as np

from experiments.reporting import figures
from experiments.studies import curves
from experiments.studies.rank_reconstruction import cosines, sweep
from experiments.studies.sweeps import Row

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


def select(rows: Iterable[Row], **wanted: Any) -> list[Row]:
  """The rows that have these values."""
  return [r for r in rows if all(r[k] == x for k, x in wanted.items())]


def layers(rows: Iterable[Row], basis: str) -> np.ndarray:
  """All cosines of single kernels, float64, flat."""
  found = [
      x for row in rows for one in row["cosine"].get(basis, []) for x in one
  ]
  return np.asarray(found, np.float64)


def of_all(rows: Sequence[Row], basis: str) -> str:
  """The cosine of all kernels as one vector, mean over points and batches."""
  rows = [row for row in rows if basis in row["products"]]
  if not rows:
    return "-"
  found = []
  for point in sorted({row["point"] for row in rows}):
    products = [r["products"][basis] for r in select(rows, point=point)]
    inner, rebuilt, gradient = np.sum(products, axis=0).T  # By batch.
    found.extend(inner / np.sqrt(rebuilt * gradient))
  return f"{np.mean(found):.3f}"


def gap(rows: Sequence[Row], basis: str, other: str) -> str:
  """The largest difference of two means over the layers of a row."""
  found = [
      float(layers([row], basis).mean() - layers([row], other).mean())
      for row in rows
      if basis in row["cosine"] and other in row["cosine"]
  ]
  return f"{max(found, key=abs):+.3f}" if found else "-"


def prediction(rows: Iterable[Row]) -> float:
  """The predicted cosine, mean over the rows' modules."""
  return float(np.mean([predicted_of(row) for row in rows]))


def predicted_of(row: Row) -> float:
  """The predicted cosine of a row's kernels."""
  projects = row["distribution"] == "orthonormal"
  method = "least_squares" if projects else row["method"]
  return float(cosines.predicted(row["rank"], row["d_in"], method))


def ranks(rows: Iterable[Row]) -> list[int]:
  """The ranks of the rows, ascending."""
  return sorted({row["rank"] for row in rows})


def settings(rows: Iterable[Row]) -> list[tuple[str, str]]:
  """Distribution and method, in the order of the sweep."""
  there = {(row["distribution"], row["method"]) for row in rows}
  order = [(d, m) for d in sweep.DISTRIBUTIONS for m in cosines.methods(d)]
  return [x for x in order if x in there]


def table(rows: Sequence[Row]) -> str:
  """Cosines by basis, method and rank; and by module for AᵀS."""
  lines = [
      "| basis | method | rank | predicted | one | fixed | refreshed |"
      " fixed - one | refreshed - fixed | all: one | all: fixed |"
      " all: refreshed |",
      "|---" * 12 + "|",
  ]
  for distribution, method in settings(rows):
    for rank in ranks(rows):
      some = select(rows, distribution=distribution, method=method, rank=rank)
      cells = [distribution, _LABELS[method], str(rank)]
      cells.append(f"{prediction(some):.3f}")
      cells += [_range(layers(some, x)) for x in BASES]
      cells += [gap(some, "fixed", "one"), gap(some, "refreshed", "fixed")]
      cells += [of_all(some, x) for x in BASES]
      lines.append(f"| {' | '.join(cells)} |")
  return "\n".join([*lines, "", *_by_module(rows), "", _NOTES])


def _range(values: np.ndarray) -> str:
  if not values.size:
    return "-"
  low, high = values.min(), values.max()
  return f"{values.mean():.3f} ({low:.3f} to {high:.3f})"


def _by_module(rows: Sequence[Row]) -> list[str]:
  """Lines of the table by module: Rademacher, AᵀS, one batch."""
  rows = select(rows, distribution="rademacher", method="plain")
  found = ranks(rows)
  lines = [
      "Rademacher, AᵀS, one batch, by module: measured, predicted.",
      "",
      "| module | d_in | " + " | ".join(f"rank {r}" for r in found) + " |",
      "|---" * (len(found) + 2) + "|",
  ]
  for module in dict.fromkeys(row["module"] for row in rows):
    some = select(rows, module=module)
    cells = [module, str(some[0]["d_in"])]
    for rank in found:
      at = select(some, rank=rank)
      cells.append(f"{layers(at, 'one').mean():.3f}, {prediction(at):.3f}")
    lines.append(f"| {' | '.join(cells)} |")
  return lines


def figure_of(rows: Sequence[Row]) -> Any:
  """Cosine by rank: by module; by basis and method; fixed and refreshed."""
  figure = figures.make_figure(14, 4.5)
  by_width, by_basis, over_window = figure.subplots(1, 3, sharey=True)
  _draw_widths(by_width, select(rows, distribution="rademacher"))
  for distribution, method in settings(rows):
    some = select(rows, distribution=distribution, method=method)
    _line(by_basis, some, "one", f"{distribution}, {_LABELS[method]}")
  plain = select(rows, distribution="rademacher", method="plain")
  for basis in ("fixed", "refreshed"):
    _line(over_window, plain, basis, basis)
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


def _draw_widths(axes: Any, rows: Sequence[Row]) -> None:
  """Measured points, and the predicted curves through them."""
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


def _line(axes: Any, rows: Sequence[Row], basis: str, label: str) -> None:
  """Mean over kernels by rank, with the smallest and largest of them."""
  found = [layers(select(rows, rank=r), basis) for r in ranks(rows)]
  axes.plot(ranks(rows), [x.mean() for x in found], "o-", label=label)
  axes.fill_between(
      ranks(rows),
      [x.min() for x in found],
      [x.max() for x in found],
      alpha=0.15,
  )


def draw(rows: Sequence[Row], out: pathlib.Path) -> None:
  """Writes `table.md` and `rank_reconstruction.png` into `out`."""
  curves.save(out, "rank_reconstruction", table(rows), figure_of(rows))
