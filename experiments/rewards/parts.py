"""A reward as a weighted sum of named parts."""

from collections.abc import Callable
from typing import NamedTuple

from experiments.tasks import base, functions, grammar

Part = Callable[[base.Example, str], float]
_BUILT_IN = ("correctness", "format")


class BadReward(ValueError):
  """A part returned something that is no reward: the program is wrong."""


class Rewards:
  """A task's reward of one response: `'correctness + 0.1*format'`.

  Parts:
    `correctness`: the task's own reward.
    `format`: 1 if the response ends in an answer of the form that the task
      asks for (its `well_formed`), else 0.
    `<module>:<function>`: a function of an example and a response that returns
      a number.

  Attributes:
    names: of the parts; a function's is its own, without the module.
    weights: one for each part.
  """

  def __init__(self, task: base.Task, text: str = "correctness"):
    """Finds the parts.

    Args:
      task: whose responses are scored.
      text: the weighted sum. White space surrounds its plus signs.

    Raises:
      ValueError: for a part that does not exist, or `format` of a task that
        has none.
    """
    self.task = task
    self.text = text
    parts = [
        _Weighted(weight, *_part(task, name))
        for weight, name in grammar.weighted_sum(text, "reward")
    ]
    self.names = tuple(part.name for part in parts)
    self.weights = tuple(part.weight for part in parts)
    self._functions = tuple(part.function for part in parts)
    for name in self.names:
      if self.names.count(name) > 1:
        raise ValueError(
            f"reward {text!r} has two parts called {name!r}: rename a function"
        )

  def __call__(self, example: base.Example, completion: str) -> list[float]:
    """The value of each part for one response.

    Args:
      example: what was asked.
      completion: the response.

    Returns:
      One finite number for each of `names`, not weighted.

    Raises:
      BadReward: a part returned anything else.
    """
    values = []
    for name, function in zip(self.names, self._functions, strict=True):
      value = function(example, completion)
      problem = base.not_a_reward(value)
      if problem:
        raise BadReward(
            f"task {example.task or self.task.name!r}, part {name!r} returned"
            f" {value!r}: {problem}"
        )
      values.append(float(value))
    return values


class _Weighted(NamedTuple):
  """A part and its weight."""

  weight: float
  name: str
  function: Part


def _part(task, name):
  """Name and function of a part."""
  if name == "correctness":
    return name, task.reward
  if name == "format":
    if not task.has_form():
      raise ValueError(
          f"reward part 'format': task {task.name!r} has no form of answers;"
          " write its well_formed"
      )
    return name, task.well_formed
  if ":" in name:
    return name.partition(":")[2], functions.load(name)
  known = [*_BUILT_IN, "<module>:<function>"]
  raise ValueError(base.unknown("reward part", name, known))
