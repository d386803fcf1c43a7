"""What a run tells a person while it runs."""

from collections.abc import Mapping
import sys
from typing import Any

import jax

from experiments import extras

# Metrics of an update that are shown: format, and name on a bar and on a line.
_SHOWN = (
    ("train/reward", ".2f", "reward", "reward"),
    ("kl/predicted", ".1e", "KL pred.", "KL predicted"),
    ("kl/realised", ".1e", "real.", "realised"),
    ("kl/step_scale", ".2f", "scale", "step scale"),
)


def say(text: str) -> None:
  """Prints at once, also to a file; of many processes the first does."""
  if jax.process_index() == 0:
    print(text, flush=True)


class Progress:
  """A bar on a terminal; elsewhere one plain line for each update."""

  def __init__(self, total: int, done: int):
    """Starts at `done` of `total` updates."""
    self._total = total
    self._bar: Any = None
    if sys.stderr.isatty() and jax.process_index() == 0:
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
    shown = [
        (short, long, _number(row[name], spec))
        for name, spec, short, long in _SHOWN
        if name in row  # Without a KL budget there is no KL.
    ]
    if self._bar is not None:
      # Fits a line of 80 columns.
      text = ", ".join(f"{short} {number}" for short, _, number in shown)
      self._bar.set_postfix_str(text, refresh=False)
      self._bar.update()
    else:
      text = "  ".join(f"{long} {number}" for _, long, number in shown)
      say(
          f"update {update:>{len(str(self._total))}}/{self._total}  {text}"
          f"  {seconds:.1f} s"
      )


def _number(value: float | None, spec: str) -> str:
  """A number, or what stands for one that was not finite."""
  return "nan" if value is None else format(value, spec)
