"""Parameter paths as strings, and trees as dicts from path to leaf."""

from collections.abc import Callable, Iterable
import re
from typing import Any

import chex
import jax


def _is_box(entry: Any) -> bool:
  """Whether a key is the field in which a box or variable holds its array."""
  field = isinstance(entry, jax.tree_util.GetAttrKey)
  return field and entry.name in ("value", "raw_value")


def _part(entry: Any) -> str:
  """Returns the key, attribute name or index of one entry of a key path."""
  for name in ("key", "name", "idx"):
    if hasattr(entry, name):
      return str(getattr(entry, name))
  return str(entry)


def path_string(path: tuple[Any, ...]) -> str:
  """Formats a key path of `jax.tree_util` as `layers/q_proj/kernel`.

  A trailing attribute `value`, in which boxed and NNX parameters hold their
  array, is dropped. A dict key of that name is part of the path.
  """
  if len(path) > 1 and _is_box(path[-1]):
    path = path[:-1]
  return "/".join(map(_part, path))


def flatten(
    tree: chex.ArrayTree, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[dict[str, Any], jax.tree_util.PyTreeDef]:
  """Returns the leaves by path, in the tree's order, and its structure."""
  leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
  flat = {path_string(path): leaf for path, leaf in leaves}
  if len(flat) != len(leaves):
    raise ValueError(
        "two parameters have the same path; give every parameter its own path:"
        f" {sorted(path_string(path) for path, _ in leaves)}"
    )
  return flat, treedef


def owner(paths: Iterable[str], where: str) -> str | None:
  """Returns the longest parameter path that the path of a state ends with."""
  ends = (path for path in paths if f"/{where}".endswith(f"/{path}"))
  return max(ends, key=len, default=None)


def first_match(patterns: Iterable[str], path: str) -> str | None:
  """Returns the first regular expression that matches the whole path."""
  return next((p for p in patterns if re.fullmatch(p, path)), None)


def check_patterns(argument: str, patterns: Iterable[Any]) -> None:
  """Raises ValueError for a pattern that is not a regular expression."""
  for pattern in patterns:
    if not isinstance(pattern, str):
      raise ValueError(
          f"{argument} has {pattern!r}, which is not a string; use regular"
          " expressions over parameter paths, such as '.*/q_proj/kernel'"
      )
    try:
      re.compile(pattern)
    except re.error as error:
      raise ValueError(
          f"{argument} has {pattern!r}, which is not a valid regular"
          f" expression: {error}"
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
          f"{argument}={pattern!r} matches no parameter; it must match one of"
          f" these paths as a whole: {shown or '(none)'}"
      )
