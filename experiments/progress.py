"""What a run tells a person while it runs."""

from collections.abc import Mapping
import sys
from typing import Any

from experiments import extras


def say(text: str) -> None:
  """Prints at once, also where output is a file."""
  print(text, flush=True)


class Progress:
  """A bar on a terminal; elsewhere one plain line for each update."""

  def __init__(self, total: int, done: int):
    """Starts at `done` of `total` updates."""
    self._total = total
    self._bar: Any = None
    if sys.stderr.isatty():
      tqdm = extras.require("tqdm", "train").tqdm
      self._bar = tqdm(
          total=total,
          initial=done,
          dynamic_ncols=True,
          # The bar takes what the numbers leave of the line.
          bar_format="{n_fmt}/{total_fmt}|{bar}|{remaining} left{postfix}",
      )

  def __enter__(self) -> "Progress":
    return self

  def __exit__(self, *unused: Any) -> None:
    if self._bar is not None:
      self._bar.close()

  def say(self, text: str) -> None:
    """Prints a line without tearing the bar."""
    if self._bar is not None:
      self._bar.write(text)
    else:
      say(text)

  def show(self, update: int, row: Mapping[str, Any], seconds: float) -> None:
    """Shows the metrics of one update, which took so many seconds."""
    reward = _number(row["train/reward"], ".2f")
    predicted = _number(row["kl/predicted"], ".1e")
    realised = _number(row["kl/realised"], ".1e")
    scale = _number(row["kl/step_scale"], ".2f")
    if self._bar is not None:
      # Fits a line of 80 columns.
      self._bar.set_postfix_str(
          f"reward {reward}, KL pred. {predicted}, real. {realised},"
          f" scale {scale}",
          refresh=False,
      )
      self._bar.update()
    else:
      say(
          f"update {update:>{len(str(self._total))}}/{self._total}  reward"
          f" {reward}  KL predicted {predicted} realised {realised}"
          f"  step scale {scale}  {seconds:.1f} s"
      )


def _number(value: float | None, spec: str) -> str:
  """A number, or what stands for one that was not finite."""
  return "nan" if value is None else format(value, spec)
