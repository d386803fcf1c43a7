"""What to do with responses that the limit of tokens cut off.

Their reward says little: the answer had not come yet. Axis letter: B responses.
"""

from typing import Any, NamedTuple

import numpy as np

KINDS = ("keep", "mask", "filter", "penalty")


class Overlong(NamedTuple):
  """How the responses of a batch count.

  Attributes:
    rewards: `[B]` float32.
    in_loss: `[B]` bool, `kept` of `losses.Loss.weights`.
    in_baseline: `[B]` bool, `counted` of `losses.Loss.advantages`.
  """

  rewards: np.ndarray
  in_loss: np.ndarray
  in_baseline: np.ndarray


def check(kind: str, max_new_tokens: int, buffer: int) -> None:
  """Raises ValueError for a kind that is none or a buffer out of range."""
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
    rewards: Any,
    lengths: Any,
    finished: Any,
    *,
    kind: str,
    max_new_tokens: int,
    buffer: int = 0,
) -> Overlong:
  """Changes rewards, or takes responses out.

  | kind | unfinished responses |
  |---|---|
  | keep | are responses like others |
  | mask | are not in the loss, and stay in the baseline |
  | filter | are in neither, as if they had not been sampled |
  | penalty | are like others; the last `buffer` tokens before the limit cost |

  The penalty is the soft overlong punishment of DAPO, arXiv:2503.14476, eq. 13:
  nothing up to `max_new_tokens - buffer` tokens, from there on linear, 1 at the
  limit. It is for the length, whether the response finished or not. Its
  overlong filtering is `mask`.

  Args:
    rewards: `[B]` float.
    lengths: `[B]` int, generated tokens.
    finished: `[B]` bool, whether a response ended by itself.
    kind: of `KINDS`.
    max_new_tokens: the limit of a response in tokens.
    buffer: tokens before the limit that the penalty rises in.

  Returns:
    The rewards, and which of the responses count where.

  Raises:
    ValueError: for a kind that is none, a buffer out of range, or shapes and
      lengths that cannot be.
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
