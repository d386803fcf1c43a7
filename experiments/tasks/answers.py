r"""Finds final answers in text and compares them.

A final answer is *marked* if it stands in `\boxed{...}` (MATH), or after `####`
at the end (GSM8K). The answer to a problem has one verifier, which compares:

| verifier | for answers such as | a response is right if |
|---|---|---|
| `number` | `18`, `1,024`, `0.5` | its marked answer is that number; without \
a marked answer, its last number is |
| `math` | `\frac{1}{2}`, `(3, 4)`, anything that was in `\boxed{}` | \
`math-verify` finds its marked answer, or else its last formula, equal |
| `text` | `Paris` | its marked answer, or else all of it, is the same text, \
ignoring case and white space |
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
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # An escaped \{ is no brace.
# Units and spaces that can stand before or after a number in an answer.
_UNITS = re.compile(r"\\(?:text|mathrm|textbf|mbox)\{[^{}]*\}|\\[$%!,;: ]")
# LaTeX of a word: \text{Evelyn} is the text Evelyn.
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mbox)\{([^{}]*)\}")
# Characters that make an answer LaTeX, not text, once `_TEXT` is ruled out.
_LATEX = re.compile(r"[\\^_{}]")
_WORD = re.compile(r"[^\W\d_]{2,}")
_DATE = re.compile(r"\d+([-:]\d+)+")
# Characters allowed on the lines after a marked answer.
_CLOSING = " \t\r\n$.\\])*"

# In $18 and $\frac{1}{2}$ the dollars do not belong to the answer.
_INLINE = re.compile(r"\$?([^$]*)\$?")

VERIFIERS = ("number", "math", "text")


class Answer(NamedTuple):
  """The right answer to a problem.

  Attributes:
    text: The answer without its mark.
    verifier: How it is compared: `'number'`, `'math'` or `'text'`.
  """

  text: str
  verifier: str


class _Marked(NamedTuple):
  """A marked answer in a text, and what follows it."""

  text: str
  rest: str
  boxed: bool


def last_number(text: str) -> decimal.Decimal | None:
  """Returns the last number written in digits, or None.

  Only the last one counts, so that a response which lists every candidate makes
  a single guess like any other. `'8.0'` is 8, `'8.5'` is not, and `'1,024'` is
  1024.
  """
  matches = _NUMBER.findall(text)
  if not matches:
    return None
  return decimal.Decimal(matches[-1].replace(",", ""))


def plain_number(text: str) -> decimal.Decimal | None:
  """Returns the number if the whole text is one (`'1,024'`, `'-0.5'`)."""
  try:
    number = decimal.Decimal(text.strip().replace(",", ""))
  except decimal.InvalidOperation:
    return None
  return number if number.is_finite() else None


def parse(field: str, verifier: str | None = None) -> Answer:
  r"""Reads the right answer from a field of a data set.

  Args:
    field: The answer alone; or text that ends in `#### answer` (GSM8K) or
      contains `\boxed{answer}` (MATH), of which the last one counts.
    verifier: How to compare the answer; by default chosen by its form, as in
      the module's table.

  Returns:
    The answer.

  Raises:
    ValueError: If no verifier can use the field; says why.
    ImportError: If the verifier is `math`, and `math-verify` (extra `tasks`) is
      not installed.
  """
  marked = _marked(field)
  if marked is None and _BOXED.search(field):
    raise ValueError("a \\boxed{ is not closed: add the closing brace")
  text = (marked.text if marked else field).strip()
  inline = _INLINE.fullmatch(text)
  text = inline[1].strip() if inline else text
  if not text:
    raise ValueError("the answer is empty: fill it in or remove the row")
  if verifier is None:
    verifier = _verifier(text, bool(marked and marked.boxed))
  number = plain_number(text)
  if verifier == "number" and number is None:
    raise ValueError(
        f"{text[:80]!r} is not a number: correct it or choose another verifier"
    )
  if verifier == "math" and number is None and not _formulas(text):
    raise ValueError(
        f"math-verify finds no formula in {text[:80]!r}: correct it or set"
        ' verifier="text"'
    )
  if verifier == "text":
    text = _TEXT.sub(r"\1", text)
    if "\n" in text:
      raise ValueError(
          f"{text[:80]!r} has several lines: end it with '#### answer' or"
          " \\boxed{answer}"
      )
  return Answer(text, verifier)


def same(completion: str, answer: Answer) -> bool:
  """Returns whether a response gives the answer; see the module's table."""
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
  r"""Returns whether a response ends with a marked answer that is not empty.

  Nothing but the rest of its line and closing punctuation can follow.
  """
  marked = _marked(completion)
  if marked is None or not marked.text.strip():
    return False
  _, _, after = marked.rest.partition("\n")
  return not after.strip(_CLOSING)


