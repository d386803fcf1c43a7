"""Functions and classes of any module, by `'module:name'`."""

import importlib
import importlib.util
import re
from typing import Any

from experiments.tasks import base

_NAME = re.compile(r"(?P<module>[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<attribute>\w+)")


def is_name(name: str) -> bool:
  """Whether this is `'module:name'` of a module that can be found."""
  match = _NAME.fullmatch(name)
  if not match:
    return False
  try:
    return importlib.util.find_spec(match["module"]) is not None
  except (ImportError, ValueError):  # A package on the way is not there.
    return False


def load(name: str) -> Any:
  """Imports what `'module:name'` means.

  Args:
    name: dotted module, colon, and a function or class of it.

  Returns:
    The callable.

  Raises:
    ValueError: if there is no such module, it fails to import, or has no such
      callable; names the nearest ones.
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
        f"{name!r}: module {module_name!r} does not import:"
        f" {type(error).__name__}: {error}"
    ) from error
  known = {k: v for k, v in vars(module).items() if callable(v)}
  if attribute not in known:
    public = [k for k in known if not k.startswith("_")]
    raise ValueError(
        base.unknown(f"function of {module_name}", attribute, public)
    )
  return known[attribute]
