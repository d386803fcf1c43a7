"""Draws a run from its record: reward, and KL if it had a budget.

python -m experiments.runs.run_plot --workdir=DIR
"""

import os
import pathlib
from typing import Any

from absl import flags

from experiments import _cli
from experiments.reporting import figures
from experiments.runs import record


def draw_run(workdir: str | os.PathLike[str]) -> pathlib.Path:
  """Draws `workdir/metrics.jsonl` into `workdir/run.png`.

  Args:
    workdir: Directory of a run, finished or not.

  Returns:
    The path of the picture.

  Raises:
    ValueError: If the directory has no metrics of any update.
  """
  path = pathlib.Path(workdir) / record.FILENAME
  rows = record.read_rows(path)
  if not record.column(rows, "train/reward")[0]:
    raise ValueError(
        f"{path} has no updates to draw; pass the --workdir of a run"
    )
  out = path.with_name("run.png")
  run_figure(rows).savefig(out, dpi=150)
  return out


def run_figure(rows: list[dict[str, Any]]) -> Any:
  """The picture of a record as a matplotlib `Figure`."""
  panels = [_draw_reward]
  if record.column(rows, "kl/predicted")[0]:
    panels.append(_draw_kl)
  figure = figures.make_figure(5 * len(panels), 4)
  axes = figure.subplots(1, len(panels), squeeze=False)[0]
  for draw, one in zip(panels, axes, strict=True):
    draw(one, rows)
  return figure


def _draw_reward(axes: Any, rows: list[dict[str, Any]]) -> None:
  """Draws the mean reward of rollouts, and the held-out accuracy."""
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
  """Draws the KL per token of each update: predicted, realised, allowed."""
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


def main(values: flags.FlagValues) -> None:
  print(draw_run(values.workdir))


if __name__ == "__main__":
  flags.DEFINE_string("workdir", None, "Directory of the run.")
  flags.mark_flag_as_required("workdir")
  _cli.run(main)
