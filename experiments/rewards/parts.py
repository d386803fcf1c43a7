"""Makes a reward from a weighted sum of named parts."""

from collections.abc import Callable
from typing import NamedTuple

from experiments.tasks import base, functions, grammar

Part = Callable[[base.Example, str], float]
_BUILT_IN = ("correctness", "format")


class BadReward(ValueError):
  """A part returned something other than a finite number: a bug in it."""


class Rewards:
  """The reward of one response, such as `'correctness + 0.1*format'`.

  Parts:
    `correctness`: The task's own reward.
    `format`: 1 if the response ends in an answer in the task's format (its
      `well_formed`), else 0.
    `<module>:<function>`: A function of an example and a response that returns
      a number.

  Attributes:
    names: The names of the parts; a function goes by its own name, without the
      module.
    weights: The weight of each part.
  """

  def __init__(self, task: base.Task, text: str = "correctness"):
    """Finds the parts.

    Args:
      task: The task whose responses are scored.
      text: The weighted sum. White space must surround its plus signs.

    Raises:
      ValueError: If a part is unknown, or `format` is asked of a task without
        an answer format.
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
            f"reward {text!r} has two parts called {name!r}: rename one of the"
            " functions"
        )

  def __call__(self, example: base.Example, completion: str) -> list[float]:
    """Computes the value of each part for one response.

    Args:
      example: The problem.
      completion: The response.

    Returns:
      One finite number for each of `names`, before its weight.

    Raises:
      BadReward: If a part returns anything else.
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
  """A part of the reward and its weight."""

  weight: float
  name: str
  function: Part


def _part(task, name):
  """Returns the name and the function of a part."""
  if name == "correctness":
    return name, task.reward
  if name == "format":
    if not task.has_form():
      raise ValueError(
          f"reward part 'format': task {task.name!r} has no answer format;"
          " implement its well_formed, or leave the part out"
      )
    return name, task.well_formed
  if ":" in name:
    return name.partition(":")[2], functions.load(name)
  known = [*_BUILT_IN, "<module>:<function>"]
  raise ValueError(base.unknown("reward part", name, known))
