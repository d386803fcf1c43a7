"""Procedural data sets of reasoning-gym, each with its own scorer."""

import dataclasses
import functools
import re
from typing import Any

import numpy as np

from experiments import _optional
from experiments.tasks import answers, base

# Data sets are drawn in blocks, because some prepare all their items when they
# are created.
_BLOCK = 10_000
# Options in addition to the fields of the data set's configuration.
_OPTIONS = ("heldout_size", "instruction", "verifier")
INSTRUCTION = "Give the final answer between <answer> and </answer>."
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class ReasoningGym(base.Task):
  """A procedural data set of reasoning-gym with its own scorer.

  The scored text is the one between the last `<answer>` and `</answer>`, or the
  whole completion if there are no such tags.
  """

  def __init__(
      self,
      dataset: str,
      seed: int,
      *,
      heldout_size: int = 64,
      instruction: str = INSTRUCTION,
      verifier: str | None = None,
      **config: Any,
  ):
    """Creates the task; see `make_task`.

    Args:
      dataset: The name of the data set in reasoning-gym.
      seed: Random seed of the training examples.
      heldout_size: Most questions to hold out.
      instruction: Text put below each question; '' adds nothing.
      verifier: Compare answers as `Problems` does (`'number'`, `'math'` or
        `'text'`) instead of by the data set's own scorer.
      **config: Fields of the data set's configuration (`max_digits=2`, ...).

    Raises:
      ValueError: If the data set or a field is unknown, the data set refuses a
        value, or the verifier cannot compare its answers.
      ImportError: If reasoning-gym (extra `tasks`) is not installed.
    """
    base.check_heldout_size(heldout_size)
    base.check_instruction(instruction)
    answers.check_verifier(verifier)
    factory = _optional.require("reasoning_gym.factory", "tasks")
    if dataset not in factory.DATASETS:
      raise ValueError(
          base.unknown("reasoning_gym data set", dataset, factory.DATASETS)
      )
    if dataset == "composite":
      raise ValueError(
          "reasoning_gym:composite is a mixture: write the sum of its data"
          " sets, as in '0.5*reasoning_gym:gcd + 0.5*reasoning_gym:lcm'"
      )
    self.name = f"reasoning_gym:{dataset}"
    _check_fields(self.name, factory.DATASETS[dataset][1], config)
    self._dataset, self._config = dataset, config
    self._instruction, self._verifier = instruction, verifier
    self._create = functools.partial(factory.create_dataset, dataset, **config)
    self._seed = seed
    self._heldout_size = heldout_size
    try:
      self._held = self._create(seed=base.SPLIT_SEED, size=heldout_size)
    except (AssertionError, TypeError, ValueError) as error:
      raise ValueError(f"{self.name} refuses {config}: {error}") from error
    if verifier is not None:
      self.heldout()  # Raises if the verifier cannot compare the answers.
    if verifier == "math":
      answers.prepare()  # Else the first response might exceed its time limit.

  def __reduce__(self):
    make = functools.partial(
        type(self),
        heldout_size=self._heldout_size,
        instruction=self._instruction,
        verifier=self._verifier,
        **self._config,
    )
    return make, (self._dataset, self._seed), {"name": self.name}

  def train(self, index: int) -> base.Example:
    """Returns the example at a position; replaces held-out questions."""
    base.check_index(index)
    block, offset = divmod(index, _BLOCK)
    entry = self._block(block)[offset]
    for attempt in range(1, 101):
      if entry["question"] not in self._heldout:
        return self._example(entry)
      # Another item of this block: a pure function of index and attempt.
      other = np.random.default_rng([self._seed, index, attempt])
      entry = self._block(block)[int(other.integers(_BLOCK))]
    raise ValueError(
        f"{self.name} has too few different questions to hold out"
        f" {len(self._heldout)}: lower heldout_size"
    )

  def heldout(self) -> list[base.Example]:
    """Returns at most `heldout_size` examples with different questions."""
    return [self._example(entry) for entry in self._heldout.values()]

  def reward(self, example: base.Example, completion: str) -> float:
    """Returns the data set's own score; 0 if the scorer fails on the response.

    With a verifier: 1 for an equal answer, else 0.
    """
    entry = example.columns["entry"]
    tagged = _TAGGED.findall(completion)
    answer = (tagged[-1] if tagged else completion).strip()
    if self._verifier is not None:
      return float(answers.same(answer, example.columns["right"]))
    try:
      return float(self._held.score_answer(answer, entry))
    except Exception:
      # Many scorers parse the response and raise if they cannot. A scorer that
      # is broken altogether raises on the right answer as well.
      if entry["answer"] is not None:
        float(self._held.score_answer(entry["answer"], entry))
      return 0.0

  def well_formed(self, example: base.Example, completion: str) -> bool:
    """Returns whether the response has one tagged answer and ends with it."""
    del example
    tagged = _TAGGED.findall(completion)
    once = completion.count("<answer>") == completion.count("</answer>") == 1
    ends = completion.rstrip().endswith("</answer>")
    return once and ends and bool(tagged) and bool(tagged[0].strip())

  @functools.cached_property
  def _heldout(self):
    """Held-out entries by question."""
    entries = (self._held[i] for i in range(self._heldout_size))
    return {entry["question"]: entry for entry in entries}

  @functools.cached_property
  def _block(self):
    """The data set of a block; the last one is cached."""
    return functools.lru_cache(maxsize=1)(self._make_block)

  def _make_block(self, block):
    """Creates the data set of a block."""
    mixed = np.random.SeedSequence([self._seed, block]).generate_state(1)[0]
    # reasoning-gym seeds item i with seed + i, so that neighbouring seeds would
    # share items if they were not mixed.
    return self._create(seed=int(mixed), size=_BLOCK)

  def _example(self, entry):
    """Makes an example of an entry of the data set."""
    columns = {"entry": entry}
    if self._verifier is not None:
      try:
        right = answers.parse(str(entry["answer"]), self._verifier)
      except ValueError as error:
        raise ValueError(
            f"{self.name}: verifier={self._verifier!r} cannot compare answers"
            f" to {entry['question'][:80]!r}: {error}"
        ) from error
      columns["right"] = right
    prompt = base.instruct(base.user(entry["question"]), self._instruction)
    return base.Example(prompt, columns, self.name)


def _check_fields(name, config_class, config):
  """Raises ValueError for options that the configuration does not have."""
  known = {field.name for field in dataclasses.fields(config_class)}
  known -= {"seed", "size"}  # Set by the task.
  for key in config:
    if key not in known:
      raise ValueError(
          base.unknown(f"option of {name}", key, {*known, *_OPTIONS})
      )
