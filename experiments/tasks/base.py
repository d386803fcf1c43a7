"""What a task is: examples by index, and the reward of one response."""

import abc
from collections.abc import Iterable, Sequence
import difflib
import functools
import math
from typing import Any, ClassVar, NamedTuple

import numpy as np

Messages = list[dict[str, str]]

# The split does not depend on the seed of a run, so that all runs are evaluated
# on the same prompts.
SPLIT_SEED = 20_261_001


class Example(NamedTuple):
  """One problem.

  Attributes:
    prompt: Chat messages, `[{'role': 'user', 'content': ...}]`.
    columns: What the reward needs besides prompt and response, by name.
    task: Name of the task that made the example; in a mixture, that of the
      component.
  """

  prompt: Messages
  columns: dict[str, Any]
  task: str = ""


class Task(abc.ABC):
  """Gives training and evaluation their prompts, and scores responses.

  A run resumes from its position alone: `train(index)` is a pure function of
  the task's seed and the index.

  A task is pickled and sent to the processes that score responses. Attributes
  named in `examples_in` are left out, because scoring is given the example.

  Attributes:
    name: What `make_task` was called with.
  """

  name: str
  examples_in: ClassVar[tuple[str, ...]] = ()

  @abc.abstractmethod
  def train(self, index: int) -> Example:
    """Returns the training example at a position of an endless sequence.

    Args:
      index: The position, at least 0.
    """

  @abc.abstractmethod
  def heldout(self) -> list[Example]:
    """Returns examples whose prompts `train` never returns."""

  @abc.abstractmethod
  def reward(self, example: Example, completion: str) -> float:
    """Returns how correct a response is: a finite number, 1 if it is right."""

  def well_formed(self, example: Example, completion: str) -> bool:
    """Returns whether a response ends in an answer in the task's format.

    Only the reward part `format` needs this method.
    """
    raise NotImplementedError(
        f"task {self.name!r} has no answer format: implement its well_formed"
    )

  def has_form(self) -> bool:
    """Returns whether the task implements `well_formed`."""
    return type(self).well_formed is not Task.well_formed

  def __getstate__(self) -> dict[str, Any]:
    return {k: v for k, v in vars(self).items() if k not in self.examples_in}


def checked_rewards(
    task: Task, examples: Sequence[Example], completions: Sequence[str]
) -> np.ndarray:
  """Scores completions by the task's reward in this process, without a limit.

  `experiments.rewards` scores in other processes, with a time limit and with
  further reward parts.

  Args:
    task: The task that the examples are from.
    examples: One per completion; repeated for each response of a group.
    completions: Decoded responses.

  Returns:
    `[len(completions)]` float32.

  Raises:
    ValueError: If a reward is not a finite number; names the task, the index
      and the value.
  """
  check_pairs(examples, completions)
  rewards = []
  for i, (example, text) in enumerate(zip(examples, completions, strict=True)):
    value = task.reward(example, text)
    problem = not_a_reward(value)
    if problem:
      raise ValueError(
          f"task {example.task or task.name!r} returned reward {value!r} at"
          f" index {i}, for completion {text!r}: {problem}"
      )
    rewards.append(float(value))
  return np.asarray(rewards, np.float32)


def check_pairs(
    examples: Sequence[Example], completions: Sequence[str]
) -> None:
  """Raises ValueError if the lists differ in length."""
  if len(examples) != len(completions):
    raise ValueError(
        "examples and completions must pair up, got"
        f" {len(examples)} and {len(completions)}"
    )


def not_a_reward(value: Any) -> str:
  """Says why a value cannot be a reward; '' if it can."""
  try:
    finite = not isinstance(value, str) and math.isfinite(float(value))
  except (TypeError, ValueError, OverflowError):
    finite = False
  return "" if finite else "a reward must be a finite number"


def shuffled(seed: int, index: int, size: int) -> int:
  """Returns element `index` of an endless sequence of seeded permutations.

  Args:
    seed: Random seed of the permutations.
    index: The position in the sequence, at least 0.
    size: Number of elements that are permuted, 0 to `size - 1`.
  """
  check_index(index)
  epoch, position = divmod(index, size)
  return int(_permutation(seed, epoch, size)[position])


@functools.lru_cache(maxsize=8)
def _permutation(seed, epoch, size):
  """The order of a pass, cached as training takes its elements one by one."""
  return np.random.default_rng([seed, epoch]).permutation(size)


def check_index(index: int) -> None:
  """Raises ValueError for a negative position."""
  if index < 0:
    raise ValueError(f"index must be at least 0, got {index}")


def check_heldout_size(size: Any) -> None:
  """Raises ValueError for a size that is not a positive int."""
  if not isinstance(size, int) or isinstance(size, bool) or size < 1:
    raise ValueError(f"heldout_size must be a positive int, got {size!r}")


def check_instruction(instruction: Any) -> None:
  """Raises ValueError for an instruction that is not a string."""
  if not isinstance(instruction, str):
    raise ValueError(f"instruction must be a string, got {instruction!r}")


def user(content: str) -> Messages:
  """Makes a chat of one user message."""
  return [{"role": "user", "content": content}]


def instruct(chat: Messages, instruction: str) -> Messages:
  """Puts an instruction below the last message of a chat; '' adds nothing."""
  if not instruction:
    return chat
  *before, last = chat
  return [*before, {**last, "content": f"{last['content']}\n\n{instruction}"}]


def unknown(what: str, name: str, known: Iterable[str]) -> str:
  """Words the error for an unknown name, with the most similar known names."""
  known = sorted(known)
  near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
  hint = (
      f"did you mean {' or '.join(map(repr, near))}?"
      if near
      else f"known: {', '.join(known) or 'none'}"
  )
  return f"unknown {what} {name!r}; {hint}"
