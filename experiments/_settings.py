"""Reads the frozen part of a config that one component needs.

A config travels as one `ConfigDict`, but no component sees it whole: each
declares a frozen dataclass of the fields that it reads, which checks its own
values. What a compiled program depends on is then its settings, and nothing
else.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any, TypeVar

T = TypeVar("T")


def read(
    cls: type[T], section: Mapping[str, Any], where: str, **more: Any
) -> T:
  """Makes settings from the fields of the same name in a section of a config.

  Args:
    cls: A frozen dataclass.
    section: A section of the config, or the whole of it.
    where: What an error begins with, such as `"config.loss."`.
    **more: Fields of `cls` that the section does not have.

  Raises:
    ValueError: If `cls` refuses a value; says where the value stands.
  """
  names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
  values = {name: section[name] for name in sorted(names - more.keys())}
  try:
    return cls(**values, **more)
  except ValueError as error:
    raise ValueError(f"{where}{error}") from error


def check_least(settings: Any, **least: float) -> None:
  """Raises ValueError for a field below its minimum.

  Args:
    settings: A dataclass instance.
    **least: The smallest value allowed, by field.
  """
  for name, minimum in least.items():
    value = getattr(settings, name)
    if not value >= minimum:
      raise ValueError(f"{name}={value} must be at least {minimum}")
