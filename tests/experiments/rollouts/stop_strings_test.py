"""Tests of stop strings against a search in decoded text."""

import numpy as np
import pytest

from experiments.models import tiny
from experiments.models import tokenizer as tokenizer_lib
from experiments.rollouts import stop_strings
from tests.helpers.paths import GOLDEN

LLAMA = GOLDEN / "llama"
STOP = ("the", "\n\n", "a b", "é", "aab", "abaabc")


@pytest.fixture(scope="module")
def tokenizer():
  return tokenizer_lib.from_directory(LLAMA)


def ends(table, tokens):
  """Number of tokens until a stop string is complete; None if never."""
  state = 0
  for n, token in enumerate(tokens, 1):
    state = table.table[state, token]
    if state == len(table.table) - 1:
      return n
  return None


def first_match(tokenizer, stop, tokens):
  """The same by a search in decoded text."""
  for n in range(1, len(tokens) + 1):
    if any(text in tokenizer.decode(tokens[:n]) for text in stop):
      return n
  return None


def test_ends_are_those_of_decoded_text(tokenizer):
  table = stop_strings.make_stop_table(tokenizer, STOP, 130)
  assert table.table.shape[1] == 130
  rng = np.random.default_rng(0)
  letters = tokenizer.encode("aabc the\n é")
  found = []
  for _ in range(300):
    # With few letters, stop strings often begin again within themselves.
    some = rng.choice(letters, 12)
    tokens = np.where(rng.random(12) < 0.9, some, rng.integers(0, 128, 12))
    found.append(ends(table, tokens))
    assert found[-1] == first_match(tokenizer, STOP, tokens), tokens
  assert 30 < found.count(None) < 270 and len(set(found)) > 8


@pytest.mark.parametrize("text", STOP)
def test_each_string_at_every_split(tokenizer, text):
  table = stop_strings.make_stop_table(tokenizer, (text,), 128)
  for before in ("", "x", "th", "aaba"):
    tokens = tokenizer.encode(before + text + " and more")
    n = ends(table, tokens)
    assert n == first_match(tokenizer, (text,), tokens) and n is not None


def test_special_tokens_and_unknown_ids_add_nothing(tokenizer):
  table = stop_strings.make_stop_table(tokenizer, ("ab",), 140)
  (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
  assert ends(table, [a, 0, 139, b]) == 4
  assert first_match(tokenizer, ("ab",), [a, 0, b]) == 3


def test_bytes_of_tokens_are_what_they_decode_to(tokenizer):
  text = "Thé end, naïve 12 \n\n 漢字"
  pieces = tokenizer.token_bytes()
  ids = tokenizer.encode(text)
  assert len(pieces) == tokenizer.vocab_size
  joined = b"".join(pieces[i] for i in ids).decode("utf-8", "replace")
  assert joined == tokenizer.decode(ids)


def test_a_string_that_can_never_match():
  tokenizer = tiny.make_tiny(0).tokenizer
  make = lambda *stop: stop_strings.make_stop_table(tokenizer, stop, 14)
  table = make("+1", "22")
  assert ends(table, tokenizer.encode("1+3+12")) == 5
  for text in ("a", "1 2", "12=", "é"):
    with pytest.raises(ValueError, match=f"stop string {text!r} can never"):
      make("+1", text)
  with pytest.raises(ValueError, match="an empty string, which can never"):
    make("")


def test_a_model_with_fewer_ids_than_the_tokenizer(tokenizer):
  with pytest.raises(ValueError, match="tokenizer has 128 ids, and the model"):
    stop_strings.make_stop_table(tokenizer, ("a",), 127)


def test_a_table_is_made_once(tokenizer):
  make = lambda: stop_strings.make_stop_table(tokenizer, ("a",), 128)
  assert make() is make()
