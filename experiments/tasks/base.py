"""What a task is: examples by index, and a reward of one response."""

import abc
from collections.abc import Iterable, Sequence
import difflib
import functools
import math
from typing import Any, ClassVar, NamedTuple

import numpy as np

Messages = list[dict[str, str]]

# The split must not depend on the seed of a run: accuracies of different runs
# are of the same prompts.
SPLIT_SEED = 20_261_001


class Example(NamedTuple):
  """One problem.

  Attributes:
    prompt: chat messages, `[{'role': 'user', 'content': ...}]`.
    columns: what the reward needs besides prompt and response, by name.
    task: name of the task that made it; in a mixture, of the part.
  """

  prompt: Messages
  columns: dict[str, Any]
  task: str = ""


class Task(abc.ABC):
  """What training and evaluation need of a task.

  A task is resumable from its position alone: `train(index)` is a pure
  function of the task's seed and the index.

  A task is pickled to the processes that score responses. Attributes named in
  `examples_in` stay behind: scoring sees the example itself.

  Attributes:
    name: what `make_task` was called with.
  """

  name: str
  examples_in: ClassVar[tuple[str, ...]] = ()

  @abc.abstractmethod
  def train(self, index: int) -> Example:
    """The training example at a position >= 0 of an endless sequence."""

  @abc.abstractmethod
  def heldout(self) -> list[Example]:
    """Examples whose prompts `train` never returns."""

  @abc.abstractmethod
  def reward(self, example: Example, completion: str) -> float:
    """How correct a response is: finite, 1 for a right answer."""

  def well_formed(self, example: Example, completion: str) -> bool:
    """Whether a response ends in an answer of the form the task asks for.

    Needed for the reward part `format` only.
    """
    raise NotImplementedError(
        f"task {self.name!r} has no form of answers: write its well_formed"
    )

  def has_form(self) -> bool:
    """Whether `well_formed` is written."""
    return type(self).well_formed is not Task.well_formed

  def __getstate__(self) -> dict[str, Any]:
    return {k: v for k, v in vars(self).items() if k not in self.examples_in}


def checked_rewards(
    task: Task, examples: Sequence[Example], completions: Sequence[str]
) -> np.ndarray:
  """The task's rewards of completions, in this process and without a limit.

  `experiments.rewards` scores with other parts, a time limit and in other
  processes.

  Args:
    task: the task that the examples are from.
    examples: one per completion; repeated for each response of a group.
    completions: decoded responses.

  Returns:
    `[len(completions)]` float32.

  Raises:
    ValueError: if a reward is not a finite number; names the task, the index
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
  """Refuses lists of different lengths."""
  if len(examples) != len(completions):
    raise ValueError(
        f"examples and completions must pair up, got {len(examples)} and "
        f"{len(completions)}"
    )


def not_a_reward(value: Any) -> str:
  """What is wrong with a value as a reward, or ''."""
  try:
    finite = not isinstance(value, str) and math.isfinite(float(value))
  except (TypeError, ValueError, OverflowError):
    finite = False
  return "" if finite else "a reward must be a finite number"


def shuffled(seed: int, index: int, size: int) -> int:
  """Position `index` of an endless sequence of seeded permutations."""
  check_index(index)
  epoch, position = divmod(index, size)
  return int(_permutation(seed, epoch, size)[position])


@functools.lru_cache(maxsize=8)
def _permutation(seed, epoch, size):
  """The order of a pass; training asks for its positions one by one."""
  return np.random.default_rng([seed, epoch]).permutation(size)


def check_index(index: int) -> None:
  """Refuses a position before the first."""
  if index < 0:
    raise ValueError(f"index must be at least 0, got {index}")


def check_heldout_size(size: Any) -> None:
  """Refuses a held-out set that is empty or not a count."""
  if not isinstance(size, int) or isinstance(size, bool) or size < 1:
    raise ValueError(f"heldout_size must be a positive int, got {size!r}")


def check_instruction(instruction: Any) -> None:
  """Refuses an instruction that is no text."""
  if not isinstance(instruction, str):
    raise ValueError(f"instruction must be a string, got {instruction!r}")


def user(content: str) -> Messages:
  """A chat of one user message."""
  return [{"role": "user", "content": content}]


def instruct(chat: Messages, instruction: str) -> Messages:
  """The chat with an instruction below its last message; '' adds nothing."""
  if not instruction:
    return chat
  *before, last = chat
  return [*before, {**last, "content": f"{last['content']}\n\n{instruction}"}]


def unknown(what: str, name: str, known: Iterable[str]) -> str:
  """Message for a name that is not known, with its nearest relatives."""
  known = sorted(known)
  near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
  hint = (
      f"did you mean {' or '.join(map(repr, near))}?"
      if near
      else f"known: {', '.join(known) or 'none'}"
  )
  return f"unknown {what} {name!r}; {hint}"
