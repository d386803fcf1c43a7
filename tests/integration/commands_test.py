"""Every command that the project's texts name exists and explains itself."""

import ast
import importlib.util
import json
import re
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

# Sources with their messages, guides, notebooks and the Makefile. Not
# docs/results, where past commands keep the names of their day.
_FOLDERS = ("experiments", "logra_jax", "notebooks", "docs", "tests/helpers")
_SUFFIXES = (".py", ".md", ".ipynb")
_COMMAND = re.compile(r"python3? -m\s+(experiments(?:\.[\w<>*]+)+)")
_FLAG = re.compile(r"\s--(?:no)?([a-z]\w*)")
# Stands for a study of the reader's choice.
_ANY_STUDY = re.compile(r"NAME|<name>|\*")
_STUDIES = sorted(
    path.parent.name for path in ROOT.glob("experiments/studies/*/run.py")
)


def _files():
  yield from ROOT.glob("*.md")
  yield ROOT / "Makefile"
  for folder in _FOLDERS:
    for path in sorted((ROOT / folder).rglob("*")):
      past = path.is_relative_to(ROOT / "docs" / "results")
      if path.suffix in _SUFFIXES and not past:
        yield path


def _text(path):
  text = path.read_text()
  if path.suffix == ".ipynb":
    cells = json.loads(text)["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells)
  return _joined(text)


def _joined(text):
  """The text, with adjacent strings and continued lines joined."""
  text = re.sub(r'"\s*\n\s*f?"', "", text)
  return re.sub(r"\\+\n\s*", " ", text)


def _commands(text):
  """Pairs of a module and the flags that follow it on its line."""
  for match in _COMMAND.finditer(text):
    line = text[match.end() :].split("\n", 1)[0].split("`", 1)[0]
    flags = set(_FLAG.findall(line.split(";", 1)[0]))
    name = match[1].rstrip(".")
    for study in _STUDIES if _ANY_STUDY.search(name) else [""]:
      yield _ANY_STUDY.sub(study, name), flags


def _all_commands():
  flags = {}
  for path in _files():
    for module, used in _commands(_text(path)):
      flags.setdefault(module, set()).update(used)
  return flags


COMMANDS = _all_commands()


def _is_command(module):
  """Whether `python -m module` does anything."""
  try:
    spec = importlib.util.find_spec(module)
  except ModuleNotFoundError:
    return False
  if spec is None or not spec.origin:
    return False
  with open(spec.origin) as file:
    tests = [n.test for n in ast.parse(file.read()).body if hasattr(n, "test")]
  return "__name__ == '__main__'" in map(ast.unparse, tests)


@pytest.fixture(scope="module")
def helps():
  """What `--help` prints, by module; one process imports JAX once for all."""
  modules = sorted(filter(_is_command, COMMANDS))
  result = subprocess.run(
      [sys.executable, "-m", "tests.helpers.command_help", *modules],
      cwd=ROOT,
      capture_output=True,
      text=True,
      check=True,
  )
  return json.loads(result.stdout)


@pytest.mark.parametrize("module", COMMANDS)
def test_a_named_command_explains_itself(module, helps):
  assert _is_command(module), f"python -m {module} does nothing"
  shown = helps[module]
  assert shown["code"] in (0, 1), shown["code"]  # absl's --help gives 1.
  spec = importlib.util.find_spec(module)
  with open(spec.origin) as file:
    summary = ast.get_docstring(ast.parse(file.read())).split("\n")[0]
  assert summary in shown["text"]
  assert COMMANDS[module] <= {*shown["flags"], "help"}


def test_the_usual_commands_are_found():
  for name in ("train", "evaluate", "export", "serve", "plan"):
    assert f"experiments.{name}" in COMMANDS
  assert {"config", "workdir"} <= COMMANDS["experiments.train"]
  assert len(COMMANDS) > 15 and len(_STUDIES) > 5


def test_a_command_that_does_nothing_would_be_found():
  message = 'f"run `python -m"\n    f" experiments.planner --model=X` first"'
  found = list(_commands(_joined(message)))
  assert found == [("experiments.planner", {"model"})]
  assert not _is_command("experiments.planner")  # Not there.
  assert not _is_command("experiments.planning.targets")  # No main.
  assert not _is_command("experiments.planning")  # A folder.
