"""Advantages of responses, and the weights of their tokens in a loss.

Everything here is NumPy and handles one batch at a time. Axis letter: B
responses; the responses to a prompt are adjacent and form a group. Notation: r
reward, |o| number of tokens of a response.

A response that is not counted in the baseline has advantage 0, and so do all
responses of a group in which fewer than 2 are counted. A response that is not
kept has weight 0 and is not included in B: the others have the weights that
they would have if it had not been sampled. An empty response has a finite
weight, but no token that uses it.
"""

import numpy as np
import numpy.typing as npt

# Added to the standard deviation of rewards before dividing by it.
_EPS = 1e-4


def group_advantages(
    rewards: npt.ArrayLike,
    group_size: int,
    counted: npt.ArrayLike | None = None,
) -> np.ndarray:
  """Computes `(r - mean) / (std + 1e-4)` within each group.

  The standard deviation is that of the population. The result is exactly 0
  where all rewards of a group are equal.

  Args:
    rewards: `[B]` float. The responses to a prompt are adjacent.
    group_size: Number of responses to each prompt, at least 2; divides B.
    counted: `[B]` bool, which rewards are in the baseline. None means all.

  Returns:
    `[B]` float32, computed in float64.

  Raises:
    ValueError: If the group size is below 2 or does not divide B, a reward is
      not finite, or shapes disagree.
  """
  centred, counted = _centred(rewards, group_size, counted)
  std = np.sqrt(_mean(np.square(centred), counted))
  return np.float32(centred / (std + _EPS)).reshape(-1)


def group_differences(
    rewards: npt.ArrayLike,
    group_size: int,
    counted: npt.ArrayLike | None = None,
) -> np.ndarray:
  """Computes `r - mean` within each group; see `group_advantages`."""
  centred, _ = _centred(rewards, group_size, counted)
  return np.float32(centred).reshape(-1)


def leave_one_out(
    rewards: npt.ArrayLike,
    group_size: int,
    counted: npt.ArrayLike | None = None,
) -> np.ndarray:
  """Computes `r - mean of the others` within each group.

  With n counted responses, this equals `(r - mean) n / (n - 1)`. Arguments are
  those of `group_advantages`.
  """
  centred, counted = _centred(rewards, group_size, counted)
  n = np.sum(counted, axis=1, keepdims=True)
  return np.float32(centred * n / np.maximum(n - 1, 1)).reshape(-1)


def batch_advantages(
    rewards: npt.ArrayLike,
    group_size: int,
    counted: npt.ArrayLike | None = None,
) -> np.ndarray:
  """Computes `(r - mean) / (std + 1e-4)` with the std of the whole batch.

  The mean is that of the group, or of the batch if `group_size` is 1. The
  standard deviation is that of the differences `r - mean`. Arguments are those
  of `group_advantages`, except that `group_size` can be 1.
  """
  if group_size == 1:
    if np.size(rewards) < 2:
      raise ValueError(
          "there must be at least 2 rewards to compare with one another, got"
          f" {np.size(rewards)}: raise the number of prompts"
      )
    return group_advantages(rewards, np.size(rewards), counted)
  centred, counted = _centred(rewards, group_size, counted)
  std = np.sqrt(np.sum(np.square(centred)) / max(np.sum(counted), 1))
  return np.float32(centred / (std + _EPS)).reshape(-1)


