"""Tables and figure of gains per unit of KL, from saved rows.

A point is a number of updates of the run, and a name is one of a direction.
"""

import collections
from collections.abc import Sequence
import pathlib
from typing import TYPE_CHECKING

import numpy as np

from experiments.reporting import figures, intervals, tables
from experiments.reporting.intervals import Interval
from experiments.studies.gain_per_kl import sweep
from experiments.studies.gradient_sweeps import GradientRow

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

BASELINE = "dense"
_NOTES = """\
`⟨G', D⟩ / √(2 KL(D))`: first-order gain of the GRPO objective per √nat.
Held-out: G' is the mean gradient of the point's other batches; own: of the
batch that D was made of. Mean over batches [95 % bootstrap interval]; the
intervals take into account that a batch takes part twice, as the one that makes
D and as one of those that make G' (`pseudo_values`). Ratios pair directions by
batch, and are averaged over the points. Cosine: of D and the gradient that it
was made of.
"""


def values(
    rows: Sequence[GradientRow], point: int, name: str, key: str
) -> np.ndarray:
  """Returns a number of a direction at a point, float64 `[batches]`.

  Args:
    rows: The rows.
    point: The point.
    name: The direction.
    key: The number, such as `held_out`.
  """
  here = [r for r in rows if (r["point"], r["direction"]) == (point, name)]
  here.sort(key=lambda row: row["batch"])
  return np.asarray([row[key] for row in here], np.float64)


def points(rows: Sequence[GradientRow]) -> list[int]:
  """Returns the points of the rows, ascending."""
  return sorted({row["point"] for row in rows})


def names(rows: Sequence[GradientRow]) -> list[str]:
  """Returns the names in the rows, in the order of the sweep."""
  order = [d.name for group in sweep.GROUPS for d in group]
  return [x for x in order if any(row["direction"] == x for row in rows)]


def pseudo_values(
    held_out: np.ndarray, baseline: np.ndarray | None = None
) -> np.ndarray:
  """Computes jackknife pseudo-values of a mean gain or a ratio of mean gains.

  The gain is a mean over pairs of batches: the direction is made from one, and
  the other is among those that judge it. Leaving out batch b removes the n - 1
  pairs in which it makes the direction, and the n - 1 in which it judges. Only
  the sum of the former is known; the latter are given the same sum, which is
  exact if pairs are symmetric, as for the dense gradient.

  Args:
    held_out: `[n]`, gains by the batch that makes the direction, n at least 3.
    baseline: `[n]`, gains of another direction, by which to divide; None for
      the gain itself.

  Returns:
    `[n]`. Their mean is the estimate without its bias, and they vary as
    independent values with this mean do.
  """
  estimate = np.mean(held_out)
  without = _without_each(held_out)
  if baseline is not None:
    estimate /= np.mean(baseline)
    without = without / _without_each(baseline)
  n = len(held_out)
  return n * estimate - (n - 1) * without


def _without_each(held_out: np.ndarray) -> np.ndarray:
  """Returns the mean over pairs of batches without batch b, for each b."""
  n = len(held_out)
  return (n * np.mean(held_out) - 2 * held_out) / (n - 2)


def gain(rows: Sequence[GradientRow], name: str, point: int) -> Interval:
  """Returns the held-out gain of a direction at a point."""
  return intervals.interval(
      pseudo_values(values(rows, point, name, "held_out"))
  )


def ratio(
    rows: Sequence[GradientRow], name: str, at: Sequence[int]
) -> Interval:
  """Returns a held-out gain over the dense gradient's, mean of points `at`."""
  ratios = [
      pseudo_values(
          values(rows, point, name, "held_out"),
          values(rows, point, BASELINE, "held_out"),
      )
      for point in at
  ]
  # Batches of different points are independent, so they can be paired anyhow.
  return intervals.interval(np.mean(ratios, axis=0))


def complete_rows(rows: Sequence[GradientRow]) -> list[GradientRow]:
  """Leaves out directions and points of which some batches are missing."""
  count = collections.Counter((r["point"], r["direction"]) for r in rows)
  n = max(count.values())
  at = [p for p in points(rows) if count[p, BASELINE] == n]
  kept = [x for x in names(rows) if all(count[p, x] == n for p in at)]
  return [r for r in rows if r["point"] in at and r["direction"] in kept]


def table(rows: Sequence[GradientRow]) -> str:
  """Tabulates gains by direction and point, and ratios to the dense gradient.

  Args:
    rows: Rows of the sweep; incomplete directions are left out.

  Returns:
    Two Markdown tables with notes.
  """
  rows = complete_rows(rows)
  at = points(rows)
  gains, ratios = [], []
  for name in names(rows):
    own, cosine = (
        np.mean([np.mean(values(rows, p, name, key)) for p in at])
        for key in ("own", "cosine")
    )
    by_point = [str(gain(rows, name, p)) for p in at]
    overall = str(ratio(rows, name, at))
    gains.append([name, *by_point, overall, f"{own:.3g}", f"{cosine:.2g}"])
    if name != BASELINE:
      ratios.append([name, *(str(ratio(rows, name, [p])) for p in at)])
  head = ["direction", *(f"held-out, {p} updates" for p in at)]
  head += ["ratio to dense", "own batch", "cosine"]
  return "\n".join(
      [
          f"{len(values(rows, at[0], BASELINE, 'own'))} batches at each point.",
          "",
          tables.markdown(head, gains),
          "Ratio to the dense gradient at each point:",
          "",
          tables.markdown(["direction", *(f"{p} updates" for p in at)], ratios),
          _NOTES,
      ]
  )


def figure_of(rows: Sequence[GradientRow]) -> "Figure":
  """Draws held-out gains at each point, and ratios to the dense gradient."""
  rows = complete_rows(rows)
  at, shown = points(rows), names(rows)
  figure = figures.make_figure(11, 5)
  left, right = figure.subplots(1, 2, sharey=True)
  y = np.arange(len(shown), dtype=float)
  for i, point in enumerate(at):
    _draw(
        left,
        [gain(rows, name, point) for name in shown],
        y + 0.2 * (i - (len(at) - 1) / 2),
        f"{point} updates",
    )
  _draw(right, [ratio(rows, name, at) for name in shown], y, "")
  right.axvline(1.0, color="black", linewidth=0.8)
  left.axvline(0.0, color="black", linewidth=0.8)
  left.set(title="held-out gain per √(2 KL)", xlabel="gain per √nat")
  right.set(
      title="relative to the dense gradient", xlabel="ratio, mean of points"
  )
  left.set_yticks(y, shown)
  left.invert_yaxis()
  for axes in (left, right):
    axes.grid(alpha=0.3)
  # Inside the axes, the legend would hide intervals.
  left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=len(at))
  return figure


def _draw(
    axes: "Axes", gains: Sequence[Interval], y: np.ndarray, label: str
) -> None:
  """Draws means with their intervals, one below the other."""
  means = np.asarray([x.mean for x in gains])
  spread = [[x.mean - x.low for x in gains], [x.high - x.mean for x in gains]]
  axes.errorbar(
      means,
      y,
      xerr=np.abs(spread),
      fmt="o",
      markersize=4,
      capsize=2,
      label=label,
  )


def draw(rows: Sequence[GradientRow], out: pathlib.Path) -> None:
  """Writes `table.md` and `gain_per_kl.png` into `out`."""
  figures.save(out, "gain_per_kl", table(rows), figure_of(rows))
