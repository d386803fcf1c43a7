"""The import linter accepts the project and rejects imports that go upward."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

pytest.importorskip("importlinter")

# Where an import is planted, the import, and the contract that it breaks.
_PLANTS = {
    "upward": (
        "experiments/models/tiny.py",
        "from experiments.runs import loop",
        "experiments.models is not allowed to import experiments.runs",
    ),
    "inside a function": (
        "experiments/rollouts/rollout.py",
        "def late():\n  import experiments.learning.losses",
        "experiments.rollouts is not allowed to import experiments.learning",
    ),
    "between commands": (
        "experiments/export.py",
        "from experiments import evaluate",
        "experiments.export is not allowed to import experiments.evaluate",
    ),
    "circle in a folder": (
        "experiments/reporting/units.py",
        "from experiments.reporting import circle",
        "No cycles are allowed in experiments.reporting",
    ),
    "from the library": (
        "logra_jax/_paths.py",
        "import experiments.models",
        "logra_jax is not allowed to import experiments",
    ),
    "of a private module": (
        "experiments/learning/losses.py",
        "from logra_jax import _state",
        "experiments.learning.losses -> logra_jax._state",
    ),
    "folder without a layer": (
        "experiments/attic/__init__.py",
        "",
        "attic",
    ),
}


def _lint(folder):
  """Exit code and report of the linter on a copy of the project."""
  command = "from importlinter.cli import lint_imports_command as run; run()"
  result = subprocess.run(
      [sys.executable, "-c", command, "--no-cache", "--no-logo"],
      cwd=folder,
      env={**os.environ, "PYTHONPATH": str(folder), "COLUMNS": "200"},
      capture_output=True,
      text=True,
  )
  return result.returncode, result.stdout + result.stderr


@pytest.fixture
def project(tmp_path):
  """A copy of the packages and the linter's settings."""
  for package in ("experiments", "logra_jax"):
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
  shutil.copy(ROOT / "pyproject.toml", tmp_path)
  return tmp_path


def test_the_project_keeps_its_layers(project):
  code, report = _lint(project)
  assert code == 0, report


@pytest.mark.parametrize("name", _PLANTS)
def test_a_planted_import_is_found(project, name):
  file, line, complaint = _PLANTS[name]
  circle = project / "experiments" / "reporting" / "circle.py"
  circle.write_text("from experiments.reporting import units\n")
  path = project / file
  path.parent.mkdir(exist_ok=True)
  with path.open("a") as stream:
    stream.write(f"\n{line}\n")
  code, report = _lint(project)
  assert code == 1 and complaint in report, report
