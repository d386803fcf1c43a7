"""Tasks: prompts by index, and verifiable rewards of completions.

A task is resumable from its position alone: `train(index)` is a pure function
of the task's seed and the index. Held-out prompts are never trained on.
"""

from collections.abc import Sequence
import decimal
import difflib
import functools
import json
import math
import pathlib
import re
from typing import Any, NamedTuple, Protocol

import numpy as np

from experiments import extras

Messages = list[dict[str, str]]

# ASCII digits only, with thousands separators and decimals. A sign counts
# unless a digit precedes it: "3-8" are the numbers 3 and 8.
_NUMBER = re.compile(
    r"(?<![\w.])(?:(?<!\d)-)?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?"
)
# The split must not depend on the seed of a run: accuracies of different runs
# are of the same prompts.
_SPLIT_SEED = 20_261_001
# Data sets of reasoning-gym are drawn in blocks: some of them prepare all
# their items when created.
_BLOCK = 10_000


class Example(NamedTuple):
  """One problem.

  Attributes:
    prompt: chat messages, `[{'role': 'user', 'content': ...}]`.
    columns: what the reward needs besides prompt and completion, by name.
  """

  prompt: Messages
  columns: dict[str, Any]


class Task(Protocol):
  """What training and evaluation need of a task.

  Attributes:
    name: what `make_task` was called with.
  """

  name: str

  def train(self, index: int) -> Example:
    """The training example at a position >= 0 of an endless sequence."""
    ...

  def heldout(self) -> list[Example]:
    """Examples whose prompts `train` never returns."""
    ...

  def reward(
      self,
      prompts: Sequence[Messages],
      completions: Sequence[str],
      **columns: Sequence[Any],
  ) -> list[float]:
    """One finite reward per completion; columns as in the examples."""
    ...


def make_task(name: str, seed: int, **options: Any) -> Task:
  """Builds a task by name.

  Args:
    name: `'addition'` or `'addition:<digits>'`; `'reasoning_gym:<data set>'`
      (extra `tasks`); or `'jsonl:<path>'`, a file of `{"prompt": ...,
      "answer": ...}` lines whose prompt is a string or a list of chat messages.
    seed: order (and for procedural data sets content) of the training
      examples. Held-out examples do not depend on it.
    **options: keyword arguments of the task's class, for example
      `heldout_size`; for reasoning-gym also the data set's own configuration.

  Returns:
    A `Task`.

  Raises:
    ValueError: if the name is unknown; names the nearest known ones.
  """
  kind, _, argument = name.partition(":")
  if kind not in _TASKS:
    raise ValueError(_unknown("task", name, list(_TASKS)))
  if kind == "addition":
    argument = argument or "1"
  if not argument:
    raise ValueError(f"task must be {_TASKS[kind][1]}, got {name!r}")
  return _TASKS[kind][0](argument, seed, **options)


def checked_rewards(
    task: Task, examples: Sequence[Example], completions: Sequence[str]
) -> np.ndarray:
  """Rewards of completions, refused unless one finite number each.

  Args:
    task: the task that the examples are from.
    examples: one per completion; repeated for each response of a group.
    completions: decoded responses.

  Returns:
    `[len(completions)]` float32.

  Raises:
    ValueError: if the task returns another number of rewards, or one that is
      not finite; names the task, the index and the value.
  """
  if len(examples) != len(completions):
    raise ValueError(
        f"examples and completions must pair up, got {len(examples)} and "
        f"{len(completions)}"
    )
  if not examples:
    return np.zeros(0, np.float32)
  columns = {
      name: [example.columns[name] for example in examples]
      for name in examples[0].columns
  }
  prompts = [example.prompt for example in examples]
  rewards = task.reward(prompts, list(completions), **columns)
  if len(rewards) != len(completions):
    raise ValueError(
        f"task {task.name!r} returned {len(rewards)} rewards for "
        f"{len(completions)} completions: return one for each"
    )
  for index, value in enumerate(rewards):
    if not math.isfinite(value):
      raise ValueError(
          f"task {task.name!r} returned reward {value!r} at index {index}, "
          f"for completion {completions[index]!r}: rewards must be finite"
      )
  return np.asarray(rewards, np.float32)


def last_number(text: str) -> decimal.Decimal | None:
  """The last number written in digits, or None.

  Only the last one counts, so a response that lists every candidate makes a
  single guess like any other. `'8.0'` is 8, `'8.5'` is not, and `'1,024'` is
  1024.
  """
  matches = _NUMBER.findall(text)
  if not matches:
    return None
  return decimal.Decimal(matches[-1].replace(",", ""))


