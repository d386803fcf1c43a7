r"""Problems with answers, from a JSON-lines or Parquet file or from Python.

A row has a prompt (`prompt`, `question` or `problem`) and a right answer
(`answer` or `solution`; see `answers.parse`). If a row has several of these
fields, the first in this order counts. Its other fields become columns.
"""

from collections.abc import Iterable, Iterator
import json
import pathlib
from typing import Any

import numpy as np

from experiments import _optional
from experiments.tasks import answers, base

PROMPT_FIELDS = ("prompt", "question", "problem")
ANSWER_FIELDS = ("answer", "solution")

_Rows = Iterator[tuple[str, Any]]


class Problems(base.Task):
  """Problems and answers in given rows; the reward is 1 for a right answer."""

  examples_in = ("_train", "_heldout")

  def __init__(
      self,
      name: str,
      rows: Iterable[tuple[str, Any]],
      seed: int,
      *,
      heldout_size: int = 64,
      heldout_rows: Iterable[tuple[str, Any]] | None = None,
      instruction: str = "",
      verifier: str | None = None,
  ):
    r"""Reads all rows; see `make_task`.

    Args:
      name: Name of the task.
      rows: Pairs of a row's origin (for errors) and the row.
      seed: Random seed of the order of the training examples.
      heldout_size: Prompts to hold out, at most half of the different ones.
      heldout_rows: Rows to hold out instead; training rows with the same prompt
        are left out.
      instruction: Text appended to the last message of each prompt, for example
        `'Put the final answer in \boxed{}.'`.
      verifier: `'number'`, `'math'` or `'text'`; by default chosen by the form
        of each answer, see `answers`.

    Raises:
      ValueError: If a row is not a problem, no verifier parses its answer (both
        with the row's origin), or there are fewer than two different prompts.
    """
    base.check_heldout_size(heldout_size)
    answers.check_verifier(verifier)
    base.check_instruction(instruction)
    self.name = name
    self._seed = seed
    parts = _by_prompt(rows, instruction, verifier)
    if heldout_rows is None:
      held = _split(list(parts), heldout_size, name)
      self._heldout = [x for key in held for x in parts[key]]
    else:
      own = _by_prompt(heldout_rows, instruction, verifier)
      held = list(own)
      self._heldout = [x for part in own.values() for x in part]
    skip = set(held)
    self._has_formulas = any(
        x.columns["verifier"] == "math"
        for part in (*parts.values(), self._heldout)
        for x in part
    )
    self._train = [
        x for k, part in parts.items() if k not in skip for x in part
    ]
    if not self._train or not self._heldout:
      raise ValueError(
          f"{name} needs problems to train on and to hold out, got"
          f" {len(self._train)} and {len(self._heldout)}: add rows with other"
          " prompts"
      )

  def __setstate__(self, state: dict[str, Any]) -> None:
    vars(self).update(state)
    if self._has_formulas:
      answers.prepare()  # Else the first response might exceed its time limit.

  def train(self, index: int) -> base.Example:
    """Returns the example at a position of the endless, reshuffled sequence."""
    row = base.shuffled(self._seed, index, len(self._train))
    return self._train[row]._replace(task=self.name)

  def heldout(self) -> list[base.Example]:
    """Returns the held-out rows, in the order of their prompts."""
    return [x._replace(task=self.name) for x in self._heldout]

  def reward(self, example: base.Example, completion: str) -> float:
    """Returns 1.0 if the completion gives the answer, else 0.0."""
    columns = example.columns
    right = answers.Answer(columns["answer"], columns["verifier"])
    return float(answers.same(completion, right))

  def well_formed(self, example: base.Example, completion: str) -> bool:
    r"""Returns whether the response ends in `\boxed{...}` or `#### ...`."""
    del example
    return answers.ends_in_answer(completion)


class Jsonl(Problems):
  """Problems from a file with one JSON object on each line."""

  def __init__(
      self, path: str, seed: int, *, heldout: str | None = None, **options: Any
  ):
    """Reads the file; see `make_task`.

    Args:
      path: The file; blank lines are skipped.
      seed: Random seed of the order of the training examples.
      heldout: A file of held-out problems in the same format.
      **options: Further arguments of `Problems`.

    Raises:
      ValueError: If a file is not valid; names the line.
      OSError: If a file cannot be read.
    """
    held = None if heldout is None else _json_lines(heldout)
    name = f"jsonl:{path}"
    super().__init__(
        name, _json_lines(path), seed, heldout_rows=held, **options
    )


