"""Tests of sweeps: their cells can start, and rows are measured once."""

import importlib
import json

import pytest

from experiments.configs import tiny
from experiments.learning import compiled_step
from experiments.runs import check_config, record
from experiments.studies import sweeps

SWEEPS = ("kl_budget", "momentum", "learning_curves", "long_run")


def two_updates():
  config = tiny.get_config()
  config.updates = config.evaluate.every = config.checkpoint.every = 2
  return config


def make_part(overrides=None, seeds=(0, 1)):
  cell = sweeps.Cell("only", overrides or {})
  return sweeps.Part("tiny", two_updates, (cell,), seeds)


def test_a_config_has_the_cells_values_and_the_seed():
  part = make_part({"optimizer.rank": 3, "kl.enabled": False})
  config = sweeps.run_config(part, part.cells[0], 5)
  assert (config.optimizer.rank, config.kl.enabled) == (3, False)
  assert (config.seed, config.task.seed) == (5, 5)
  other = sweeps.run_config(part, part.cells[0], 6)
  assert other.optimizer.seed != config.optimizer.seed
  assert two_updates().optimizer.rank != 3  # The part has another rank.


@pytest.mark.parametrize(
    "overrides",
    [{"optimizer.rnak": 3}, {"optimiser.rank": 3}, {"optimizer.rank": "four"}],
)
def test_bad_overrides_name_the_cell(overrides):
  part = make_part(overrides)
  with pytest.raises(ValueError, match="'only' of part 'tiny'"):
    sweeps.run_config(part, part.cells[0], 0)


def test_bad_values_show_before_anything_runs(tmp_path):
  good, bad = make_part(), make_part({"optimizer.rank": 0})
  with pytest.raises(ValueError, match="rank"):
    sweeps.measure_runs((good, bad), tmp_path)
  assert not (tmp_path / sweeps.ROWS).exists()


def test_rows_are_measured_once_by_one_compiled_program(tmp_path):
  # Without a budget, compiling takes half the time.
  make = lambda seeds: make_part({"kl.enabled": False}, seeds)
  before = compiled_step.programs.cache_info()
  sweeps.measure_runs((make((0,)),), tmp_path)
  first = record.read_rows(tmp_path / sweeps.ROWS)
  # One of two seeds is measured already; the other one comes last.
  sweeps.measure_runs((make((0, 1)),), tmp_path)
  rows = record.read_rows(tmp_path / sweeps.ROWS)
  after = compiled_step.programs.cache_info()
  assert (after.misses - before.misses, after.hits - before.hits) == (1, 1)
  assert rows[:1] == first
  assert [(x["part"], x["cell"], x["seed"]) for x in rows] == [
      ("tiny", "only", 0),
      ("tiny", "only", 1),
  ]
  assert rows[0]["evals"]["update"] == [0, 2]
  names = [x for x in sweeps.CURVES if not x.startswith("kl/")]
  assert list(rows[0]["curves"]) == names
  assert all(len(values) == 2 for values in rows[0]["curves"].values())
  seen = [(x["curves"]["train/reward"], x["evals"]) for x in rows]
  assert seen[0] != seen[1]
  machine = json.loads((tmp_path / "machine.json").read_text())
  assert machine["command"] and machine["cpus"]
  # Nothing runs if nothing is missing or nothing is selected.
  sweeps.measure_runs((make((0, 1)),), tmp_path)
  sweeps.measure_runs((make((7,)),), tmp_path, only="tiny/other")
  assert record.read_rows(tmp_path / sweeps.ROWS) == rows


@pytest.mark.parametrize("name", SWEEPS)
@pytest.mark.parametrize("size", ["FULL", "SMALL"])
def test_all_cells_can_start(name, size):
  sweep = importlib.import_module(f"experiments.studies.{name}.sweep")
  parts = vars(sweep)[size]
  names = [(part.name, cell.name) for part in parts for cell in part.cells]
  assert len(names) == len(set(names))
  programs = set()
  for part in parts:
    for cell in part.cells:
      config = sweeps.run_config(part, cell, part.seeds[0])
      check_config.check_config(config)
      programs.add((part.name, config.to_json(sort_keys=True)))
  assert len(programs) == len(names)  # No two cells of a part are the same.