class Addition:
  """Sums of two numbers, as a chat.

  The reward is 1 if the last number of the completion is the sum, else 0 (see
  `last_number`). Pairs are split without order: 3 + 5 is held out exactly if
  5 + 3 is, so held-out accuracy does not measure recall of the mirrored sum.
  Each pass over the training pairs is a new permutation.
  """

  def __init__(self, digits: str, seed: int):
    """See `make_task`.

    Args:
      digits: that either number has at most; `'1'` to `'3'`.
      seed: order of the training examples.
    """
    if digits not in ("1", "2", "3"):
      raise ValueError(f"task 'addition:{digits}': digits must be 1, 2 or 3")
    self.name = "addition" if digits == "1" else f"addition:{digits}"
    self._seed = seed
    n = 10 ** int(digits)
    unordered = [(a, b) for a in range(n) for b in range(a, n)]
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(unordered))
    held = {unordered[i] for i in order[: len(unordered) // 5]}
    pairs = [(a, b) for a in range(n) for b in range(n)]
    heldout = [(a, b) for a, b in pairs if (min(a, b), max(a, b)) in held]
    self._train = sorted(set(pairs) - set(heldout))
    # Shuffled, so that the first of them are like the rest.
    mixed = np.random.default_rng(_SPLIT_SEED).permutation(len(heldout))
    self._heldout = [heldout[i] for i in mixed]

  def train(self, index: int) -> Example:
    """The example at a position of the endless, reshuffled sequence."""
    return self._example(
        self._train[_shuffled(self._seed, index, len(self._train))]
    )

  def heldout(self) -> list[Example]:
    """All held-out sums, about a fifth of all."""
    return [self._example(pair) for pair in self._heldout]

  def reward(self, prompts, completions, *, answer) -> list[float]:
    """1.0 where the last number is the answer, else 0.0."""
    del prompts
    return [
        float(last_number(completion) == int(right))
        for completion, right in zip(completions, answer, strict=True)
    ]

  def _example(self, pair):
    a, b = pair
    return Example(
        prompt=_user(f"What is {a} + {b}? Answer with the number only."),
        columns={"answer": str(a + b)},
    )


class ReasoningGym:
  """A procedural data set of reasoning-gym with its own scorer.

  The scored text is what stands between the last `<answer>` and `</answer>`,
  or the whole completion where there are no such tags.
  """

  def __init__(
      self, dataset: str, seed: int, *, heldout_size: int = 64, **config: Any
  ):
    """See `make_task`; config goes to the data set (`max_digits=2`, ...)."""
    _check_heldout_size(heldout_size)
    factory = extras.require("reasoning_gym.factory", "tasks")
    if dataset not in factory.DATASETS:
      raise ValueError(
          _unknown("reasoning_gym data set", dataset, list(factory.DATASETS))
      )
    self.name = f"reasoning_gym:{dataset}"
    self._create = functools.partial(factory.create_dataset, dataset, **config)
    self._seed = seed
    # One block is kept: training walks through them in order.
    self._block = functools.lru_cache(maxsize=1)(self._make_block)
    held = self._create(seed=_SPLIT_SEED, size=heldout_size)
    self._score = held.score_answer
    by_question = {
        entry["question"]: entry
        for entry in (held[i] for i in range(heldout_size))
    }
    self._heldout = list(by_question.values())
    self._questions = frozenset(by_question)

  def train(self, index: int) -> Example:
    """The example at a position; a held-out question is drawn again."""
    block, offset = divmod(index, _BLOCK)
    entry = self._block(block)[offset]
    for attempt in range(1, 101):
      if entry["question"] not in self._questions:
        return self._example(entry)
      # Other items of this block, a pure function of index and attempt.
      other = np.random.default_rng([self._seed, index, attempt])
      entry = self._block(block)[int(other.integers(_BLOCK))]
    raise ValueError(
        f"{self.name} has too few different questions to hold out "
        f"{len(self._questions)}: lower heldout_size"
    )

  def heldout(self) -> list[Example]:
    """At most `heldout_size` examples with different questions."""
    return [self._example(entry) for entry in self._heldout]

  def reward(self, prompts, completions, *, entry) -> list[float]:
    """The data set's own score of each completion."""
    del prompts
    return [
        self._scored(completion, one)
        for completion, one in zip(completions, entry, strict=True)
    ]

  def _scored(self, completion, entry):
    """Score of one completion; 0 where the scorer fails on it."""
    tagged = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    answer = (tagged[-1] if tagged else completion).strip()
    try:
      return float(self._score(answer, entry))
    except Exception:
      # Many scorers parse the answer and raise on text that is none. A
      # scorer that is broken altogether raises on its own answer as well.
      if entry["answer"] is not None:
        float(self._score(entry["answer"], entry))
      return 0.0

  def _make_block(self, block):
    """The data set of one block of training positions."""
    mixed = np.random.SeedSequence([self._seed, block]).generate_state(1)[0]
    # reasoning-gym seeds item i with seed + i: neighbouring seeds would share
    # items, hence the mixing.
    return self._create(seed=int(mixed), size=_BLOCK)

  def _example(self, entry):
    instruction = "Give the final answer between <answer> and </answer>."
    return Example(
        prompt=_user(f"{entry['question']}\n\n{instruction}"),
        columns={"entry": entry},
    )


class Jsonl:
  """Problems and answers of a JSON-lines file.

  The reward is 1 if the last number of the completion equals the answer, for
  an answer that is a number; otherwise if the two are the same text up to
  case and white space.
  """

  def __init__(self, path: str, seed: int, *, heldout_size: int = 64):
    """Reads the whole file; see `make_task`.

    Args:
      path: the file; blank lines are skipped.
      seed: order of the training examples.
      heldout_size: prompts to hold out, at most half of the different ones.

    Raises:
      ValueError: for a line that is not such an object (named by its number),
        or a file with fewer than two different prompts.
    """
    _check_heldout_size(heldout_size)
    self.name = f"jsonl:{path}"
    self._seed = seed
    groups: dict[str, list[Example]] = {}
    lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
      if line.strip():
        example = _parse_line(line, f"{path}:{number}")
        groups.setdefault(json.dumps(example.prompt), []).append(example)
    if len(groups) < 2:
      raise ValueError(
          f"{path} needs at least two different prompts, one of them to hold "
          f"out, got {len(groups)}"
      )
    # Examples of the same prompt stay together on one side of the split.
    parts = list(groups.values())
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(parts))
    held = set(order[: min(heldout_size, len(parts) // 2)].tolist())
    self._heldout = [x for i in sorted(held) for x in parts[i]]
    self._train = [
        x for i, part in enumerate(parts) if i not in held for x in part
    ]

  def train(self, index: int) -> Example:
    """The example at a position of the endless, reshuffled sequence."""
    return self._train[_shuffled(self._seed, index, len(self._train))]

  def heldout(self) -> list[Example]:
    """The held-out lines, in the file's order of prompts."""
    return list(self._heldout)

  def reward(self, prompts, completions, *, answer) -> list[float]:
    """1.0 where the completion gives the answer, else 0.0."""
    del prompts
    return [
        float(_same_answer(completion, right))
        for completion, right in zip(completions, answer, strict=True)
    ]


_TASKS = {
    "addition": (Addition, "'addition' or 'addition:<digits>'"),
    "reasoning_gym": (ReasoningGym, "'reasoning_gym:<data set>'"),
    "jsonl": (Jsonl, "'jsonl:<path>'"),
}


def _unknown(what, name, known):
  """Message for a name that is not known, with its nearest relatives."""
  near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
  hint = (
      f"did you mean {' or '.join(map(repr, near))}?"
      if near
      else (f"known: {', '.join(sorted(known))}")
  )
  return f"unknown {what} {name!r}; {hint}"


def _check_heldout_size(size):
  """Refuses a held-out set that is empty or not a count."""
  if not isinstance(size, int) or isinstance(size, bool) or size < 1:
    raise ValueError(f"heldout_size must be a positive int, got {size!r}")


def _shuffled(seed, index, size):
  """Position `index` of an endless sequence of seeded permutations."""
  if index < 0:
    raise ValueError(f"index must be at least 0, got {index}")
  epoch, position = divmod(index, size)
  order = np.random.default_rng([seed, epoch]).permutation(size)
  return int(order[position])


def _user(content):
  """A chat of one user message."""
  return [{"role": "user", "content": content}]


def _parse_line(line, where):
  """An example from one line; `where` names it in errors."""
  try:
    row = json.loads(line)
  except json.JSONDecodeError as error:
    raise ValueError(f"{where}: not JSON: {error}") from error
  if not isinstance(row, dict) or not {"prompt", "answer"} <= row.keys():
    raise ValueError(
        f"{where}: must be an object with 'prompt' and 'answer', got "
        f"{line[:80]!r}"
    )
  prompt, answer = row["prompt"], row["answer"]
  if isinstance(prompt, str) and prompt.strip():
    prompt = _user(prompt)
  if not _is_chat(prompt):
    raise ValueError(
        f"{where}: 'prompt' must be a non-empty string or a list of "
        f"{{'role': ..., 'content': ...}}, got {prompt!r}"
    )
  if isinstance(answer, bool) or not isinstance(answer, str | int | float):
    raise ValueError(
        f"{where}: 'answer' must be a string or a number, got {answer!r}"
    )
  if not str(answer).strip():
    raise ValueError(f"{where}: 'answer' must not be empty")
  return Example(prompt, {"answer": str(answer)})


def _is_chat(prompt):
  """Whether this is a non-empty list of messages with text."""
  return (
      isinstance(prompt, list)
      and bool(prompt)
      and all(
          isinstance(message, dict)
          and isinstance(message.get("role"), str)
          and isinstance(message.get("content"), str)
          for message in prompt
      )
  )


def _same_answer(completion, answer):
  """Equality as numbers if the answer is one, else as text."""
  plain = answer.strip().replace(",", "")
  try:
    number = decimal.Decimal(plain)
  except decimal.InvalidOperation:
    number = None
  if number is not None and number.is_finite():
    return last_number(completion) == number
  return _folded(completion) == _folded(answer)


def _folded(text):
  """Text without case and with single spaces."""
  return " ".join(text.split()).casefold()
