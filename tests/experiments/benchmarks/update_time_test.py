"""Tests of the timed updates: settings, times, tables and memory."""

import dataclasses
import json

import jax
import pytest

from experiments.benchmarks import (
    timed_update,
    update_growth,
    update_time,
    update_time_report,
)
from experiments.learning import compiled_step
from experiments.learning.batches import BatchSettings
from experiments.parallel import sharding
from experiments.reporting import units
from tests.helpers.paths import ROOT

SMALL = update_growth.SMALL_GRID
SPEED = ROOT / "docs" / "results" / "speed"


def values(**changes):
  """Flag values of a small measurement, with some of them changed."""
  size = dataclasses.asdict(SMALL.size)
  small = {
      "model": "smollm2-135m",
      "optimizers": ["logra"],
      "ranks": ["4"],
      "repeats": 2,
      "seed": 0,
      "out": None,
      "growth": False,
      "small": True,
  }
  return small | size | changes


def test_rows_begin_with_the_baseline():
  settings = timed_update.parse_settings(
      ["logra", "dense_adam", "muon", "galore:8"], [16, 64]
  )
  assert [setting.label for setting in settings] == [
      "dense_adam",
      "logra, rank 16",
      "logra, rank 64",
      "muon",
      "galore, rank 8",
  ]


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"optimizers": ["adam"]}, "optimizers='adam' must be one of"),
        ({"ranks": ["0"]}, "ranks=0 must be at least 1"),
        ({"ranks": ["4", "x"]}, "ranks='4,x'"),
        ({"optimizers": ["lora:r4"]}, "optimizers='r4'"),
        ({"repeats": 0}, "repeats=0 must be at least 1"),
        ({"micro_batch": 3}, "micro_batch=3 must divide sequences=4"),
        ({"prompt_tokens": 8}, "prompt_tokens=8 must be at least 1"),
        ({"probe": 5}, "probe=5 must be at least 1"),
        ({"small": False, "model": "gpt-2"}, "model='gpt-2'"),
    ],
)
def test_refuses(changes, message):
  with pytest.raises(ValueError, match=message):
    update_time.run(values(**changes))


def result(setting, seconds):
  return {
      **dataclasses.asdict(setting),
      "seconds": seconds,
      "cpu_seconds": [2 * x + 1 for x in seconds],
      "first_seconds": 9.0,
      "temporary_bytes": units.GIB,
  }


def test_ratio_is_of_medians():
  dense = result(
      timed_update.OptimizerSetting("dense_adam", None),
      [4.0, 1.0, 3.0, 2.0, 100.0],
  )
  logra = result(timed_update.OptimizerSetting("logra", 64), [2.0, 1.0, 50.0])
  summary = update_time_report.summarize_times(logra, dense)
  # Medians 2 and 3; quartiles of 1, 2, 50 are 1.5 and 26.
  # Processor times have medians 5 and 7.
  ratios = {"ratio": 2 / 3, "cpu_ratio": 5 / 7}
  assert summary == {"median": 2.0, "iqr": 24.5, **ratios}
  table = update_time_report.speed_table({"rows": [dense, logra]}).splitlines()
  assert table[-1].split("|")[2:6] == [
      " 2.00 ",
      " 24.50 ",
      " 0.67 ",
      " ≤ 0.75 ",
  ]
  # Only LoGRA has a target.
  assert table[-2].split("|")[4:6] == [" 1.00 ", " - "]


def test_measures_and_writes(tmp_path):
  update_time.run(values(out=str(tmp_path)))
  measured = json.loads((tmp_path / "speed-4x8.json").read_text())
  rows = measured["rows"]
  assert [row["optimizer"] for row in rows] == ["dense_adam", "logra"]
  for row in rows:
    assert len(row["seconds"]) == len(row["cpu_seconds"]) == 2
    assert min(row["seconds"]) > 0 and row["temporary_bytes"] > 0
  assert measured["machine"]["cpus"] >= 1 and measured["weights"] == "random"
  table = update_time_report.speed_table(measured)
  assert (tmp_path / "speed-4x8.md").read_text() == table
  assert (tmp_path / "speed-4x8.png").stat().st_size > 0


def test_the_committed_tables_are_those_of_their_rows():
  speed = json.loads((SPEED / "speed-16x64.json").read_text())
  table = update_time_report.speed_table(speed)
  assert (SPEED / "speed-16x64.md").read_text() == table
  growth = json.loads((SPEED / "growth.json").read_text())
  table = update_time_report.growth_table(growth["rows"])
  assert (SPEED / "growth.md").read_text() == table


@pytest.mark.slow  # Half a minute of compiling.
def test_growth_draws_every_axis(tmp_path):
  # The grid is its base alone: one program per optimizer serves every axis.
  grid = dataclasses.replace(SMALL, tokens=(SMALL.size.tokens,))
  results = update_growth.measure_growth(grid, repeats=1, seed=0)
  axes = [(r["axis"], r["optimizer"]) for r in results]
  assert len(set(axes)) == len(axes) == 8
  update_time_report.growth_figure(results).savefig(tmp_path / "growth.png")
  assert len(update_time_report.growth_table(results).splitlines()) == 2 + 8


def temporaries(setting, micro_batches, micro_batch=2):
  """Bytes of the compiled update's temporaries, and of its batch."""
  size = dataclasses.replace(
      SMALL.size, sequences=micro_batches * micro_batch, micro_batch=micro_batch
  )
  config = timed_update.training_config(setting, size)
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
  batch = compiled_step.abstract_batch(BatchSettings.of_config(config), mesh)
  batch_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(batch))
  lowered = compiled_step.lower_update(SMALL.architecture, config, mesh)
  return compiled_step.sizes(lowered.compile())["temporary_bytes"], batch_bytes


@pytest.mark.slow  # A minute of compiling.
def test_accumulation_over_more_micro_batches_adds_no_memory():
  logra = timed_update.OptimizerSetting("logra", 4)
  (two, small), (four, middle) = temporaries(logra, 2), temporaries(logra, 4)
  eight, large = temporaries(logra, 8)
  # Only the batch itself is laid out anew for the micro-batches.
  assert four - two <= 2 * (middle - small)
  assert eight - two <= 2 * (large - small)
  # The control: the same number of sequences at once needs far more.
  at_once, _ = temporaries(logra, 1, 16)
  assert at_once - two > 20 * (large - small)
