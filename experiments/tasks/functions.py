"""Finds functions and classes of any module by `'module:name'`."""

import importlib
import importlib.util
import re
from typing import Any

from experiments.tasks import base

_NAME = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<attribute>\w+)")


def is_name(name: str) -> bool:
  """Returns whether a name is `'module:name'` and the module can be found."""
  match = _NAME.fullmatch(name)
  if not match:
    return False
  try:
    return importlib.util.find_spec(match["module"]) is not None
  except (ImportError, ValueError):  # A parent package is missing.
    return False


def load(name: str) -> Any:
  """Imports a function or a class by name.

  Args:
    name: The dotted module, a colon, and a function or class of the module.

  Returns:
    The function or the class.

  Raises:
    ValueError: If the module does not exist, cannot be imported, or has no such
      callable; names the most similar ones.
  """
  match = _NAME.fullmatch(name)
  if not match:
    raise ValueError(f"a function is written 'module:function', got {name!r}")
  module_name, attribute = match["module"], match["attribute"]
  if not is_name(name):
    raise ValueError(
        f"{name!r}: there is no module {module_name!r} in the working directory"
        " or on PYTHONPATH"
    )
  try:
    module = importlib.import_module(module_name)
  except Exception as error:
    raise ValueError(
        f"{name!r}: module {module_name!r} cannot be imported:"
        f" {type(error).__name__}: {error}"
    ) from error
  known = {k: v for k, v in vars(module).items() if callable(v)}
  if attribute not in known:
    public = [k for k in known if not k.startswith("_")]
    raise ValueError(
        base.unknown(f"function of {module_name}", attribute, public)
    )
  return known[attribute]
