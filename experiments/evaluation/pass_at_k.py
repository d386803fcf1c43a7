"""pass@k and maj@k of several responses to each problem."""

from collections import Counter
from collections.abc import Sequence
import decimal
import itertools
import math
import re

import numpy as np

from experiments import tasks
from experiments.tasks import answers as answers_lib

# Up to this many subsets maj@k is exact; above, as many are drawn.
_SUBSETS = 200
_THOUSANDS = re.compile(r"(?<=[0-9]),(?=[0-9]{3}\b)")
# No exponents: the decimal 1e999999 would be written out.
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")


def pass_at_k(n: int, correct: np.ndarray, k: int) -> np.ndarray:
  """Chance that at least one of k responses is right, without bias.

  Of n responses to a problem c are right. A subset of k has a right one with
  probability 1 - C(n - c, k) / C(n, k) = 1 - ∏_{i = n - c + 1}^{n} (1 - k / i)
  (Chen et al. 2021, https://arxiv.org/abs/2107.03374, section 2.1); the
  product needs no large binomials.

  Args:
    n: responses to each problem.
    correct: `[N]` int, c of each problem, 0 to n.
    k: responses that one may choose from, 1 to n.

  Returns:
    `[N]` float64.

  Raises:
    ValueError: k or c is out of range.
  """
  check_k(n, k)
  correct = np.asarray(correct)
  if correct.size and not (0 <= correct.min() and correct.max() <= n):
    raise ValueError(f"correct must be 0 to n={n}, got {correct.tolist()}")
  # misses[c] is C(n - c, k) / C(n, k); a factor below 0 comes after one of 0.
  factors = np.maximum(1.0 - k / np.arange(n, 0, -1), 0.0)
  misses = np.concatenate([[1.0], np.cumprod(factors)])
  return 1.0 - misses[correct]


def maj_at_k(
    answers: Sequence[Sequence[str | None]], rewards: np.ndarray, k: int
) -> np.ndarray:
  """Expected reward of a majority vote over k of the responses.

  The most frequent answer wins, the one that came first where several are as
  frequent; responses without an answer do not vote. What wins earns the reward
  of the first response that gave it, and a vote without any answer 0. The
  expectation is over subsets of k responses in their order: over all of them,
  or over 200 random ones (always the same) where there are more.

  Args:
    answers: of the n responses to each of N problems; None is no answer.
    rewards: `[N, n]`.
    k: voters, 1 to n.

  Returns:
    `[N]` float64.

  Raises:
    ValueError: k is out of range.
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
  r"""What a completion votes for in `maj_at_k`, or None.

  In this order: what is between the last `<answer>` and `</answer>`, in the
  last `\boxed{...}`, or the last number. Numbers are compared by value, text
  without case and with single spaces.
  """
  for found in (_tagged(completion), answers_lib.boxed(completion)):
    if found is not None:
      return _normal(found)
  number = tasks.last_number(completion)
  return None if number is None else _normal(format(number, "f"))


def check_k(n: int, k: int) -> None:
  """Refuses a k that is not 1 to n."""
  if not 1 <= k <= n:
    raise ValueError(
        f"k={k} must be 1 to {n}, the responses to each problem: ask for more"
        " samples or a smaller k"
    )


def _subsets(n, k):
  """Sorted index tuples of k out of n: all, or `_SUBSETS` random ones."""
  check_k(n, k)
  if math.comb(n, k) <= _SUBSETS:
    return list(itertools.combinations(range(n), k))
  rng = np.random.default_rng(0)
  return [
      tuple(sorted(rng.choice(n, k, replace=False))) for _ in range(_SUBSETS)
  ]


def _vote(answers, rewards, subset):
  """Reward of the majority of a subset."""
  # A Counter lists equal counts in the order in which they came.
  votes = Counter(answers[i] for i in subset if answers[i] is not None)
  if not votes:
    return 0.0
  (winner, _), *_ = votes.most_common(1)
  return next(rewards[i] for i in subset if answers[i] == winner)


def _tagged(text):
  """The text in the last pair of answer tags, or None."""
  _, tag, rest = text.rpartition("<answer>")
  inside, end, _ = rest.partition("</answer>")
  return inside if tag and end else None


def _normal(text):
  """Answers that mean the same as the same text; None if there is none."""
  plain = " ".join(text.split()).casefold().strip("$ .")
  digits = _THOUSANDS.sub("", plain)
  if _NUMBER.fullmatch(digits):
    return format(decimal.Decimal(digits).normalize(), "f")
  return plain or None
