"""Sums of two numbers."""

import functools

import numpy as np

from experiments.tasks import answers, base


class Addition(base.Task):
  """Sums of two numbers, as a chat.

  The reward is 1 if the last number of the completion is the sum, else 0 (see
  `last_number`). The split ignores the order of a pair: 3 + 5 is held out
  exactly if 5 + 3 is, so held-out accuracy does not measure recall of the
  mirrored sum. Each pass over the training pairs is a new permutation.
  """

  examples_in = ("_pairs",)

  def __init__(self, digits: str, seed: int):
    """Creates the task; see `make_task`.

    Args:
      digits: Most digits of either number, `'1'` to `'3'`.
      seed: Random seed of the order of the training examples.

    Raises:
      ValueError: If `digits` is anything else.
    """
    if digits not in ("1", "2", "3"):
      raise ValueError(f"task 'addition:{digits}': digits must be 1, 2 or 3")
    self.name = "addition" if digits == "1" else f"addition:{digits}"
    self._digits = digits
    self._seed = seed

  def train(self, index: int) -> base.Example:
    """Returns the example at a position of the endless, reshuffled sequence."""
    pairs, _ = self._pairs
    return self._example(pairs[base.shuffled(self._seed, index, len(pairs))])

  def heldout(self) -> list[base.Example]:
    """Returns all held-out sums, about a fifth of all sums."""
    return [self._example(pair) for pair in self._pairs[1]]

  def reward(self, example: base.Example, completion: str) -> float:
    """Returns 1.0 if the last number is the answer, else 0.0."""
    right = int(example.columns["answer"])
    return float(answers.last_number(completion) == right)

  def well_formed(self, example: base.Example, completion: str) -> bool:
    """Whether the response is one number and nothing else."""
    del example
    return (
        answers.plain_number(completion.strip().removesuffix(".")) is not None
    )

  @functools.cached_property
  def _pairs(self):
    """Training pairs and held-out pairs."""
    n = 10 ** int(self._digits)
    unordered = [(a, b) for a in range(n) for b in range(a, n)]
    order = np.random.default_rng(base.SPLIT_SEED).permutation(len(unordered))
    held = {unordered[i] for i in order[: len(unordered) // 5]}
    pairs = [(a, b) for a in range(n) for b in range(n)]
    heldout = [(a, b) for a, b in pairs if (min(a, b), max(a, b)) in held]
    train = sorted(set(pairs) - set(heldout))
    # Shuffled, so that a few taken from the start represent all of them.
    mixed = np.random.default_rng(base.SPLIT_SEED).permutation(len(heldout))
    return train, [heldout[i] for i in mixed]

  def _example(self, pair):
    a, b = pair
    return base.Example(
        prompt=base.user(f"What is {a} + {b}? Answer with the number only."),
        columns={"answer": str(a + b)},
        task=self.name,
    )
