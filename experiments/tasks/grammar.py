"""The grammar of names: weighted sums, and options in a name."""

import json
import math
import re
from typing import Any

# A plus sign with white space around it: file names may contain a bare one.
_PLUS = re.compile(r"(?<=\s)\+(?=\s)")
_WEIGHT = re.compile(r"(?P<weight>[-+.\w]+)\s*\*\s*(?P<name>.*)", re.DOTALL)
_OPTIONS = re.compile(r"\?(?=\w+=)")
_NEXT_OPTION = re.compile(r"&(?=\w+=)")


def weighted_sum(text: str, what: str) -> list[tuple[float, str]]:
  """Terms of `'0.7*a + 0.3*b'`; a weight that is not written is 1.

  Args:
    text: the sum. White space must surround its plus signs.
    what: the sum, for errors: `'task'`, `'reward'`.

  Returns:
    Weight and name of each term, in order.

  Raises:
    ValueError: for an empty sum or term, a name that occurs twice, or a weight
      that is not a positive finite number.
  """
  if not isinstance(text, str) or not text.strip():
    raise ValueError(f"{what} must be a name or a weighted sum, got {text!r}")
  terms = []
  for term in _PLUS.split(text.strip()):
    weight, name = 1.0, term.strip()
    match = _WEIGHT.fullmatch(name)
    if match:
      weight, name = _weight(match["weight"], text, what), match["name"]
    if not name:
      raise ValueError(f"{what} {text!r} has a term without a name")
    terms.append((weight, name))
  names = [name for _, name in terms]
  for name in names:
    if names.count(name) > 1:
      raise ValueError(f"{what} {text!r} has {name!r} twice: add its weights")
  return terms


def _weight(text, whole, what):
  """A weight as a number."""
  try:
    weight = float(text)
  except ValueError:
    weight = math.nan
  if not (math.isfinite(weight) and weight > 0):
    raise ValueError(
        f"{what} {whole!r}: a weight must be a positive number, got {text!r}"
    )
  return weight


def options(name: str) -> tuple[str, dict[str, Any]]:
  """Splits `'gcd?max_value=50&num=2'` into the name and its options.

  Args:
    name: a name, with or without options. Their values are JSON: a string is
      written with its quotes.

  Returns:
    The name before the question mark, and the options by key.

  Raises:
    ValueError: for a value that is not JSON or a key that occurs twice.
  """
  base, *rest = _OPTIONS.split(name, maxsplit=1)
  found: dict[str, Any] = {}
  for item in _NEXT_OPTION.split(rest[0]) if rest else ():
    key, _, value = item.partition("=")
    if key in found:
      raise ValueError(f"{name!r} sets {key!r} twice")
    try:
      found[key] = json.loads(value)
    except json.JSONDecodeError as error:
      raise ValueError(
          f"{name!r}: option {key}={value} is not JSON; write a string with"
          ' its quotes, as in key="value", and true or false in small letters'
      ) from error
  return base, found
