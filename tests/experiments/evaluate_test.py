"""Tests of the command that evaluates a model."""

import json
import subprocess
import sys

import pytest

from experiments.models import hf, tiny
from tests.helpers.paths import ROOT


def run(*args):
  """Runs the command as a user does."""
  return subprocess.run(
      [sys.executable, "-m", "experiments.evaluate", *args],
      cwd=ROOT,
      capture_output=True,
      text=True,
      check=False,
  )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
  """The flag that names a directory with the tiny model."""
  folder = tmp_path_factory.mktemp("hf")
  loaded = tiny.make_tiny(0)
  hf.save(folder, loaded.config, loaded.params, loaded.tokenizer)
  return f"--model={folder}"


@pytest.mark.slow
def test_the_command_prints_and_writes_metrics_and_samples(model, tmp_path):
  tasks = ("--task=addition", "--task=addition:2")
  options = ("--samples=4", "--k=1,4", "--prompts=10", "--max_new_tokens=4")
  out = f"--out={tmp_path / 'out'}"
  done = run(model, *tasks, *options, out, "--slots=16")
  assert done.returncode == 0, done.stderr
  assert "macro average" in done.stdout and "maj@4" in done.stdout
  content = json.loads((tmp_path / "out" / "metrics.json").read_text())
  assert set(content["metrics"]) == {"addition", "addition:2", "macro average"}
  assert content["settings"]["samples"] == 4
  assert content["command"].startswith("python -m experiments.evaluate --model")
  assert (tmp_path / "out" / "samples.html").exists()


@pytest.mark.slow
def test_errors_of_the_command_say_what_is_wrong(model):
  done = run(model, "--samples=2", "--k=4")
  assert done.returncode == 1
  assert "error: k=4 must be 1 to 2" in done.stderr
  done = run(model, "--samples=2", "--temperature=0")
  assert "samples=2 with temperature=0 are all the same" in done.stderr
  done = run("--model=/nothing")
  assert "error: no model at /nothing" in done.stderr
