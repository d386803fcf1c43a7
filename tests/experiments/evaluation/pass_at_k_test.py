"""Tests of pass@k and maj@k against enumeration."""

import itertools

import numpy as np
import pytest

from experiments.evaluation import pass_at_k


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_response(k):
  n = 5
  expected = []
  for c in range(n + 1):
    right = [True] * c + [False] * (n - c)
    expected.append(np.mean([*map(any, itertools.combinations(right, k))]))
  found = pass_at_k.pass_at_k(n, np.arange(n + 1), k)
  np.testing.assert_allclose(found, expected, atol=1e-12)


def test_pass_at_k_is_stable_for_many_responses():
  """With 10,000 responses, the binomial coefficients have 242 digits."""
  found = pass_at_k.pass_at_k(10_000, np.array([0, 1, 10_000]), 100)
  np.testing.assert_allclose(found, [0.0, 0.01, 1.0], rtol=1e-9)


def test_the_estimator_has_no_bias_where_the_plug_in_has():
  """On average 1 - (1 - c / n)^k is too low, and our estimate is correct."""
  rng = np.random.default_rng(0)
  chance, n, k = 0.2, 6, 4
  correct = rng.binomial(n, chance, 20_000)
  truth = 1 - (1 - chance) ** k
  plug_in = np.mean(1 - (1 - correct / n) ** k)
  assert abs(pass_at_k.pass_at_k(n, correct, k).mean() - truth) < 0.01
  assert plug_in < truth - 0.02


def test_a_vote_is_won_by_the_most_frequent_and_then_the_first():
  vote = lambda answers, rewards, k: pass_at_k.maj_at_k(
      [answers], [rewards], k
  )[0]
  assert vote(["2", "1", "2"], [0.0, 1.0, 0.0], 3) == 0.0
  assert vote(["1", "2", "2", "1"], [1.0, 0.0, 0.0, 1.0], 4) == 1.0
  # Pairs (1, 2), (1, 2), (2, 2): only the last one loses the right answer.
  assert vote(["1", "2", "2"], [1.0, 0.0, 0.0], 2) == pytest.approx(2 / 3)
  assert vote([None, "1", None], [0.0, 1.0, 0.0], 3) == 1.0
  assert vote([None, None], [1.0, 1.0], 2) == 0.0
  # One voter is the mean reward.
  assert vote(["1", "2", "3", "4"], [1, 0, 0, 0], 1) == 0.25


def test_more_subsets_than_are_drawn():
  """Of C(20, 10) = 184,756 subsets, the 14 correct of 20 win nearly all."""
  answers = ["1"] * 14 + ["2"] * 6
  rewards = [1.0] * 14 + [0.0] * 6
  found = pass_at_k.maj_at_k([answers], np.array([rewards]), 10)
  again = pass_at_k.maj_at_k([answers], np.array([rewards]), 10)
  assert 0.95 < found[0] <= 1.0
  assert found == again


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ("3 + 5 = 8", "8"),
        ("<answer> 8.0 </answer> or 9?", "8"),
        ("<answer>3</answer><answer>4", "4"),
        (r"so \boxed{\frac{1}{2}} and 7", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{1,024}", "1024"),
        ("<answer>Red  Fox</answer>", "red fox"),
        ("<answer>3-8</answer>", "3-8"),
        ("<answer>1e999999999</answer>", "1e999999999"),
        ("#### 0.0000001", "0.0000001"),
        ("<answer></answer>", None),
        ("no idea", None),
    ],
)
def test_what_a_completion_votes_for(completion, expected):
  assert pass_at_k.answer(completion) == expected


@pytest.mark.parametrize("k", [0, 4])
def test_k_out_of_range(k):
  with pytest.raises(ValueError, match=f"k={k} must be 1 to 3"):
    pass_at_k.pass_at_k(3, np.array([1]), k)
  with pytest.raises(ValueError, match="ask for more samples or a smaller k"):
    pass_at_k.maj_at_k([["1"] * 3], np.ones((1, 3)), k)


def test_more_right_responses_than_responses():
  with pytest.raises(ValueError, match="correct must be 0 to n=3"):
    pass_at_k.pass_at_k(3, np.array([4]), 1)
