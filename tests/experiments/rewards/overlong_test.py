"""Tests of how responses that were cut off count."""

import numpy as np
import pytest

from experiments.learning import losses
from experiments.rewards import overlong

_REWARDS = np.asarray([1.0, 0.0, 1.0, 0.5, 0.25, 0.0, 1.0], np.float32)
_LENGTHS = np.asarray([0, 6, 7, 8, 9, 10, 10])
_FINISHED = np.asarray([True, True, True, True, True, True, False])


def _treat(kind, buffer=4, rewards=_REWARDS, lengths=_LENGTHS):
  return overlong.treat(
      rewards,
      lengths,
      _FINISHED,
      kind=kind,
      max_new_tokens=10,
      buffer=buffer,
  )


@pytest.mark.parametrize("kind", ["keep", "mask", "filter"])
def test_kinds_that_leave_rewards(kind):
  treated = _treat(kind)
  np.testing.assert_array_equal(treated.rewards, _REWARDS)
  everyone = np.ones(7, bool)
  in_loss = everyone if kind == "keep" else _FINISHED
  np.testing.assert_array_equal(treated.in_loss, in_loss)
  in_baseline = _FINISHED if kind == "filter" else everyone
  np.testing.assert_array_equal(treated.in_baseline, in_baseline)


def test_penalty():
  treated = _treat("penalty")
  # DAPO's eq. 13 by hand: 0 up to 10 - 4 tokens, then (6 - L) / 4.
  right = _REWARDS - [0, 0, 0.25, 0.5, 0.75, 1, 1]
  np.testing.assert_array_equal(treated.rewards, right)
  assert treated.rewards.dtype == np.float32
  assert treated.in_loss.all() and treated.in_baseline.all()
  steep = _treat("penalty", buffer=1).rewards
  np.testing.assert_array_equal(steep, _REWARDS - [0, 0, 0, 0, 0, 1, 1])
  whole = _treat("penalty", buffer=10).rewards
  np.testing.assert_allclose(whole, _REWARDS - _LENGTHS / 10, rtol=1e-6)


def test_arguments_stay_as_they_are():
  rewards = _REWARDS.copy()
  treated = _treat("penalty", rewards=rewards)
  np.testing.assert_array_equal(rewards, _REWARDS)
  treated = _treat("filter")
  treated.in_loss[:] = False
  assert treated.in_baseline.any() and _FINISHED.any()


def test_filtered_is_not_sampled():
  """Advantages and weights are those of the group without the response."""
  rewards, lengths = np.asarray([1.0, 0.0, 0.5]), np.asarray([2, 3, 8])
  treated = overlong.treat(
      rewards, lengths, [True, True, False], kind="filter", max_new_tokens=8
  )
  for name, loss in losses.LOSSES.items():
    advantages = loss.advantages(treated.rewards, 3, treated.in_baseline)
    weights = loss.weights(lengths, 8, treated.in_loss)
    right = loss.advantages(rewards[:2], 2), loss.weights(lengths[:2], 8)
    np.testing.assert_allclose(advantages[:2], right[0], err_msg=name)
    np.testing.assert_allclose(weights[:2], right[1], err_msg=name)
    assert advantages[2] == weights[2] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "drop"}, "one of keep, mask, filter, penalty, got 'drop'"),
        ({"kind": "penalty", "buffer": 0}, "1 to max_new_tokens=10 .*got 0"),
        ({"kind": "penalty", "buffer": 11}, "got 11"),
        ({"kind": "keep", "lengths": _LENGTHS[:3]}, "must have one shape"),
        ({"kind": "keep", "lengths": _LENGTHS + 1}, "got 1 to 11"),
    ],
)
def test_bad_arguments(options, message):
  with pytest.raises(ValueError, match=message):
    _treat(**options)