def check_verifier(verifier: str | None) -> None:
  """Raises ValueError for an unknown verifier; None is allowed."""
  if verifier is not None and verifier not in VERIFIERS:
    raise ValueError(base.unknown("verifier", verifier, VERIFIERS))


def prepare() -> None:
  """Imports math-verify and builds its tables ahead of first use."""
  _formulas("\\frac{1}{2}")


def _verifier(text, boxed):
  """Chooses the verifier by the form of the answer."""
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
  r"""Returns the content of the last closed `\boxed{...}`, or None."""
  place = _box(text)
  return None if place is None else text[place]


def _box(text) -> slice | None:
  """Finds the content of the last closed box."""
  opened = [match.end() - 1 for match in _BOXED.finditer(text)]
  closed = _closing_braces(text) if opened else {}
  places = [slice(b + 1, closed[b]) for b in opened if b in closed]
  return places[-1] if places else None


def _marked(text) -> _Marked | None:
  """Finds the last marked answer of a text."""
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


def _closing_braces(text: str) -> dict[int, int]:
  """Maps the position of each opening brace to that of its closing brace."""
  closed: dict[int, int] = {}
  opened: list[int] = []
  for match in _BRACE.finditer(text):
    if match[0] == "{":
      opened.append(match.start())
    elif match[0] == "}" and opened:
      closed[opened.pop()] = match.start()
  return closed


def _stated_number(completion, marked):
  """Returns the number that a response states, or None."""
  if marked is None:
    return last_number(completion)
  text = _UNITS.sub(" ", marked.text)
  # 2^{18} is not 18.
  if re.search(r"[\\^_/{}*+]", text):
    return None
  return last_number(text)


def _equal_formulas(completion, marked, answer):
  """Returns whether math-verify finds the two equal."""
  given = _parse_formulas(_boxed(marked.text) if marked else completion)
  # math-verify sets its time limits by signals, which only a main thread can
  # do. The processes that score responses have limits of their own.
  return _library().verify(_formulas(answer), given, timeout_seconds=None)


@functools.lru_cache(maxsize=256)
def _formulas(answer) -> list[Any]:
  """Parses a right answer with math-verify; empty if it has no formula."""
  parsed = _parse_formulas(_boxed(answer))
  # math-verify returns strings if it cannot parse.
  return [] if all(isinstance(x, str) for x in parsed) else parsed


def _boxed(text):
  """Marks a text so that math-verify takes it as one formula."""
  return f"\\boxed{{{text}}}"


def _parse_formulas(text) -> list[Any]:
  """Parses every formula that math-verify finds."""
  return _library().parse(text, parsing_timeout=None)


@functools.cache
def _library():
  """Imports math-verify and silences its warning that time limits are off."""
  logging.getLogger("math_verify").setLevel(logging.ERROR)
  return _optional.require("math_verify", "tasks")


def _folded(text):
  """Removes case and superfluous white space."""
  return " ".join(text.split()).casefold()
