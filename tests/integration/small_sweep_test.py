"""Tests the small version of a study as a reader would start it."""

import os
import subprocess
import sys

from experiments.runs import record
from tests.helpers.paths import ROOT


def _start(out, *flags):
  command = [
      sys.executable,
      "-m",
      "experiments.studies.long_run.run",
      f"--out={out}",
  ]
  environment = {
      **os.environ,
      "JAX_PLATFORMS": "cpu",
      "XLA_FLAGS": "--xla_backend_optimization_level=0",
  }
  return subprocess.run(
      [*command, *flags],
      cwd=ROOT,
      env=environment,
      capture_output=True,
      text=True,
      check=False,
  )


def test_the_small_sweep_measures_draws_and_draws_again(tmp_path):
  done = _start(tmp_path, "--small")
  assert done.returncode == 0, done.stderr
  (row,) = record.read_rows(tmp_path / "rows.jsonl")
  assert len(row["curves"]["train/reward"]) == 24
  assert row["evals"]["update"][-1] == 24
  table = (tmp_path / "table.md").read_text("utf-8")
  (tmp_path / "table.md").unlink()
  (tmp_path / "long_run.png").unlink()

  done = _start(tmp_path, "--redraw")
  assert done.returncode == 0, done.stderr
  assert (tmp_path / "table.md").read_text("utf-8") == table
  assert (tmp_path / "long_run.png").exists()
  assert len(record.read_rows(tmp_path / "rows.jsonl")) == 1


def test_nothing_to_draw_is_an_error(tmp_path):
  done = _start(tmp_path, "--redraw")
  assert done.returncode and "run without --redraw" in done.stderr


def test_help_explains_the_study_and_lists_its_flags(tmp_path):
  shown = _start(tmp_path, "--help").stdout
  assert "Does a run of 1,200 updates under a falling KL budget" in shown
  assert "Cost:" in shown
  for flag in ("--out", "--[no]small", "--[no]redraw", "--only"):
    assert flag in shown
