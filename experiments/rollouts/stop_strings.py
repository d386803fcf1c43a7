"""Finds stop strings while decoding, with an automaton over tokens.

A state is the longest prefix of a stop string that the text so far ends in (Aho
and Corasick, 1975). A table holds the next state for each state and token, so
the decode loop recognises the token that completes a stop string, even if the
string starts in the middle of a token or spans several.
"""

from collections.abc import Sequence
import dataclasses
import functools

import numpy as np

from experiments.models.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class StopTable:
  """Transition table of some stop strings.

  Attributes:
    stop: The stop strings.
    table: `[states, V]` int16, the next state. State 0 is the initial one. The
      last state means that a stop string is complete; it is never left.
  """

  stop: tuple[str, ...]
  table: np.ndarray


@functools.lru_cache(maxsize=4)
def make_stop_table(
    tokenizer: Tokenizer, stop: tuple[str, ...], vocab_size: int
) -> StopTable:
  """Makes the table of some stop strings; cached.

  Args:
    tokenizer: The tokenizer of the model. Special tokens decode to nothing, so
      a stop string can span them.
    stop: Strings that end a response; at least one.
    vocab_size: Number of token ids of the model, V. Ids that the tokenizer does
      not have decode to nothing.

  Returns:
    The table.

  Raises:
    ValueError: If a string is empty, no sequence of tokens can produce it, or
      the tokenizer has more ids than the model.
  """
  return table_of_pieces(stop, tokenizer.token_bytes(), vocab_size)


def table_of_pieces(
    stop: tuple[str, ...], pieces: Sequence[bytes], vocab_size: int
) -> StopTable:
  """Makes the table from the UTF-8 bytes that each token id decodes to."""
  if len(pieces) > vocab_size:
    raise ValueError(
        f"the tokenizer has {len(pieces)} ids, and the model {vocab_size}: use"
        " the model's own tokenizer"
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


def _table(stop: tuple[bytes, ...], pieces: Sequence[bytes]) -> np.ndarray:
  """The next state after each token, `[states, len(pieces)]` int16.

  It feeds the bytes of all tokens to the automaton, one position at a time.
  """
  step = _automaton(stop)
  order = np.argsort([-len(piece) for piece in pieces], kind="stable")
  states = np.repeat(
      np.arange(len(step), dtype=np.int16)[:, None], len(pieces), axis=1
  )
  lengths = np.asarray([len(pieces[i]) for i in order])
  for place in range(lengths.max(initial=0)):
    n = int((lengths > place).sum())  # The longest tokens come first.
    byte = np.asarray([pieces[i][place] for i in order[:n]])
    states[:, :n] = step[states[:, :n], byte]
  table = np.empty_like(states)
  table[:, order] = states
  return table


def _automaton(stop: tuple[bytes, ...]) -> np.ndarray:
  """The next state after each byte, `[states, 256]` int16."""
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
      if not text.endswith(stop):
        # The next state is the longest suffix that is a known prefix.
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
