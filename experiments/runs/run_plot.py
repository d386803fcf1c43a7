"""Draws a run from its metrics file: reward, and KL if it had a budget.

python -m experiments.runs.run_plot WORKDIR
"""

import os
import pathlib
import sys
from typing import Any

from experiments import _optional
from experiments.runs import record


def draw_run(workdir: str | os.PathLike[str]) -> pathlib.Path:
  """Draws `workdir/metrics.jsonl` into `workdir/run.png`.

  Args:
    workdir: directory of a run, finished or not.

  Returns:
    The path of the picture.

  Raises:
    ValueError: the directory holds no metrics of any update.
  """
  path = pathlib.Path(workdir) / record.FILENAME
  rows = record.read_rows(path)
  if not record.column(rows, "train/reward")[0]:
    raise ValueError(
        f"{path} has no updates to draw; pass the --workdir of a run"
    )
  out = path.with_name("run.png")
  figure_of(rows).savefig(out, dpi=150)
  return out


def make_figure(width: float, height: float) -> Any:
  """An empty matplotlib `Figure` of that many inches."""
  # A Figure of its own needs no display and leaves pyplot's state alone.
  module = _optional.require("matplotlib.figure", "train")
  return module.Figure(figsize=(width, height), layout="constrained")


def figure_of(rows: list[dict[str, Any]]) -> Any:
  """The picture of `metrics.read_rows`, as a matplotlib `Figure`."""
  panels = [_draw_reward]
  if record.column(rows, "kl/predicted")[0]:
    panels.append(_draw_kl)
  figure = make_figure(5 * len(panels), 4)
  axes = figure.subplots(1, len(panels), squeeze=False)[0]
  for draw, one in zip(panels, axes, strict=True):
    draw(one, rows)
  return figure


def _draw_reward(axes: Any, rows: list[dict[str, Any]]) -> None:
  """Mean reward of each update's rollouts, and held-out accuracy."""
  axes.plot(*record.column(rows, "train/reward"), label="training (sampled)")
  updates, accuracy = record.column(rows, "eval/accuracy")
  if updates:
    axes.plot(updates, accuracy, "o--", label="held-out (greedy)")
  axes.set(title="reward", xlabel="update", ylabel="mean reward")
  axes.set_ylim(bottom=0.0)
  axes.locator_params(axis="x", integer=True)
  axes.grid(alpha=0.3)
  axes.legend()


def _draw_kl(axes: Any, rows: list[dict[str, Any]]) -> None:
  """KL divergence per token of each update: promised, measured, allowed."""
  styles = {"predicted": "o-", "realised": "x-", "budget": "k--"}
  for name, style in styles.items():
    updates, values = record.column(rows, f"kl/{name}")
    if updates:
      axes.plot(updates, values, style, label=name, markersize=4)
  axes.set(title="KL per update", xlabel="update", ylabel="nats per token")
  axes.set_ylim(bottom=0.0)
  axes.locator_params(axis="x", integer=True)
  axes.grid(alpha=0.3)
  axes.legend()


def main() -> None:
  if len(sys.argv) != 2:
    sys.exit("usage: python -m experiments.runs.run_plot WORKDIR")
  try:
    print(draw_run(sys.argv[1]))
  except ValueError as error:
    sys.exit(str(error))


if __name__ == "__main__":
  main()
