"""Matplotlib figures that need no display, and what their axes share."""

import os
import pathlib
from typing import Any

from experiments import _optional


def make_figure(width: float, height: float) -> Any:
  """An empty matplotlib `Figure`; the size is in inches."""
  # A Figure of its own needs no display and leaves pyplot's state alone.
  module = _optional.require("matplotlib.figure", "train")
  return module.Figure(figsize=(width, height), layout="constrained")


def finish(axes: Any, title: str, xlabel: str, ylabel: str) -> None:
  """Sets title and axis labels, a grid, and a legend if a line has a label."""
  axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
  axes.grid(alpha=0.3)
  if axes.get_legend_handles_labels()[0]:
    axes.legend(fontsize=7)


def save(
    out: str | os.PathLike[str], name: str, table: str, figure: Any
) -> None:
  """Writes `out/table.md` and `out/name.png`."""
  out = pathlib.Path(out)
  (out / "table.md").write_text(table, encoding="utf-8")
  figure.savefig(out / f"{name}.png", dpi=150)
