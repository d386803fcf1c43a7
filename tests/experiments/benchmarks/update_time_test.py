"""Tests of the bench: what it times, what it makes of times, and memory."""

import dataclasses
import json

import jax
import pytest

from experiments.benchmarks import update_time
from experiments.learning import compiled_step
from experiments.parallel import sharding

SMALL = update_time.SMALL_GRID


def values(**changes):
  size = dataclasses.asdict(SMALL.size)
  found = {
      "model": "smollm2-135m",
      "optimizers": ["logra"],
      "ranks": ["4"],
      "repeats": 2,
      "seed": 0,
      "out": None,
      "growth": False,
      "small": True,
  }
  return found | size | changes


def test_rows_begin_with_the_baseline():
  rows = update_time.rows_of(
      ["logra", "dense_adam", "muon", "galore:8"], [16, 64]
  )
  assert [row.label for row in rows] == [
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


def result(row, seconds):
  return {
      **dataclasses.asdict(row),
      "seconds": seconds,
      "cpu_seconds": [2 * x + 1 for x in seconds],
      "first_seconds": 9.0,
      "temporary_bytes": 2**30,
  }


def test_ratio_is_of_medians():
  dense = result(
      update_time.Row("dense_adam", None), [4.0, 1.0, 3.0, 2.0, 100.0]
  )
  logra = result(update_time.Row("logra", 64), [2.0, 1.0, 50.0])
  found = update_time.summarize(logra, dense)
  # Medians 2 and 3; quartiles of 1, 2, 50 are 1.5 and 26.
  # Processor times have medians 5 and 7.
  ratios = {"ratio": 2 / 3, "cpu_ratio": 5 / 7}
  assert found == {"median": 2.0, "iqr": 24.5, **ratios}
  table = update_time.table({"rows": [dense, logra]}).splitlines()
  assert table[-1].split("|")[2:6] == [
      " 2.00 ",
      " 24.50 ",
      " 0.67 ",
      " ≤ 0.75 ",
  ]
  # Only LoGRA has something to reach.
  assert table[-2].split("|")[4:6] == [" 1.00 ", " - "]


def test_measures_and_writes(tmp_path):
  update_time.run(values(out=str(tmp_path)))
  found = json.loads((tmp_path / "speed-4x8.json").read_text())
  assert [row["optimizer"] for row in found["rows"]] == ["dense_adam", "logra"]
  for row in found["rows"]:
    assert len(row["seconds"]) == len(row["cpu_seconds"]) == 2
    assert min(row["seconds"]) > 0 and row["temporary_bytes"] > 0
  assert found["machine"]["cpus"] >= 1 and found["weights"] == "random"
  assert (tmp_path / "speed-4x8.md").read_text() == update_time.table(found)
  assert (tmp_path / "speed-4x8.png").stat().st_size > 0


@pytest.mark.slow  # Half a minute of compiling.
def test_growth_draws_every_axis(tmp_path):
  # One program for each optimizer: the base, on every axis.
  grid = dataclasses.replace(SMALL, tokens=(SMALL.size.tokens,))
  results = update_time.growth(grid, repeats=1, seed=0)
  axes = [(r["axis"], r["optimizer"]) for r in results]
  assert len(set(axes)) == len(axes) == 8
  update_time.growth_figure(results).savefig(tmp_path / "growth.png")
  assert len(update_time.growth_table(results).splitlines()) == 2 + 8


def temporaries(row, micro_batches, micro_batch=2):
  """Of the compiled update, and bytes of its batch."""
  size = dataclasses.replace(
      SMALL.size, sequences=micro_batches * micro_batch, micro_batch=micro_batch
  )
  config = update_time.config_of(row, size)
  mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
  arguments = compiled_step.abstract_arguments(SMALL.architecture, config, mesh)
  batch = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments[1]))
  lowered = compiled_step.lower_update(SMALL.architecture, config, mesh)
  return lowered.compile().memory_analysis().temp_size_in_bytes, batch


@pytest.mark.slow  # A minute of compiling.
def test_accumulation_over_more_micro_batches_adds_no_memory():
  row = update_time.Row("logra", 4)
  (two, small), (four, middle) = temporaries(row, 2), temporaries(row, 4)
  eight, large = temporaries(row, 8)
  # What is laid out anew for the micro-batches is the batch itself.
  assert four - two <= 2 * (middle - small)
  assert eight - two <= 2 * (large - small)
  # The control: as many sequences at once need far more.
  at_once, _ = temporaries(row, 1, 16)
  assert at_once - two > 20 * (large - small)
