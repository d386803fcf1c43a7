"""Stop strings as an automaton over tokens.

A state is how much of a stop string a text ends in (Aho and Corasick, 1975).
One table says what each token makes of each state, so that a decode loop knows
the token that completes a string, which may begin in the middle of a token and
go over many.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class StopTable:
  """What each token makes of each state.

  Attributes:
    stop: the strings.
    table: `[states, V]` int16, the next state; 0 is the beginning, the last
      state is reached when a string is complete, and never left.
  """

  stop: tuple[str, ...]
  table: np.ndarray


@functools.lru_cache(maxsize=4)
def make_stop_table(
    tokenizer: Any, stop: tuple[str, ...], vocab_size: int
) -> StopTable:
  """The table of some stop strings; made once for the same arguments.

  Args:
    tokenizer: a `Tokenizer`: its `token_bytes()` say what each id decodes to.
      Special tokens decode to nothing, and a string may go over them.
    stop: strings that end a response; at least one.
    vocab_size: ids of the model, V; those beyond the tokenizer's are nothing.

  Returns:
    The table.

  Raises:
    ValueError: a string is empty, or no sequence of tokens can produce it.
  """
  return table_of_pieces(stop, tokenizer.token_bytes(), vocab_size)


def table_of_pieces(
    stop: tuple[str, ...], pieces: Sequence[bytes], vocab_size: int
) -> StopTable:
  """As `make_stop_table`, of what each id decodes to, in UTF-8."""
  if len(pieces) > vocab_size:
    raise ValueError(
        f"the tokenizer has {len(pieces)} ids, and the model {vocab_size}"
    )
  for text in stop:
    if not text:
      raise ValueError("stop holds an empty string, which can never match")
    if not _reachable(_table((text.encode(),), pieces)):
      raise ValueError(
          f"stop string {text!r} can never match: no sequence of the"
          " tokenizer's tokens decodes to it"
      )
  pieces = [*pieces, *[b""] * (vocab_size - len(pieces))]
  return StopTable(stop, _table(tuple(text.encode() for text in stop), pieces))


def _table(stop, pieces: Sequence[bytes]) -> np.ndarray:
  """`[states, len(pieces)]` int16: bytes of a token one after the other."""
  step = _automaton(stop)
  order = np.argsort([-len(piece) for piece in pieces], kind="stable")
  states = np.repeat(
      np.arange(len(step), dtype=np.int16)[:, None], len(pieces), axis=1
  )
  lengths = np.asarray([len(pieces[i]) for i in order])
  for place in range(lengths.max(initial=0)):
    n = int((lengths > place).sum())  # The longest come first.
    byte = np.asarray([pieces[i][place] for i in order[:n]])
    states[:, :n] = step[states[:, :n], byte]
  table = np.empty_like(states)
  table[:, order] = states
  return table


def _automaton(stop) -> np.ndarray:
  """`[states, 256]` int16: the next state after each byte."""
  prefixes = sorted(
      {text[:i] for text in stop for i in range(len(text))},
      key=lambda prefix: (len(prefix), prefix),
  )
  number = {prefix: i for i, prefix in enumerate(prefixes)}
  complete = len(prefixes)
  if complete >= np.iinfo(np.int16).max:
    raise ValueError(f"stop strings of {complete} bytes together are too long")
  step = np.full((complete + 1, 256), complete, np.int16)
  for prefix, i in number.items():
    for byte in range(256):
      text = prefix + bytes([byte])
      if not text.endswith(tuple(stop)):
        # The longest end of the text that a string begins with.
        ends = (text[k:] for k in range(len(text) + 1))
        step[i, byte] = next(number[end] for end in ends if end in number)
  return step


def _reachable(table: np.ndarray) -> bool:
  """Whether the last state can be reached from the first."""
  seen, new = np.zeros(len(table), bool), np.zeros(1, np.int64)
  while new.size:
    seen[new] = True
    following = np.unique(table[new])
    new = following[~seen[following]]
  return bool(seen[-1])
