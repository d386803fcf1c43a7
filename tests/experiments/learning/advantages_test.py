"""Tests of advantages and token weights against float64 loops."""

import numpy as np
import pytest

from experiments.learning import advantages

_REWARDS = [1.0, 0.0, 0.0, 1.0, 0.5, 2.0, -1.0, 0.25]
_ALL = (
    advantages.group_advantages,
    advantages.group_differences,
    advantages.leave_one_out,
    advantages.batch_advantages,
)


def _oracle(name, rewards, n):
  """Advantages in groups of n rewards, all of which are counted."""
  groups = [rewards[i : i + n] for i in range(0, len(rewards), n)]
  differences = [[r - sum(g) / n for r in g] for g in groups]
  every = [d for g in differences for d in g]
  if name == "group_differences":
    return every
  if name == "leave_one_out":
    return [
        r - sum(g[:i] + g[i + 1 :]) / (n - 1)
        for g in groups
        for i, r in enumerate(g)
    ]
  if name == "batch_advantages":
    return [d / (np.std(every) + 1e-4) for d in every]
  return [d / (np.std(g) + 1e-4) for g in differences for d in g]


@pytest.mark.parametrize("fn", _ALL)
@pytest.mark.parametrize("group_size", [2, 4, 8])
def test_advantages(fn, group_size):
  found = fn(np.float32(_REWARDS), group_size)
  right = _oracle(fn.__name__, _REWARDS, group_size)
  np.testing.assert_allclose(found, right, rtol=1e-6)
  assert found.dtype == np.float32 and found.shape == (8,)


def test_the_losses_differ():
  found = [tuple(fn(_REWARDS, 4)) for fn in _ALL]
  assert len(set(found)) == 4


@pytest.mark.parametrize("fn", _ALL)
@pytest.mark.parametrize("value", [0.0, 0.1, 1e-30, 1 / 3, -7e8])
@pytest.mark.parametrize("group_size", [2, 3, 7])
def test_equal_rewards_have_no_advantage(fn, value, group_size):
  rewards = np.full(2 * group_size, value, np.float32)
  np.testing.assert_array_equal(fn(rewards, group_size), 0.0)
  # This also holds if the rewards of another group differ.
  rewards[0] += 1 + abs(value)
  found = fn(rewards, group_size)
  np.testing.assert_array_equal(found[group_size:], 0.0)
  assert found[0] > 0


def test_a_group_size_of_1_compares_with_the_batch():
  found = advantages.batch_advantages(_REWARDS, 1)
  right = (np.float64(_REWARDS) - np.mean(_REWARDS)) / (np.std(_REWARDS) + 1e-4)
  np.testing.assert_allclose(found, right, rtol=1e-6)
  with pytest.raises(ValueError, match=r"at least 2 .* raise the num"):
    advantages.batch_advantages([1.0], 1)


@pytest.mark.parametrize("fn", _ALL)
def test_what_does_not_count_is_as_good_as_absent(fn):
  # Of the 4 rewards of a group, 2, 3 and 4 are counted; then 1 and 0: too few.
  counted = np.asarray(
      [1, 0, 1, 0] + [1, 1, 0, 1] + [1] * 4 + [0, 1, 0, 0] + [0] * 4, bool
  )
  rewards = np.random.default_rng(0).normal(size=20)
  found = fn(rewards, 4, counted)
  np.testing.assert_array_equal(found[~counted], 0.0)
  np.testing.assert_array_equal(found[12:], 0.0)
  sizes, start, std = (2, 3, 4), 0, 1.0
  kept = rewards[:12][counted[:12]]
  if fn is advantages.batch_advantages:
    every = np.concatenate(
        [g - g.mean() for g in np.split(kept, np.cumsum(sizes)[:-1])]
    )
    std = np.std(every) + 1e-4
  for size in sizes:
    group = list(kept[start : start + size])
    name = fn.__name__.replace("batch_advantages", "group_differences")
    right = np.asarray(_oracle(name, group, size)) / std
    at = counted[:12].nonzero()[0][start : start + size]
    np.testing.assert_allclose(found[at], right, rtol=1e-5, atol=1e-7)
    start += size
  # Rewards that are not counted do not matter at all.
  other = np.where(counted, rewards, 1e6)
  np.testing.assert_array_equal(fn(other, 4, counted), found)


@pytest.mark.parametrize("group_size", [0, 1, 3])
def test_bad_group_size(group_size):
  with pytest.raises(ValueError, match=f"4 rewards, got {group_size}.* Raise"):
    advantages.group_advantages(np.zeros(4), group_size)


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (np.zeros((2, 2)), r"shape \[B\], got \(2, 2\)"),
        (np.zeros(0), "shape"),
        (0.0, "shape"),
        ([0.0, float("nan")], "reward 1 is nan"),
        ([float("inf"), 0.0], "reward 0 is inf"),
    ],
)
def test_bad_rewards(rewards, message):
  with pytest.raises(ValueError, match=message):
    advantages.group_advantages(rewards, 2)


@pytest.mark.parametrize("counted", [np.ones(3, bool), np.ones(4)])
def test_bad_flags(counted):
  with pytest.raises(ValueError, match=r"counted must be bool of shape \(4,\)"):
    advantages.group_advantages(np.zeros(4), 2, counted)


_LENGTHS = np.asarray([5, 0, 3, 8, 1])
_WEIGHTS = {
    advantages.mean_of_responses: lambda n: [
        1 / (len(n) * max(x, 1)) for x in n
    ],
    advantages.mean_of_budgets: lambda n: [1 / (len(n) * 8) for _ in n],
    advantages.mean_of_tokens: lambda n: [1 / max(sum(n), 1) for _ in n],
    advantages.mean_of_sums: lambda n: [1 / len(n) for _ in n],
}


@pytest.mark.parametrize("fn", _WEIGHTS)
@pytest.mark.parametrize("lengths", [_LENGTHS, _LENGTHS * 0])
def test_weights(fn, lengths):
  found = fn(lengths, 8)
  np.testing.assert_allclose(found, _WEIGHTS[fn](lengths.tolist()), rtol=1e-6)
  assert found.dtype == np.float32


@pytest.mark.parametrize("fn", _WEIGHTS)
def test_responses_that_are_not_kept_are_as_good_as_absent(fn):
  kept = np.asarray([True, True, False, True, False])
  found = fn(_LENGTHS, 8, kept)
  np.testing.assert_array_equal(found[kept], fn(_LENGTHS[kept], 8))
  np.testing.assert_array_equal(found[~kept], 0.0)
  np.testing.assert_array_equal(fn(_LENGTHS, 8, np.zeros(5, bool)), 0.0)


@pytest.mark.parametrize(
    ("lengths", "kept", "message"),
    [
        ([9], None, "0 to max_new_tokens=8, got 9 to 9"),
        ([-1, 2], None, "got -1 to 2"),
        ([1.0], None, "must be integers"),
        ([[1]], None, r"shape \[B\]"),
        ([1, 2], np.ones(3, bool), "kept must be bool"),
    ],
)
def test_bad_lengths(lengths, kept, message):
  with pytest.raises(ValueError, match=message):
    advantages.mean_of_tokens(np.asarray(lengths), 8, kept)
