r"""Final answers in text, and whether two of them are the same.

A final answer is *marked* where it stands in `\boxed{...}` (MATH), or after
`####` at the end (GSM8K). An answer of a problem is compared by one verifier:

| verifier | an answer such as | a response is right if |
|---|---|---|
| `number` | `18`, `1,024`, `0.5` | its marked answer is that number; without \
a marked one, its last number is |
| `math` | `\frac{1}{2}`, `(3, 4)`, anything that was in `\boxed{}` | \
`math-verify` finds its marked answer, or the last formula, equal |
| `text` | `Paris` | its marked answer, or all of it, is the same text up to \
case and white space |
"""

import decimal
import functools
import logging
import re
from typing import Any, NamedTuple

from experiments import _optional
from experiments.tasks import base

# ASCII digits only, with thousands separators and decimals. A sign counts
# unless a digit precedes it: "3-8" are the numbers 3 and 8.
_NUMBER = re.compile(
    r"(?<![\w.])(?:(?<!\d)-)?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?"
)
_BOXED = re.compile(r"\\f?boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # Not \{, which is no brace.
# What may follow a number that is an answer, or precede it.
_UNITS = re.compile(r"\\(?:text|mathrm|textbf|mbox)\{[^{}]*\}|\\[$%!,;: ]")
# LaTeX of a word: \text{Evelyn} is the text Evelyn.
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\{([^{}]*)\}")
# What no text has, beside the command of a word.
_LATEX = re.compile(r"[\\^_{}]")
_WORD = re.compile(r"[^\W\d_]{2,}")
_DATE = re.compile(r"\d+([-:]\d+)+")
# What may stand on the lines after a marked answer.
_CLOSING = " \t\r\n$.\\])*"

# $18 and $\frac{1}{2}$: the dollars are no part of the answer.
_INLINE = re.compile(r"\$?([^$]*)\$?")

VERIFIERS = ("number", "math", "text")


class Answer(NamedTuple):
  """The right answer of a problem.

  Attributes:
    text: the answer alone, without its mark.
    verifier: `'number'`, `'math'` or `'text'`.
  """

  text: str
  verifier: str


class _Marked(NamedTuple):
  """A marked answer in a text, and what follows it."""

  text: str
  rest: str
  boxed: bool


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


def plain_number(text: str) -> decimal.Decimal | None:
  """The number that a text is as a whole (`'1,024'`, `'-0.5'`), or None."""
  try:
    number = decimal.Decimal(text.strip().replace(",", ""))
  except decimal.InvalidOperation:
    return None
  return number if number.is_finite() else None


def parse(field: str, verifier: str | None = None) -> Answer:
  r"""The right answer in a field of a data set.

  Args:
    field: an answer alone; or text with `#### answer` at its end (GSM8K) or
      with `\boxed{answer}` (MATH), of which the last one counts.
    verifier: how to compare it; by default as the module's table says.

  Returns:
    The answer.

  Raises:
    ValueError: no verifier can use it; says why.
    ImportError: the verifier is `math`, and `math-verify` (extra `tasks`) is
      not installed.
  """
  marked = _marked(field)
  if marked is None and _BOXED.search(field):
    raise ValueError("a \\boxed{ that is not closed")
  text = (marked.text if marked else field).strip()
  inline = _INLINE.fullmatch(text)
  text = inline[1].strip() if inline else text
  if not text:
    raise ValueError("an empty answer")
  if verifier is None:
    verifier = _verifier(text, bool(marked and marked.boxed))
  number = plain_number(text)
  if verifier == "number" and number is None:
    raise ValueError(f"{text[:80]!r} is not a number")
  if verifier == "math" and number is None and not _formulas(text):
    raise ValueError(f"math-verify finds no formula in {text[:80]!r}")
  if verifier == "text":
    text = _TEXT.sub(r"\1", text)
    if "\n" in text:
      raise ValueError(
          f"{text[:80]!r} has several lines; end it with '#### answer' or"
          " \\boxed{answer}"
      )
  return Answer(text, verifier)


def same(completion: str, answer: Answer) -> bool:
  """Whether a response gives the answer; see the module's table."""
  marked = _marked(completion)
  match answer.verifier:
    case "number":
      return _stated_number(completion, marked) == plain_number(answer.text)
    case "math":
      return _equal_formulas(completion, marked, answer.text)
    case _:
      text = _TEXT.sub(r"\1", marked.text) if marked else completion
      return _folded(text) == _folded(answer.text)


def ends_in_answer(completion: str) -> bool:
  r"""Whether a response ends with a marked answer that is not empty.

  No more than the rest of its line may follow.
  """
  marked = _marked(completion)
  if marked is None or not marked.text.strip():
    return False
  _, _, after = marked.rest.partition("\n")
  return not after.strip(_CLOSING)


def check_verifier(verifier: str | None) -> None:
  """Refuses the name of a verifier that does not exist; None is fine."""
  if verifier is not None and verifier not in VERIFIERS:
    raise ValueError(base.unknown("verifier", verifier, VERIFIERS))


def prepare() -> None:
  """Does what the first formula costs: imports and tables."""
  _formulas("\\frac{1}{2}")


def _verifier(text, boxed):
  """The verifier of an answer that does not say which."""
  if plain_number(text) is not None:
    return "math" if boxed else "number"
  if _TEXT.fullmatch(text):
    return "text"
  if _LATEX.search(text):
    return "math"
  if _WORD.search(text) or _DATE.fullmatch(text):
    return "text"
  return "math" if boxed or re.search(r"[\d=+*/<>]", text) else "text"


def boxed(text: str) -> str | None:
  r"""What is in the last `\boxed{...}` that is closed, or None."""
  place = _box(text)
  return None if place is None else text[place]


def _box(text) -> slice | None:
  """Where the content of the last box is."""
  opened = [match.end() - 1 for match in _BOXED.finditer(text)]
  closed = _closing_braces(text) if opened else {}
  places = [slice(b + 1, closed[b]) for b in opened if b in closed]
  return places[-1] if places else None


def _marked(text) -> _Marked | None:
  """The last marked answer of a text."""
  start, best = -1, None
  place = _box(text)
  if place is not None:
    start = place.start - 1
    best = _Marked(text[place], text[place.stop + 1 :], True)
  at = text.rfind("####")
  if at > start:
    line, newline, rest = text[at + 4 :].partition("\n")
    best = _Marked(line.strip(), newline + rest, False)
  return best


def _closing_braces(text):
  """Position of the closing brace of each opening one that has it."""
  found, stack = {}, []
  for match in _BRACE.finditer(text):
    if match[0] == "{":
      stack.append(match.start())
    elif match[0] == "}" and stack:
      found[stack.pop()] = match.start()
  return found


def _stated_number(completion, marked):
  """The number that a response states, or None."""
  if marked is None:
    return last_number(completion)
  text = _UNITS.sub(" ", marked.text)
  # 2^{18} is not 18.
  if re.search(r"[\\^_/{}*+]", text):
    return None
  return last_number(text)


def _equal_formulas(completion, marked, answer):
  """Whether math-verify finds the two equal."""
  found = _parse_formulas(_boxed(marked.text) if marked else completion)
  # No time limits here: they are signals, which only a main thread can set.
  # The processes that score have their own.
  return _library().verify(_formulas(answer), found, timeout_seconds=None)


@functools.lru_cache(maxsize=256)
def _formulas(answer) -> list[Any]:
  """What math-verify parses of a right answer; empty if no formula."""
  found = _parse_formulas(_boxed(answer))
  # It falls back to the text where it fails.
  return [] if all(isinstance(x, str) for x in found) else found


def _boxed(text):
  """A text that math-verify takes as one formula."""
  return f"\\boxed{{{text}}}"


def _parse_formulas(text) -> list[Any]:
  """All that math-verify finds."""
  return _library().parse(text, parsing_timeout=None)


@functools.cache
def _library():
  """math-verify, without its warning that time limits are off."""
  logging.getLogger("math_verify").setLevel(logging.ERROR)
  return _optional.require("math_verify", "tasks")


def _folded(text):
  """Text without case and with single spaces."""
  return " ".join(text.split()).casefold()
