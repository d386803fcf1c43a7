"""Tables and pictures of gains per unit of KL, from saved rows."""

import collections
from collections.abc import Sequence
import pathlib
from typing import Any

import numpy as np

from experiments.reporting import figures, intervals
from experiments.reporting.intervals import Interval
from experiments.studies import curves
from experiments.studies.gain_per_kl import sweep
from experiments.studies.sweeps import Row

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


def values(rows: Sequence[Row], point: int, name: str, key: str) -> np.ndarray:
  """A number of a direction at a point, float64 `[batches]`."""
  here = [r for r in rows if (r["point"], r["direction"]) == (point, name)]
  here.sort(key=lambda row: row["batch"])
  return np.asarray([row[key] for row in here], np.float64)


def points(rows: Sequence[Row]) -> list[int]:
  """The points of the rows, ascending."""
  return sorted({row["point"] for row in rows})


def names(rows: Sequence[Row]) -> list[str]:
  """The directions, in the order of the sweep."""
  order = [d.name for group in sweep.GROUPS for d in group]
  return [x for x in order if any(row["direction"] == x for row in rows)]


def pseudo_values(
    held_out: np.ndarray, baseline: np.ndarray | None = None
) -> np.ndarray:
  """Jackknife pseudo-values of the mean gain, or of its ratio to a baseline.

  The gain is a mean over pairs of batches: one makes the direction, another
  is of those that judge it. Leaving out batch b takes its n - 1 pairs of the
  first sort out and its n - 1 of the second. These are counted as the others:
  exact where the pairs are symmetric, as for the dense gradient.

  Args:
    held_out: `[n]`, by the batch that makes the direction, n at least 3.
    baseline: the same for another direction.

  Returns:
    `[n]`; their mean is the estimate less its bias, and their spread that of
    an average of independent values.
  """
  estimate = np.mean(held_out)
  without = _without_each(held_out)
  if baseline is not None:
    estimate /= np.mean(baseline)
    without = without / _without_each(baseline)
  n = len(held_out)
  return n * estimate - (n - 1) * without


def _without_each(held_out: np.ndarray) -> np.ndarray:
  """The mean over pairs of batches without batch b, for each b."""
  n = len(held_out)
  return (n * np.mean(held_out) - 2 * held_out) / (n - 2)


def gain(rows: Sequence[Row], name: str, point: int) -> Interval:
  """Held-out gain of a direction at a point."""
  return intervals.interval(
      pseudo_values(values(rows, point, name, "held_out"))
  )


def ratio(rows: Sequence[Row], name: str, at: Sequence[int]) -> Interval:
  """Held-out gain relative to the dense gradient's, averaged over points."""
  found = [
      pseudo_values(
          values(rows, point, name, "held_out"),
          values(rows, point, BASELINE, "held_out"),
      )
      for point in at
  ]
  # Batches of different points are independent: any pairing will do.
  return intervals.interval(np.mean(found, axis=0))


def complete(rows: Sequence[Row]) -> list[Row]:
  """Without the directions and points that have not all their batches yet."""
  count = collections.Counter((r["point"], r["direction"]) for r in rows)
  n = max(count.values())
  at = [p for p in points(rows) if count[p, BASELINE] == n]
  kept = [x for x in names(rows) if all(count[p, x] == n for p in at)]
  return [r for r in rows if r["point"] in at and r["direction"] in kept]


def table(rows: Sequence[Row]) -> str:
  """Gains by direction and point, and ratios to the dense gradient's."""
  rows = complete(rows)
  at = points(rows)
  lines = [
      f"{len(values(rows, at[0], BASELINE, 'own'))} batches at each point.",
      "",
      "| direction | "
      + " | ".join(f"held-out, {p} updates" for p in at)
      + " | ratio to dense | own batch | cosine |",
      "|---" * (len(at) + 4) + "|",
  ]
  for name in names(rows):
    own, cosine = (
        np.mean([np.mean(values(rows, p, name, key)) for p in at])
        for key in ("own", "cosine")
    )
    gains = [str(gain(rows, name, p)) for p in at]
    cells = [name, *gains, str(ratio(rows, name, at))]
    lines.append(f"| {' | '.join(cells)} | {own:.3g} | {cosine:.2g} |")
  by_point = [
      "| direction | " + " | ".join(f"{p} updates" for p in at) + " |",
      "|---" * (len(at) + 1) + "|",
      *(
          f"| {name} | "
          + " | ".join(str(ratio(rows, name, [p])) for p in at)
          + " |"
          for name in names(rows)
          if name != BASELINE
      ),
  ]
  return "\n".join(
      [
          *lines,
          "",
          "Ratio to the dense gradient at each point:",
          "",
          *by_point,
          "",
          _NOTES,
      ]
  )


def figure_of(rows: Sequence[Row]) -> Any:
  """Held-out gains at each point, and ratios to the dense gradient's."""
  rows = complete(rows)
  at, found = points(rows), names(rows)
  figure = figures.make_figure(11, 5)
  left, right = figure.subplots(1, 2, sharey=True)
  y = np.arange(len(found), dtype=float)
  for i, point in enumerate(at):
    _draw(
        left,
        [gain(rows, name, point) for name in found],
        y + 0.2 * (i - (len(at) - 1) / 2),
        f"{point} updates",
    )
  _draw(right, [ratio(rows, name, at) for name in found], y, "")
  right.axvline(1.0, color="black", linewidth=0.8)
  left.axvline(0.0, color="black", linewidth=0.8)
  left.set(title="held-out gain per √(2 KL)", xlabel="gain per √nat")
  right.set(
      title="relative to the dense gradient", xlabel="ratio, mean of points"
  )
  left.set_yticks(y, found)
  left.invert_yaxis()
  for axes in (left, right):
    axes.grid(alpha=0.3)
  # Within the axes it would hide intervals.
  left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=len(at))
  return figure


def _draw(
    axes: Any, found: Sequence[Interval], y: np.ndarray, label: str
) -> None:
  """Means with their intervals, one below the other."""
  means = np.asarray([x.mean for x in found])
  spread = [[x.mean - x.low for x in found], [x.high - x.mean for x in found]]
  axes.errorbar(
      means,
      y,
      xerr=np.abs(spread),
      fmt="o",
      markersize=4,
      capsize=2,
      label=label,
  )


def draw(rows: Sequence[Row], out: pathlib.Path) -> None:
  """Writes `table.md` and `gain_per_kl.png` into `out`."""
  curves.save(out, "gain_per_kl", table(rows), figure_of(rows))
