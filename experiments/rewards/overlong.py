"""Decides how responses that were cut off at the token limit count.

Their reward says little, because the answer had not come yet.

Axis letter: B responses.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

KINDS = ("keep", "mask", "filter", "penalty")


class Overlong(NamedTuple):
  """How the responses of a batch count.

  Attributes:
    rewards: `[B]` float32.
    in_loss: `[B]` bool, the `kept` of `losses.Loss.weights`.
    in_baseline: `[B]` bool, the `counted` of `losses.Loss.advantages`.
  """

  rewards: np.ndarray
  in_loss: np.ndarray
  in_baseline: np.ndarray


def check(kind: str, max_new_tokens: int, buffer: int) -> None:
  """Raises ValueError for an unknown kind or a buffer out of range."""
  if kind not in KINDS:
    raise ValueError(
        f"overlong must be one of {', '.join(KINDS)}, got {kind!r}"
    )
  if kind == "penalty" and not 1 <= buffer <= max_new_tokens:
    raise ValueError(
        f"overlong_buffer must be 1 to max_new_tokens={max_new_tokens} tokens,"
        f" got {buffer}"
    )


def treat(
    rewards: ArrayLike,
    lengths: ArrayLike,
    finished: ArrayLike,
    *,
    kind: str,
    max_new_tokens: int,
    buffer: int = 0,
) -> Overlong:
  """Lowers the rewards of long responses, or leaves out unfinished ones.

  | kind | unfinished responses |
  |---|---|
  | keep | count like all others |
  | mask | are left out of the loss, but stay in the baseline |
  | filter | are left out of both, as if they had not been sampled |
  | penalty | count like all others, but long responses lose reward |

  The penalty is DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13): 0
  up to `max_new_tokens - buffer` tokens, then linear up to 1 at the limit. It
  depends on the length alone, whether the response finished or not. DAPO's
  overlong filtering is `mask`.

  Args:
    rewards: `[B]` float.
    lengths: `[B]` int, numbers of generated tokens.
    finished: `[B]` bool, whether a response ended by itself.
    kind: One of `KINDS`.
    max_new_tokens: Limit of a response in tokens.
    buffer: Number of tokens before the limit over which the penalty rises.

  Returns:
    The new rewards, and which responses count where.

  Raises:
    ValueError: For an unknown kind, a buffer or lengths out of range, or shapes
      that differ.
  """
  check(kind, max_new_tokens, buffer)
  rewards = np.asarray(rewards, np.float32)
  lengths = np.asarray(lengths)
  finished = np.asarray(finished, bool)
  if not rewards.shape == lengths.shape == finished.shape:
    raise ValueError(
        "rewards, lengths and finished must have one shape [B], got"
        f" {rewards.shape}, {lengths.shape} and {finished.shape}"
    )
  if np.any(lengths < 0) or np.any(lengths > max_new_tokens):
    raise ValueError(
        f"lengths must be 0 to max_new_tokens={max_new_tokens}, got"
        f" {lengths.min()} to {lengths.max()}"
    )
  if kind == "penalty":
    over = np.maximum(lengths - (max_new_tokens - buffer), 0)
    rewards = rewards - np.float32(over / buffer)
  all_of_them = np.ones(rewards.shape, bool)
  in_loss = finished if kind in ("mask", "filter") else all_of_them
  in_baseline = finished if kind == "filter" else all_of_them
  return Overlong(rewards, in_loss.copy(), in_baseline.copy())
