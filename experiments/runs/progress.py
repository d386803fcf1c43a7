"""What a run prints: its summary, its progress, and the time left."""

from collections.abc import Callable, Mapping, Sequence
import sys
import time
from typing import Any

import jax

from experiments import _optional
from experiments.reporting.units import GIB

# Metrics that are shown: name, format, and label on a bar and on a line.
_SHOWN = (
    ("train/reward", ".2f", "reward", "reward"),
    ("kl/predicted", ".1e", "KL pred.", "KL predicted"),
    ("kl/realised", ".1e", "real.", "realised"),
    ("kl/step_scale", ".2f", "scale", "step scale"),
)
# Number of recent updates that the time left is estimated from.
_RECENT = 20


def say(text: str) -> None:
  """Prints a line and flushes it; only the first process prints."""
  if jax.process_index() == 0:
    print(text, flush=True)


class Progress:
  """Shows progress: a bar on a terminal, otherwise a line per update."""

  def __init__(
      self,
      total: int,
      done: int,
      clock: Callable[[], float] = time.monotonic,
  ):
    """Starts the clock.

    Args:
      total: Number of updates of the run.
      done: Number of updates already done.
      clock: Returns the current time in seconds.
    """
    self._total = total
    self._clock = clock
    self._moments = [clock()]
    self._bar: Any = None
    if sys.stderr.isatty() and jax.process_index() == 0:
      tqdm = _optional.require("tqdm", "train").tqdm
      self._bar = tqdm(
          total=total,
          initial=done,
          dynamic_ncols=True,
          # The bar fills what the numbers leave of the line.
          bar_format="{n_fmt}/{total_fmt}|{bar}|{postfix}",
      )

  def __enter__(self) -> "Progress":
    return self

  def __exit__(self, *unused: Any) -> None:
    if self._bar is not None:
      self._bar.close()

  def say(self, text: str) -> None:
    """Prints a line without disturbing the bar."""
    if self._bar is not None:
      self._bar.write(text)
    else:
      say(text)

  def show(self, update: int, row: Mapping[str, Any], seconds: float) -> None:
    """Shows the metrics of an update and the seconds that it took."""
    self._moments.append(self._clock())
    left = time_left(self._moments, self._total - update)
    shown = [
        (short, long, _number(row[name], spec))
        for name, spec, short, long in _SHOWN
        if name in row  # Without a KL budget there is no KL.
    ]
    if self._bar is not None:
      # Fits a line of 80 columns.
      text = ", ".join(f"{short} {number}" for short, _, number in shown)
      text = f"{duration(left)} left, {text}"
      self._bar.set_postfix_str(text, refresh=False)
      self._bar.update()
    else:
      text = "  ".join(f"{long} {number}" for _, long, number in shown)
      say(
          f"update {update:>{len(str(self._total))}}/{self._total}  {text}"
          f"  {seconds:.1f} s  {duration(left)} left"
      )


def time_left(moments: Sequence[float], updates: int) -> float:
  """Estimates the seconds that the remaining updates will take.

  Args:
    moments: When the run began and when each of its updates ended, in seconds.
      Only recent updates count. The first update, which includes compilation,
      counts only while it is the only one.
    updates: Number of updates that remain.
  """
  recent = moments[1:] if len(moments) > 2 else moments
  recent = recent[-_RECENT - 1 :]
  return updates * (recent[-1] - recent[0]) / (len(recent) - 1)


def duration(seconds: float) -> str:
  """Formats a duration: `8 s`, `12 min`, `3 h 05 min`, `2 d 4 h`."""
  minutes = round(seconds / 60)
  if seconds < 99.5:
    return f"{seconds:.0f} s"
  if minutes < 100:
    return f"{minutes} min"
  if minutes < 48 * 60:
    return f"{minutes // 60} h {minutes % 60:02d} min"
  hours = round(minutes / 60)
  return f"{hours // 24} d {hours % 24} h"


def start_summary(
    *,
    model: str,
    parameters: int,
    trained: str,
    memory: Mapping[str, int],
    prompts: int,
    responses: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
) -> str:
  """The first lines that a run prints.

  Args:
    model: Name or path of the model.
    parameters: Number of its parameters.
    trained: What is sketched, trained densely and frozen, as
      `logra_jax.summary` prints it.
    memory: Bytes by what holds them, such as 'parameters', 'optimizer state'
      and 'KV cache'.
    prompts: Number of prompts of an update.
    responses: Number of responses to each prompt.
    max_prompt_tokens: Longest prompt in tokens.
    max_new_tokens: Longest response in tokens.
  """
  gib = lambda n: f"{n / GIB:.2f} GiB"
  batch = prompts * responses
  parts = [f"{name} {gib(size)}" for name, size in memory.items()]
  lines = [
      trained,
      "",
      f"model      {model}: {parameters / 1e6:,.1f} M parameters",
      f"memory     {gib(sum(memory.values()))} before activations:"
      f" {', '.join(parts)}",
      f"an update  {batch:,} responses, {responses} to each of {prompts}"
      f" prompts; at most {batch * (max_prompt_tokens + max_new_tokens):,}"
      f" tokens, {batch * max_new_tokens:,} of them generated",
  ]
  return "\n".join(lines)


def _number(value: float | None, spec: str) -> str:
  """A formatted number, or `nan` for a non-finite one."""
  return "nan" if value is None else format(value, spec)
