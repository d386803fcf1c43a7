"""Tests of the comparison with published figures."""

import json
import os
import subprocess
import sys

import pytest

from experiments.benchmarks import timed_update
from experiments.studies.scale import analysis, run, sweep
from tests.helpers.paths import ROOT

RESULTS = ROOT / "docs" / "results"


def test_every_comparison_has_its_files():
  peaks, rows = run.read(
      RESULTS / "memory", RESULTS / "speed" / "speed-16x64.json"
  )
  for one in sweep.FULL.memory:
    assert {one.other, one.logra} <= peaks.keys()
  timed = {(row["optimizer"], row["rank"]) for row in rows}
  for one in sweep.FULL.time:
    assert {one.other, one.logra} <= timed
  text = analysis.table(sweep.FULL, peaks, rows)
  committed = (RESULTS / "scale" / "table.md").read_text("utf-8")
  assert text == committed


def test_changes_and_ratios():
  memory = sweep.MemoryComparison("here", (8.0, 6.0), None, "a", "b")
  gone = sweep.MemoryComparison("gone", None, None, "a", "c")
  text = analysis.memory_table([memory, gone], {"a": 4 << 30, "b": 1 << 30})
  assert "8.00 → 6.00 | -25.0 % | 4.00 → 1.00 | -75.0 % |" in text
  assert "gone" not in text
  rows = [
      {"optimizer": "dense_adam", "rank": None, "seconds": [2.0, 4.0, 3.0]},
      {"optimizer": "logra", "rank": 4, "seconds": [1.0, 1.0, 2.0]},
  ]
  time = sweep.TimeComparison("it", "-", ("dense_adam", None), ("logra", 4))
  text = analysis.time_table([time], rows)
  assert "| it (logra, rank 4) | - | 3.00 | 1.50, 4.00 |" in text


def test_a_folder_without_rows_is_an_error(tmp_path):
  with pytest.raises(FileNotFoundError, match="holds no rows"):
    run.read(tmp_path, tmp_path / "speed.json")


@pytest.mark.slow
def test_small_measures_both():
  # Two CPU devices must exist before JAX starts, and other tests need one.
  code = (
      "import json; from experiments.studies.scale import run;"
      " print(json.dumps(run.measure_small()))"
  )
  done = subprocess.run(
      [sys.executable, "-c", code],
      cwd=ROOT,
      env={**os.environ, "JAX_PLATFORMS": "cpu"},
      capture_output=True,
      text=True,
      check=False,
  )
  assert done.returncode == 0, done.stderr
  peaks, rows = json.loads(done.stdout.splitlines()[-1])
  assert 0 < peaks["logra"] < peaks["dense_adam"]
  assert [
      timed_update.OptimizerSetting(row["optimizer"], row["rank"]).label
      for row in rows
  ] == [
      "dense_adam",
      "logra, rank 16",
  ]
  assert all(len(row["seconds"]) == 3 for row in rows)