class Parquet(Problems):
  """Problems from a Parquet file (extra `tasks`)."""

  def __init__(
      self, path: str, seed: int, *, heldout: str | None = None, **options: Any
  ):
    """Reads the file; see `Jsonl`."""
    held = None if heldout is None else _parquet_rows(heldout)
    name = f"parquet:{path}"
    super().__init__(
        name, _parquet_rows(path), seed, heldout_rows=held, **options
    )


def _json_lines(path) -> _Rows:
  """Yields each line of a file with its place."""
  try:
    lines = pathlib.Path(path).read_text(encoding="utf-8").split("\n")
  except UnicodeDecodeError as error:
    raise ValueError(f"{path}: not UTF-8 text: {error}") from error
  for number, line in enumerate(lines, start=1):
    where = f"{path}:{number}"
    if line.strip():
      try:
        yield where, json.loads(line)
      except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error


def _parquet_rows(path) -> _Rows:
  """Yields each row of a file with its place, counted from 1."""
  parquet = _optional.require("pyarrow.parquet", "tasks")
  try:
    table = parquet.read_table(path)
  except ValueError as error:
    raise ValueError(f"{path}: not a Parquet file: {error}") from error
  for fields in (PROMPT_FIELDS, ANSWER_FIELDS):
    if not set(fields) & set(table.column_names):
      raise ValueError(
          f"{path} needs a column {_either(fields)}, got"
          f" {', '.join(table.column_names) or 'none'}"
      )
  for number, row in enumerate(table.to_pylist(), start=1):
    # Columns in which this row has no value are left out.
    yield f"{path}: row {number}", {
        k: v for k, v in row.items() if v is not None
    }


def _by_prompt(
    rows: Iterable[tuple[str, Any]], instruction: str, verifier: str | None
) -> dict[str, list[base.Example]]:
  """Groups examples by prompt, in the order of the rows."""
  groups: dict[str, list[base.Example]] = {}
  for where, row in rows:
    example = _example(where, row, instruction, verifier)
    groups.setdefault(json.dumps(example.prompt), []).append(example)
  return groups


def _split(keys, heldout_size, name):
  """Chooses the prompts to hold out, each with all of its rows."""
  if len(keys) < 2:
    raise ValueError(
        f"{name} needs at least two different prompts, so that one can be held"
        f" out, got {len(keys)}: add rows"
    )
  order = np.random.default_rng(base.SPLIT_SEED).permutation(len(keys))
  held = order[: min(heldout_size, len(keys) // 2)]
  return [keys[i] for i in sorted(held)]


def _example(where, row, instruction, verifier):
  """Makes an example from a row."""
  if not isinstance(row, dict):
    raise ValueError(
        f"{where}: must be an object with {_either(PROMPT_FIELDS)} and"
        f" {_either(ANSWER_FIELDS)}, got {str(row)[:80]!r}"
    )
  prompt_field = _field(where, row, PROMPT_FIELDS)
  answer_field = _field(where, row, ANSWER_FIELDS)
  prompt, answer = row[prompt_field], row[answer_field]
  if isinstance(prompt, str) and prompt.strip():
    prompt = base.user(prompt)
  if not _is_chat(prompt):
    raise ValueError(
        f"{where}: {prompt_field!r} must be a non-empty string or a list of"
        f" {{'role': ..., 'content': ...}}, got {prompt!r}"
    )
  prompt = base.instruct(prompt, instruction)
  if isinstance(answer, bool) or not isinstance(answer, str | int | float):
    raise ValueError(
        f"{where}: {answer_field!r} must be a string or a number, got"
        f" {answer!r}"
    )
  if not str(answer).strip():
    raise ValueError(f"{where}: {answer_field!r} must not be empty")
  try:
    right = answers.parse(str(answer), verifier)
  except ValueError as error:
    raise ValueError(
        f"{where}: {answer_field!r} has no answer that a verifier parses:"
        f" {error}"
    ) from error
  known = (*PROMPT_FIELDS, *ANSWER_FIELDS)
  others = {k: v for k, v in row.items() if k not in known}
  columns = {"answer": right.text, "verifier": right.verifier}
  return base.Example(prompt, {**others, **columns})


def _field(where, row, fields):
  """Returns the first of these fields that the row has."""
  for field in fields:
    if field in row:
      return field
  raise ValueError(
      f"{where}: must have {_either(fields)}, got the fields"
      f" {', '.join(map(str, row)) or 'none'}"
  )


def _either(fields):
  """Joins names: 'a', 'b' or 'c'."""
  *most, last = map(repr, fields)
  return f"{', '.join(most)} or {last}"


def _is_chat(prompt):
  """Returns whether this is a non-empty list of messages with text."""
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
