"""pass@k and maj@k, from several responses to each problem."""

from collections import Counter
from collections.abc import Sequence
import decimal
import itertools
import math
import re

import numpy as np

from experiments import tasks
from experiments.tasks import answers as answers_lib

# maj@k averages over all subsets if there are at most this many, and otherwise
# over this many random ones.
_SUBSETS = 200
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}\b)")
# Exponents are left out, because 1e999999 would be written as a million digits.
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")


def pass_at_k(n: int, correct: np.ndarray, k: int) -> np.ndarray:
  """Estimates the chance that at least one of k responses is correct.

  If c of n responses to a problem are correct, a random subset of k contains a
  correct one with probability
  1 - C(n - c, k) / C(n, k) = 1 - ∏_{i = n - c + 1}^{n} (1 - k / i),
  which is an unbiased estimate (Chen et al. 2021,
  https://arxiv.org/abs/2107.03374, section 2.1). The product avoids large
  binomial coefficients.

  Args:
    n: Number of responses to each problem.
    correct: `[N]` int, number of correct responses to each problem, c, 0 to n.
    k: Number of responses to choose from, 1 to n.

  Returns:
    The estimate for each problem, `[N]` float64.

  Raises:
    ValueError: If k or c is out of range.
  """
  check_k(n, k)
  correct = np.asarray(correct)
  if correct.size and not (0 <= correct.min() and correct.max() <= n):
    raise ValueError(f"correct must be 0 to n={n}, got {correct.tolist()}")
  # misses[c] is C(n - c, k) / C(n, k). Factors below 0 follow one that is 0.
  factors = np.maximum(1.0 - k / np.arange(n, 0, -1), 0.0)
  misses = np.concatenate([[1.0], np.cumprod(factors)])
  return 1.0 - misses[correct]


def maj_at_k(
    answers: Sequence[Sequence[str | None]], rewards: np.ndarray, k: int
) -> np.ndarray:
  """Computes the expected reward of a majority vote over k responses.

  The most frequent answer wins; of equally frequent ones, the one that came
  first. Responses without an answer do not vote. The winner earns the reward of
  the first response that gave it; without any answer the vote earns 0. The
  expectation is over all subsets of k responses, kept in order, or over 200
  random ones (always the same) if there are more.

  Args:
    answers: The answers of the n responses to each of N problems; None stands
      for no answer.
    rewards: `[N, n]`, the reward of each response.
    k: Number of voters, 1 to n.

  Returns:
    The expected reward for each problem, `[N]` float64.

  Raises:
    ValueError: If k is out of range.
  """
  rewards = np.asarray(rewards, np.float64)
  subsets = _subsets(rewards.shape[1], k)
  return np.array(
      [
          np.mean([_vote(row, earned, subset) for subset in subsets])
          for row, earned in zip(answers, rewards, strict=True)
      ]
  )


def answer(completion: str) -> str | None:
  r"""Extracts the answer that a completion votes for, or None.

  The answer is the text between the last `<answer>` and `</answer>`, else the
  content of the last `\boxed{...}`, else the last number. It is normalized:
  numbers to one notation, text to lower case and single spaces.
  """
  for text in (_tagged(completion), answers_lib.boxed(completion)):
    if text is not None:
      return _normal(text)
  number = tasks.last_number(completion)
  return None if number is None else _normal(format(number, "f"))


def check_k(n: int, k: int) -> None:
  """Raises ValueError if k is not between 1 and n."""
  if not 1 <= k <= n:
    raise ValueError(
        f"k={k} must be 1 to {n}, the responses to each problem: ask for more"
        " samples or a smaller k"
    )


def _subsets(n: int, k: int) -> list[tuple[int, ...]]:
  """Sorted tuples of k out of n indices: all, or `_SUBSETS` random ones."""
  check_k(n, k)
  if math.comb(n, k) <= _SUBSETS:
    return list(itertools.combinations(range(n), k))
  rng = np.random.default_rng(0)
  return [
      tuple(sorted(rng.choice(n, k, replace=False))) for _ in range(_SUBSETS)
  ]


def _vote(
    answers: Sequence[str | None], rewards: np.ndarray, subset: Sequence[int]
) -> float:
  """The reward of the majority answer of a subset."""
  # A Counter lists equal counts in the order of their first occurrence.
  votes = Counter(answers[i] for i in subset if answers[i] is not None)
  if not votes:
    return 0.0
  (winner, _), *_ = votes.most_common(1)
  return next(rewards[i] for i in subset if answers[i] == winner)


def _tagged(text: str) -> str | None:
  """The text inside the last pair of answer tags, or None."""
  _, tag, rest = text.rpartition("<answer>")
  inside, end, _ = rest.partition("</answer>")
  return inside if tag and end else None


def _normal(text: str) -> str | None:
  """A normal form that equivalent answers share; None for an empty answer."""
  plain = " ".join(text.split()).casefold().strip("$ .")
  digits = _THOUSANDS.sub("", plain)
  if _NUMBER.fullmatch(digits):
    return format(decimal.Decimal(digits).normalize(), "f")
  return plain or None
