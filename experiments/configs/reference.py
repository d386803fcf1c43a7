"""Writes docs/config.md: every field of a config, its default and its meaning.

  python -m experiments.configs.reference > docs/config.md

The texts are the comments and docstrings of `configs/quickstart.py`.
"""

import ast
from collections.abc import Iterator, Mapping
import io
import pathlib
import re
import tokenize
from typing import Any, NamedTuple

from experiments import _cli
from experiments.configs import quickstart

_INTRO = """\
# Fields of a config

A config is a Python file with a function `get_config`. All configs begin with
[quickstart.py](../experiments/configs/quickstart.py), whose values are the
defaults below, and change some of them. The command line can change them too:

```sh
python -m experiments.train --config=experiments/configs/quickstart.py \\
  --workdir=DIR --config.loss.name=grpo --config.loss.row_tokens=192,256
```

A misspelled field or a value of another type is an error, and so are values
with which a run could not start.

Made by `python -m experiments.configs.reference`; a test compares.
"""


class Field(NamedTuple):
  """A field of the config.

  Attributes:
    path: Its name, with that of its section: `'loss.name'`.
    text: Its comment, in one line.
  """

  path: str
  text: str


class Section(NamedTuple):
  """Fields that stand together.

  Attributes:
    name: `'loss'`; `''` for the fields outside of all sections.
    text: The docstring of the function that makes the section, in one line.
    fields: In the order of the source.
  """

  name: str
  text: str
  fields: list[Field]


def read_sections(source: str) -> list[Section]:
  """Reads the sections of a config from its source.

  A field is an assignment to an attribute, within `get_config` or within a
  function that `get_config` calls to make a section. Its comment is the lines
  of comment directly above it, or the one behind it.

  Args:
    source: Text of a module like `configs/quickstart.py`.

  Returns:
    The sections in the order of the source; the one without a name is first.

  Raises:
    ValueError: If a field has no comment, or a section no docstring.
  """
  functions = {
      node.name: node
      for node in ast.parse(source).body
      if isinstance(node, ast.FunctionDef)
  }
  comments = _comments(source)
  makers = {"": "get_config"}
  for name, value in _assignments(functions["get_config"]):
    call = value.value
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
      makers[name] = call.func.id
  return [
      _section(name, functions[maker], comments, skip=makers)
      for name, maker in makers.items()
  ]


def page() -> str:
  """The text of docs/config.md."""
  defaults = quickstart.get_config()
  source = pathlib.Path(quickstart.__file__).read_text(encoding="utf-8")
  lines = [_INTRO]
  for section in read_sections(source):
    lines += [f"## {f'`{section.name}`' if section.name else 'Top level'}", ""]
    lines += [_markdown(section.text), ""]
    lines += ["| field | default | meaning |", "|---|---|---|"]
    for path, text in section.fields:
      value = f"`{_lookup(defaults, path)!r}`"
      lines.append(f"| `{path}` | {value} | {_markdown(text)} |")
    lines.append("")
  return "\n".join(lines)


def _comments(source: str) -> dict[int, tuple[str, bool]]:
  """Each comment by its line, and whether it has the line to itself."""
  tokens = tokenize.generate_tokens(io.StringIO(source).readline)
  return {
      token.start[0]: (
          token.string.lstrip("# "),
          token.line.lstrip().startswith("#"),
      )
      for token in tokens
      if token.type == tokenize.COMMENT
  }


def _assignments(
    function: ast.FunctionDef,
) -> Iterator[tuple[str, ast.Assign]]:
  """The assignments to attributes in a function, by attribute."""
  for node in function.body:
    if isinstance(node, ast.Assign) and isinstance(
        node.targets[0], ast.Attribute
    ):
      yield node.targets[0].attr, node


def _section(
    name: str,
    function: ast.FunctionDef,
    comments: Mapping[int, tuple[str, bool]],
    skip: Mapping[str, str],
) -> Section:
  """The section that a function makes, without the sections within it."""
  docstring = ast.get_docstring(function)
  if not docstring:
    raise ValueError(
        f"section {name or 'get_config'!r} has no text: give {function.name} a"
        " docstring"
    )
  fields = []
  for attribute, node in _assignments(function):
    if name or attribute not in skip:
      path = f"{name}.{attribute}" if name else attribute
      fields.append(Field(path, _text(path, node, comments)))
  return Section(name, " ".join(docstring.split()), fields)


def _text(
    path: str, node: ast.Assign, comments: Mapping[int, tuple[str, bool]]
) -> str:
  """The comment of an assignment, in one line."""
  words: list[str] = []
  line = node.lineno - 1
  while line in comments and comments[line][1]:
    words.insert(0, comments[line][0])
    line -= 1
  for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
    if line in comments:
      words.append(comments[line][0])
  if not words:
    raise ValueError(
        f"config.{path} has no comment: write one above it, line {node.lineno}"
    )
  return " ".join(words)


def _lookup(config: Any, path: str) -> Any:
  """The value of a field."""
  for name in path.split("."):
    config = config[name]
  return config


def _markdown(text: str) -> str:
  """A comment as Markdown within a table, with links to other pages."""
  text = re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)
  return text.replace("|", r"\|")


def main(flags: Any) -> None:
  """Prints the page."""
  del flags
  print(page(), end="")


if __name__ == "__main__":
  _cli.run(main)
