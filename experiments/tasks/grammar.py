"""Parses names: weighted sums of names, and options in a name."""

import json
import math
import re
from typing import Any

# A plus sign with white space around it, as file names can contain a bare one.
_PLUS = re.compile(r"(?<=\s)\+(?=\s)")
_WEIGHT = re.compile(r"(?P<weight>[-+.\w]+)\s*\*\s*(?P<name>.*)", re.DOTALL)
_OPTIONS = re.compile(r"\?(?=\w+=)")
_NEXT_OPTION = re.compile(r"&(?=\w+=)")


def weighted_sum(text: str, what: str) -> list[tuple[float, str]]:
  """Splits `'0.7*a + 0.3*b'` into its terms; a missing weight is 1.

  Args:
    text: The sum. White space must surround its plus signs.
    what: What errors call the sum: `'task'`, `'reward'`.

  Returns:
    The weight and the name of each term, in order.

  Raises:
    ValueError: If the sum or a term is empty, a name occurs twice, or a weight
      is not a positive finite number.
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
      raise ValueError(
          f"{what} {text!r} has a term without a name: write 'weight*name' on"
          " both sides of a plus sign"
      )
    terms.append((weight, name))
  names = [name for _, name in terms]
  for name in names:
    if names.count(name) > 1:
      raise ValueError(
          f"{what} {text!r} has {name!r} twice: add up its weights"
      )
  return terms


def _weight(text, whole, what):
  """Converts a weight to a number."""
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
    name: A name, with or without options. Their values are JSON, so a string is
      written with its quotes.

  Returns:
    The name before the question mark, and the options by key.

  Raises:
    ValueError: If a value is not JSON or a key occurs twice.
  """
  base, *rest = _OPTIONS.split(name, maxsplit=1)
  parsed: dict[str, Any] = {}
  for item in _NEXT_OPTION.split(rest[0]) if rest else ():
    key, _, value = item.partition("=")
    if key in parsed:
      raise ValueError(f"{name!r} sets {key!r} twice: remove one of them")
    try:
      parsed[key] = json.loads(value)
    except json.JSONDecodeError as error:
      raise ValueError(
          f"{name!r}: option {key}={value} is not JSON; write strings in"
          ' quotes, as in key="value", and true and false in lower case'
      ) from error
  return base, parsed
