"""Matplotlib figures that need no display, and the style that they share."""

from collections.abc import Sequence
import os
import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import _optional
from experiments.reporting import smoothing

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure


def make_figure(width: float, height: float) -> "Figure":
  """Makes an empty figure; the size is in inches."""
  # Unlike pyplot, this needs no display and has no global state.
  module = _optional.require("matplotlib.figure", "train")
  return module.Figure(figsize=(width, height), layout="constrained")


def plot_spread(
    axes: "Axes",
    curves: Sequence[np.ndarray],
    label: str,
    *,
    width: int = 1,
    step: float = 1.0,
    **style: Any,
) -> None:
  """Draws the mean of several curves as a line and their range as a band.

  Args:
    axes: Where to draw.
    curves: Arrays `[n]`, one per seed. Longer ones are cut to the shortest.
    label: Label of the line.
    width: Number of values in a running mean, which is drawn at its last value.
    step: Distance of two values on the x axis; the first value is at `step`.
    **style: Passed to `Axes.plot`. The band has the color of the line.
  """
  length = min(len(values) for values in curves)
  means = np.stack([smoothing.running_mean(x[:length], width) for x in curves])
  x = step * np.arange(length - means.shape[1] + 1, length + 1)
  (line,) = axes.plot(x, means.mean(0), label=label, **style)
  if len(means) > 1:
    color = line.get_color()
    axes.fill_between(x, means.min(0), means.max(0), color=color, alpha=0.15)


def finish(axes: "Axes", title: str, xlabel: str, ylabel: str) -> None:
  """Sets title and axis labels, a grid, and a legend if a line has a label."""
  axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
  axes.grid(alpha=0.3)
  if axes.get_legend_handles_labels()[0]:
    axes.legend(fontsize=7)


def save(
    out: str | os.PathLike[str], name: str, table: str, figure: "Figure"
) -> None:
  """Writes `out/table.md` and `out/name.png`."""
  out = pathlib.Path(out)
  (out / "table.md").write_text(table, encoding="utf-8")
  figure.savefig(out / f"{name}.png", dpi=150)
