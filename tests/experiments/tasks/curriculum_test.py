"""Tests of choosing prompts by their pass rate."""

import jax
import numpy as np
import pytest

from experiments.tasks import curriculum


def _state(counts, passes):
  return curriculum.Curriculum(np.float32(counts), np.float32(passes))


def test_counts_and_memory():
  state = curriculum.init(4)
  passed = np.asarray([[True, False, False], [True, True, True]])
  first = curriculum.observe(state, [2, 0], passed)
  np.testing.assert_array_equal(first.counts, [3, 0, 3, 0])
  np.testing.assert_array_equal(first.passes, [3, 0, 1, 0])
  second = curriculum.observe(first, [2], [[1.0, 0.5]])
  # Earlier counts are halved, then two responses are added.
  np.testing.assert_array_equal(second.counts, [3, 0, 3.5, 0])
  np.testing.assert_array_equal(second.passes, [3, 0, 2, 0])
  # Earlier states are unchanged.
  assert not state.counts.any() and first.counts[2] == 3


def test_probabilities():
  state = _state([0, 8, 8, 8, 1000], [0, 4, 0, 8, 1000])
  chances = curriculum.probabilities(state)
  rates = np.asarray([1 / 2, 5 / 10, 1 / 10, 9 / 10, 1001 / 1002])
  weights = rates * (1 - rates)
  right = 0.9 * weights / weights.sum() + 0.1 / 5
  np.testing.assert_allclose(chances, right, rtol=1e-12)
  np.testing.assert_allclose(chances.sum(), 1.0)
  # Unseen and half solved examples come first; one that is always solved has
  # little more than the floor.
  assert chances[0] == chances[1] > 2 * chances[2]
  np.testing.assert_allclose(chances[2], chances[3])
  assert 0.1 / 5 < chances[4] < 0.11 / 5


def test_choice_is_a_function_of_its_arguments():
  state = _state(np.arange(20), np.arange(20) / 3)
  draw = lambda update, seed=7: curriculum.choose(
      state, 5, seed=seed, update=update
  )
  first = draw(3)
  np.testing.assert_array_equal(draw(3), first)
  assert len(set(first.tolist())) == 5 and first.dtype == np.int64
  assert draw(4).tolist() != first.tolist() != draw(3, seed=8).tolist()
  # A checkpoint restores JAX arrays instead of NumPy's.
  restored = jax.tree.map(jax.numpy.asarray, state)
  again = curriculum.choose(restored, 5, seed=7, update=3)
  np.testing.assert_array_equal(again, first)
  seen = [
      curriculum.observe(s, first, np.ones((5, 2), bool))
      for s in (state, restored)
  ]
  jax.tree.map(np.testing.assert_array_equal, *seen)


def test_choice_follows_the_probabilities():
  state = _state([8, 8, 8, 0], [0, 4, 7, 0])
  draws = [
      curriculum.choose(state, 1, seed=0, update=u)[0] for u in range(4000)
  ]
  frequencies = np.bincount(draws, minlength=4) / 4000
  expected = curriculum.probabilities(state)
  deviation = np.sqrt(expected * (1 - expected) / 4000)
  assert np.all(np.abs(frequencies - expected) < 4 * deviation)


def test_nothing_starves():
  # One example is always solved, 99 are half solved.
  passes = np.full(100, 500)
  passes[0] = 1000
  state = _state(np.full(100, 1000), passes)
  updates = 2000
  chosen = sum(
      0 in curriculum.choose(state, 10, seed=1, update=u)
      for u in range(updates)
  )
  # At least 10 draws at the floor of 0.1 / 100.
  assert chosen > 0.7 * updates * 10 * 0.1 / 100
  # And far less often than the others, each drawn in a tenth of the updates.
  assert chosen < 0.3 * updates * 10 / 100


def test_whole_pool():
  chosen = curriculum.choose(curriculum.init(6), 6, seed=0, update=0)
  assert sorted(chosen.tolist()) == list(range(6))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: curriculum.init(0), "size must be at least 1"),
        (lambda s: curriculum.choose(s, 4, seed=0, update=0), "3 .*, got 4"),
        (lambda s: curriculum.choose(s, 0, seed=0, update=0), "got 0"),
        (lambda s: curriculum.observe(s, [3], [[1]]), "distinct and 0 to 2"),
        (lambda s: curriculum.observe(s, [-1], [[1]]), r"got \[-1\]"),
        (lambda s: curriculum.observe(s, [1, 1], [[1], [0]]), "distinct"),
        (lambda s: curriculum.observe(s, [1], [1]), r"shape \[1, responses\]"),
        (lambda s: curriculum.observe(s, [1], [[2.0]]), "got 2.0 to 2.0"),
        (lambda s: curriculum.observe(s, [1], [[np.nan]]), "must be 0 to 1"),
    ],
)
def test_bad_arguments(call, message):
  with pytest.raises(ValueError, match=message):
    call(curriculum.init(3))