def _centred(
    rewards: npt.ArrayLike, group_size: int, counted: npt.ArrayLike | None
) -> tuple[np.ndarray, np.ndarray]:
  """`r - mean` as float64 `[groups, n]`, and which of them are counted."""
  rewards = np.asarray(rewards, np.float64)
  if rewards.ndim != 1 or not rewards.size:
    raise ValueError(f"rewards must have shape [B], got {rewards.shape}")
  if group_size < 2 or rewards.size % group_size:
    raise ValueError(
        f"group_size must be at least 2 and divide the {rewards.size} rewards,"
        f" got {group_size}: a response is compared with the others to its"
        " prompt. Raise the responses per prompt, or use the loss reinforce_pp,"
        " which compares with the whole batch if group_size is 1"
    )
  if not np.all(np.isfinite(rewards)):
    worst = np.flatnonzero(~np.isfinite(rewards))[0]
    raise ValueError(
        f"rewards must be finite, reward {worst} is {rewards[worst]}: correct"
        " the reward function"
    )
  flags = _flags("counted", counted, rewards.shape).reshape(-1, group_size)
  flags = flags & (np.sum(flags, axis=1, keepdims=True) >= 2)
  groups = np.where(flags, rewards.reshape(-1, group_size), 0.0)
  # The mean of equal numbers can differ from them in the last bit, and dividing
  # by the std would magnify that: test the rewards themselves for equality.
  high = np.max(np.where(flags, groups, -np.inf), axis=1, keepdims=True)
  low = np.min(np.where(flags, groups, np.inf), axis=1, keepdims=True)
  centred = groups - _mean(groups, flags)
  return np.where(flags & (high > low), centred, 0.0), flags


def _mean(groups: np.ndarray, counted: np.ndarray) -> np.ndarray:
  """The mean of the counted values of each group, `[groups, 1]`."""
  n = np.maximum(np.sum(counted, axis=1, keepdims=True), 1)
  return np.sum(np.where(counted, groups, 0.0), axis=1, keepdims=True) / n


def _flags(
    name: str, flags: npt.ArrayLike | None, shape: tuple[int, ...]
) -> np.ndarray:
  """The flags as a checked bool array; None means that all are set."""
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
    lengths: npt.ArrayLike,
    max_new_tokens: int,
    kept: npt.ArrayLike | None = None,
) -> np.ndarray:
  """Weights `1 / (B |o|)`: the mean over responses of their token means.

  Args:
    lengths: `[B]` int, number of tokens of each response.
    max_new_tokens: Largest number of tokens that a response can have.
    kept: `[B]` bool, which responses are in the loss. None means all.

  Returns:
    `[B]` float32, the weight of each token of a response.

  Raises:
    ValueError: If lengths are not integers from 0 to `max_new_tokens`, or
      shapes disagree.
  """
  lengths, kept = _lengths(lengths, max_new_tokens, kept)
  return _weights(1 / np.maximum(lengths, 1), kept) / _count(kept)


def mean_of_budgets(
    lengths: npt.ArrayLike,
    max_new_tokens: int,
    kept: npt.ArrayLike | None = None,
) -> np.ndarray:
  """Weights `1 / (B max_new_tokens)`, which do not depend on lengths.

  Arguments are those of `mean_of_responses`.
  """
  lengths, kept = _lengths(lengths, max_new_tokens, kept)
  return _weights(1 / max_new_tokens, kept) / _count(kept)


def mean_of_tokens(
    lengths: npt.ArrayLike,
    max_new_tokens: int,
    kept: npt.ArrayLike | None = None,
) -> np.ndarray:
  """Weights `1 / Σ|o|`: the mean over all tokens of the batch.

  Arguments are those of `mean_of_responses`.
  """
  lengths, kept = _lengths(lengths, max_new_tokens, kept)
  return _weights(1.0, kept) / np.float32(max(np.sum(lengths[kept]), 1))


def mean_of_sums(
    lengths: npt.ArrayLike,
    max_new_tokens: int,
    kept: npt.ArrayLike | None = None,
) -> np.ndarray:
  """Weights `1 / B`: the mean over responses of the sums over their tokens.

  Arguments are those of `mean_of_responses`.
  """
  lengths, kept = _lengths(lengths, max_new_tokens, kept)
  return _weights(1.0, kept) / _count(kept)


def _lengths(
    lengths: npt.ArrayLike, max_new_tokens: int, kept: npt.ArrayLike | None
) -> tuple[np.ndarray, np.ndarray]:
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


def _weights(weights: npt.ArrayLike, kept: np.ndarray) -> np.ndarray:
  """The weights as `[B]` float32, 0 for responses that are not kept."""
  return np.where(kept, weights, 0.0).astype(np.float32)


def _count(kept: np.ndarray) -> np.float32:
  """B: the number of responses that are kept, at least 1."""
  return np.float32(max(np.sum(kept), 1))
