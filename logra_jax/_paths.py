"""Parameter paths as strings, and trees taken apart by path."""

from collections.abc import Iterable
import re
from typing import Any

import jax

PyTree = Any


def _part(entry: Any) -> str:
  for name in ("key", "name", "idx"):
    if hasattr(entry, name):
      return str(getattr(entry, name))
  return str(entry)


def path_string(path: tuple[Any, ...]) -> str:
  """`layers/q_proj/kernel` for a key path of `jax.tree_util`.

  A trailing `value` (the field in which boxed and NNX parameters hold their
  array) is no part of the name.
  """
  parts = [_part(entry) for entry in path]
  if len(parts) > 1 and parts[-1] in ("value", "raw_value"):
    parts = parts[:-1]
  return "/".join(parts)


def flatten(
    tree: PyTree, is_leaf: Any = None
) -> tuple[dict[str, Any], jax.tree_util.PyTreeDef]:
  """Leaves by path, in the tree's order, and the tree's structure."""
  leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
  flat = {path_string(path): leaf for path, leaf in leaves}
  if len(flat) != len(leaves):
    raise ValueError(
        "two parameters have the same path; give every parameter its own:"
        f" {sorted(path_string(path) for path, _ in leaves)}"
    )
  return flat, treedef


def owner(paths: Iterable[str], where: str) -> str | None:
  """The parameter whose path ends a state's path: the longest such path."""
  ends = (path for path in paths if f"/{where}".endswith(f"/{path}"))
  return max(ends, key=len, default=None)


def first_match(patterns: Iterable[str], path: str) -> str | None:
  """The first regular expression that matches the whole path."""
  return next((p for p in patterns if re.fullmatch(p, path)), None)


def check_patterns(argument: str, patterns: Any) -> None:
  """Raises ValueError for a pattern that is no regular expression."""
  for pattern in patterns:
    if not isinstance(pattern, str):
      raise ValueError(
          f"{argument} has {pattern!r}, which is no string; use regular"
          " expressions over parameter paths, as '.*/q_proj/kernel'"
      )
    try:
      re.compile(pattern)
    except re.error as error:
      raise ValueError(
          f"{argument} has {pattern!r}, which is no regular expression:"
          f" {error}"
      ) from error


def check_all_match(
    argument: str, patterns: Iterable[str], paths: Iterable[str]
) -> None:
  """Raises ValueError for a pattern that matches none of the paths."""
  paths = list(paths)
  for pattern in patterns:
    if not any(re.fullmatch(pattern, path) for path in paths):
      shown = ", ".join(paths[:12]) + (", ..." if len(paths) > 12 else "")
      raise ValueError(
          f"{argument}={pattern!r} matches no parameter; it must match a"
          f" whole path, and there are: {shown or 'none'}"
      )
