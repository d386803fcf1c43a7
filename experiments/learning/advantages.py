"""What a response's reward says of its tokens: advantage, and weight in a loss.

NumPy, of one batch at a time. Axis letter: B responses; those to a prompt are
adjacent and make a group. Notation: r reward, |o| tokens of a response.

A response that does not count in the baseline has advantage 0, and so have all
of a group in which fewer than 2 count. A response that is not kept has weight
0 and is not among the B: the others weigh as if it had not been sampled. An
empty response has a finite weight and no token to use it.
"""

from typing import Any

import numpy as np

# Added to a standard deviation of rewards.
_EPS = 1e-4


def group_advantages(
    rewards: Any, group_size: int, counted: Any = None
) -> np.ndarray:
  """`(r - mean) / (std + 1e-4)` within the responses to a prompt.

  The standard deviation is the population's. Exactly 0 where all rewards of a
  group are equal.

  Args:
    rewards: `[B]` float; the responses of a prompt are adjacent.
    group_size: responses per prompt, at least 2; divides B.
    counted: `[B]` bool, which rewards are in the baseline; None for all.

  Returns:
    `[B]` float32, computed in float64.

  Raises:
    ValueError: for a group size below 2 or that does not divide B, a reward
      that is not finite, or shapes that disagree.
  """
  centred, counted = _centred(rewards, group_size, counted)
  std = np.sqrt(_mean(np.square(centred), counted))
  return np.float32(centred / (std + _EPS)).reshape(-1)


def group_differences(
    rewards: Any, group_size: int, counted: Any = None
) -> np.ndarray:
  """`r - mean` within the responses to a prompt; see `group_advantages`."""
  centred, _ = _centred(rewards, group_size, counted)
  return np.float32(centred).reshape(-1)


def leave_one_out(
    rewards: Any, group_size: int, counted: Any = None
) -> np.ndarray:
  """`r - mean of the others` of the group; see `group_advantages`.

  With n responses that is `(r - mean) n / (n - 1)`.
  """
  centred, counted = _centred(rewards, group_size, counted)
  n = np.sum(counted, axis=1, keepdims=True)
  return np.float32(centred * n / np.maximum(n - 1, 1)).reshape(-1)


def batch_advantages(
    rewards: Any, group_size: int, counted: Any = None
) -> np.ndarray:
  """`(r - mean) / (std + 1e-4)`, std over the batch; see `group_advantages`.

  The mean is that of the group, or of the batch if `group_size` is 1. The
  standard deviation is that of the differences `r - mean`.
  """
  if group_size == 1:
    if np.size(rewards) < 2:
      raise ValueError(
          "rewards must be at least 2 to be compared with one another, got"
          f" {np.size(rewards)}: raise the number of prompts"
      )
    return group_advantages(rewards, np.size(rewards), counted)
  centred, counted = _centred(rewards, group_size, counted)
  std = np.sqrt(np.sum(np.square(centred)) / max(np.sum(counted), 1))
  return np.float32(centred / (std + _EPS)).reshape(-1)


def _centred(rewards, group_size, counted):
  """`r - mean` `[groups, n]` in float64, and which of them count."""
  rewards = np.asarray(rewards, np.float64)
  if rewards.ndim != 1 or not rewards.size:
    raise ValueError(f"rewards must have shape [B], got {rewards.shape}")
  if group_size < 2 or rewards.size % group_size:
    raise ValueError(
        f"group_size must be at least 2 and divide the {rewards.size} rewards,"
        f" got {group_size}: a response is compared with others to its prompt."
        " Raise the responses per prompt, or take the loss reinforce_pp, which"
        " compares with the batch where it is 1"
    )
  if not np.all(np.isfinite(rewards)):
    worst = np.flatnonzero(~np.isfinite(rewards))[0]
    raise ValueError(
        f"rewards must be finite, reward {worst} is {rewards[worst]}: correct"
        " the reward function"
    )
  counted = _flags("counted", counted, rewards.shape).reshape(-1, group_size)
  counted = counted & (np.sum(counted, axis=1, keepdims=True) >= 2)
  groups = np.where(counted, rewards.reshape(-1, group_size), 0.0)
  # The mean of equal numbers may differ from them in the last bit, which a
  # division by std would blow up: equality is tested on the rewards themselves.
  high = np.max(np.where(counted, groups, -np.inf), axis=1, keepdims=True)
  low = np.min(np.where(counted, groups, np.inf), axis=1, keepdims=True)
  centred = groups - _mean(groups, counted)
  return np.where(counted & (high > low), centred, 0.0), counted


def _mean(groups, counted):
  """Mean of each group over what counts, `[groups, 1]`."""
  n = np.maximum(np.sum(counted, axis=1, keepdims=True), 1)
  return np.sum(np.where(counted, groups, 0.0), axis=1, keepdims=True) / n


def _flags(name, flags, shape):
  """The flags as a bool array; None means that all are set."""
  if flags is None:
    return np.ones(shape, bool)
  flags = np.asarray(flags)
  if flags.shape != shape or flags.dtype != bool:
    raise ValueError(
        f"{name} must be bool of shape {shape}, got {flags.dtype} of"
        f" {flags.shape}"
    )
  return flags


def mean_of_responses(
    lengths: Any, max_new_tokens: int, kept: Any = None
) -> np.ndarray:
  """`1 / (B |o|)`: the mean over responses of the mean over their tokens."""
  lengths, kept = _lengths(lengths, max_new_tokens, kept)
  return _weights(1 / np.maximum(lengths, 1), kept) / _count(kept)


def mean_of_budgets(
    lengths: Any, max_new_tokens: int, kept: Any = None
) -> np.ndarray:
  """`1 / (B max_new_tokens)`: a constant, whatever the length."""
  lengths, kept = _lengths(lengths, max_new_tokens, kept)
  return _weights(1 / max_new_tokens, kept) / _count(kept)


def mean_of_tokens(
    lengths: Any, max_new_tokens: int, kept: Any = None
) -> np.ndarray:
  """`1 / Σ|o|`: the mean over all tokens of the batch."""
  lengths, kept = _lengths(lengths, max_new_tokens, kept)
  return _weights(1.0, kept) / np.float32(max(np.sum(lengths[kept]), 1))


def mean_of_sums(
    lengths: Any, max_new_tokens: int, kept: Any = None
) -> np.ndarray:
  """`1 / B`: the mean over responses of the sum over their tokens."""
  lengths, kept = _lengths(lengths, max_new_tokens, kept)
  return _weights(1.0, kept) / _count(kept)


def _lengths(lengths, max_new_tokens, kept):
  """Lengths and flags as checked arrays."""
  lengths = np.asarray(lengths)
  if lengths.ndim != 1 or not np.issubdtype(lengths.dtype, np.integer):
    raise ValueError(
        f"lengths must be integers of shape [B], got {lengths.dtype} of"
        f" {lengths.shape}"
    )
  if np.any(lengths < 0) or np.any(lengths > max_new_tokens):
    raise ValueError(
        f"lengths must be 0 to max_new_tokens={max_new_tokens}, got"
        f" {lengths.min()} to {lengths.max()}"
    )
  return lengths, _flags("kept", kept, lengths.shape)


def _weights(weights, kept):
  """`[B]` float32, 0 where not kept."""
  return np.where(kept, weights, 0.0).astype(np.float32)


def _count(kept):
  """B: responses that are kept, at least 1."""
  return np.float32(max(np.sum(kept), 1))
