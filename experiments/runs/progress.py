"""What a run tells a person: what it is, and how far it is."""

from collections.abc import Callable, Mapping, Sequence
import sys
import time
from typing import Any

import jax

from experiments import _optional

# Metrics of an update that are shown: format, and name on a bar and on a line.
_SHOWN = (
    ("train/reward", ".2f", "reward", "reward"),
    ("kl/predicted", ".1e", "KL pred.", "KL predicted"),
    ("kl/realised", ".1e", "real.", "realised"),
    ("kl/step_scale", ".2f", "scale", "step scale"),
)
# Updates whose pace the time left is reckoned from.
_RECENT = 20


def say(text: str) -> None:
  """Prints at once, also to a file; of many processes the first does."""
  if jax.process_index() == 0:
    print(text, flush=True)


class Progress:
  """A bar on a terminal; elsewhere one plain line for each update."""

  def __init__(
      self,
      total: int,
      done: int,
      clock: Callable[[], float] = time.monotonic,
  ):
    """Starts at `done` of `total` updates; `clock` gives seconds."""
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
          # The bar takes what the numbers leave of the line.
          bar_format="{n_fmt}/{total_fmt}|{bar}|{postfix}",
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
  """The seconds that so many further updates will take.

  Args:
    moments: when the run began and when each of its updates was done, in
      seconds. The recent ones count. The first update, which waits for the
      compiler, does only while there is no other.
    updates: how many are to come.
  """
  recent = moments[1:] if len(moments) > 2 else moments
  recent = recent[-_RECENT - 1 :]
  return updates * (recent[-1] - recent[0]) / (len(recent) - 1)


def duration(seconds: float) -> str:
  """A time in two figures or so: `8 s`, `12 min`, `3 h 05 min`, `2 d 4 h`."""
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
  """What a run is about to do and to hold, for its first lines.

  Args:
    model: its name or path.
    parameters: how many it has.
    trained: what is sketched, trained densely and frozen, as
      `logra_jax.summary` says.
    memory: bytes by what holds them: 'parameters', 'optimizer state',
      'KV cache' and the like.
    prompts: of an update.
    responses: to each prompt.
    max_prompt_tokens: limit of a prompt.
    max_new_tokens: limit of a response.
  """
  gib = lambda n: f"{n / 2**30:.2f} GiB"
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
  """A number, or what stands for one that was not finite."""
  return "nan" if value is None else format(value, spec)
