"""Tests of the analyses of sweeps, on hand-made rows with known answers."""

import importlib

import pytest

from experiments.studies import curves, sweeps
from experiments.studies.learning_curves import memory
from tests.experiments.studies import curves_test

NAMES = ("kl_budget", "momentum", "learning_curves", "long_run")


def analysis_of(name):
  return importlib.import_module(f"experiments.studies.{name}.analysis")


def sweep_of(name):
  return importlib.import_module(f"experiments.studies.{name}.sweep")


def make_row(part, cell, seed, reward, accuracy=0.5, realised=1.0):
  """A row of a cell; with a budget KL is `realised` times what it was to be."""
  row = curves_test.row(part.name, cell.name, seed, reward)
  row["overrides"] = dict(cell.overrides)
  row["evals"]["eval/accuracy"] = [0.1, accuracy]
  row["evals"]["eval/weight_norm"] = [10.0, 11.0]
  if sweeps.config_of(part, cell, seed).kl.enabled:
    n = len(reward)
    row["curves"] |= {
        "kl/budget": [1e-3] * n,
        "kl/predicted": [1e-3] * n,
        "kl/realised": [realised * 1e-3] * n,
        "kl/skipped": [0.0] * n,
    }
  return row


def line_of(table, start):
  """The entries of the one line of a table whose first entry is `start`."""
  lines = [x[2:-2].split(" | ") for x in table.splitlines() if x[:2] == "| "]
  (found,) = [x for x in lines if x[0] == start]
  return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("complete", [False, True])
def test_tables_and_pictures_of_what_is_there(tmp_path, name, complete):
  rows = [
      make_row(part, cell, seed, [0.1 * i for i in range(6)])
      for part in sweep_of(name).FULL
      for cell in part.cells
      for seed in part.seeds[:2]
  ]
  rows = rows if complete else rows[:1]
  analysis_of(name).draw(rows, tmp_path)
  table = (tmp_path / "table.md").read_text()
  for row in rows[:3]:
    # An entry of its own or a method's name before the comma.
    assert row["cell"].rpartition(", ")[0] in table
  assert "nan" not in table
  assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def test_kl_budget():
  sweep, analysis = sweep_of("kl_budget"), analysis_of("kl_budget")
  part = sweep.FULL[0]
  none, constant = part.cells[0], part.cells[3]
  rise = [0.5] * 5 + [0.9] * 5
  rows = [
      make_row(part, constant, 0, rise, 0.75, realised=1.0),
      make_row(part, constant, 1, rise[::-1], 0.25, realised=3.0),
      make_row(part, none, 0, rise, 0.75),
  ]
  rows[1]["curves"]["kl/skipped"][-1] = 1.0
  rows[1]["curves"]["kl/predicted"][-1] = None  # Of the skipped step.
  # A step of KL 0 was skipped or not wanted: no ratio.
  rows[0]["curves"]["kl/predicted"][-1] = 0.0
  predicted, realised = analysis.kl_pairs(rows)
  assert len(predicted) == len(realised) == 9 + 9
  table = analysis.table(rows)
  assert line_of(table, constant.name)[1:] == [
      "2",
      # Three of ten updates: 0.9 and 0.5; five-update means drop by 0.4 once.
      "0.7 [0.5, 0.9]",
      "0.5 [0.25, 0.75]",
      "0.2 [0, 0.4]",
      "0.003",
      "1",
      "2.00 [1.00, 3.00]",
  ]
  assert "annealed -" not in table
  rows.append(make_row(part, part.cells[-1], 1, [0.6] * 10, 0.45))
  found = line_of(analysis.table(rows), f"annealed - {constant.name}")
  assert found[1:] == ["1", "+0.100", "+0.200"]
  entries = line_of(table, none.name)
  assert entries[1:4] == ["1", "0.9", "0.75"]
  assert entries[5:] == ["-", "-", "-"]


def test_momentum():
  sweep, analysis = sweep_of("momentum"), analysis_of("momentum")
  part = sweep.FULL[0]
  # Rank adds 0.1 below 16; momentum 0.2; seed 1 has 0.1 less of momentum.
  rows = []
  for cell in part.cells:
    levels = analysis.factors(cell.overrides)
    for seed in (0, 1):
      value = 0.4
      if levels is not None:
        value += 0.1 * (levels.rank < 16)
        value += (0.2 - 0.1 * seed) * (levels.basis == "fixed, momentum")
      rows.append(make_row(part, cell, seed, [value] * 3, value))
  assert (
      sum(analysis.factors(cell.overrides) is None for cell in part.cells) == 3
  )
  table = analysis.table(rows)
  gain = "+0.150 [+0.100, +0.200]"
  name = "basis fixed, momentum - basis fixed"
  assert line_of(table, name)[1:] == ["2", gain, gain]
  # Adam has no refreshed cells, which must not count against the others.
  assert line_of(table, "basis fixed - basis refreshed")[2] == "+0.000"
  assert line_of(table, "rank 4 - rank 16")[2] == "+0.100"
  assert line_of(table, "rank 256 - rank 16 (fixed)")[2] == "+0.000"
  assert line_of(table, "adam - row_adam")[2] == "+0.000"
  advised = "rank 16, fixed, momentum, row_adam - dense, adam"
  assert line_of(table, advised)[1:] == ["2", gain, gain]
  best = line_of(table, "best LoGRA cell - dense, momentum")
  assert best[2] == "+0.250 [+0.200, +0.300]"
  # The budgets are those of the other part and the factorial's own.
  other = sweep.FULL[1]
  rows += [make_row(other, other.cells[1], 0, [0.3] * 3, 0.3)]
  rows[-1]["curves"]["kl/budget"] = [3e-3] * 3
  table = analysis.table(rows)
  assert line_of(table, "0.001")[1] == "2, 2" and gain in table
  assert line_of(table, "0.003")[1:3] == ["1, 0", "0.3"]
  del rows[-1]
  # A cell that has fewer seeds says so, and is not chosen as the best.
  number = analysis.MEASURES["mean reward"]
  best_of = lambda rows: analysis.best_cell(
      curves.by_cell(rows)["small"], number
  )
  best = best_of(rows)
  few = [x for x in rows if (x["cell"], x["seed"]) != (best, 0)]
  assert "0.6, n = 1" in analysis.table(few)
  assert best.startswith("rank 4, fixed, momentum") and best_of(few) != best


def test_learning_curves():
  sweep, analysis = sweep_of("learning_curves"), analysis_of("learning_curves")
  part = sweep.FULL[0]
  # Of LoGRA's rates the second is the best, of dense Adam's the last.
  tails = {"dense_adam": (0.0, 0.05, 0.1), "logra rank 16": (0.5, 0.6, 0.2)}
  rows = []
  for label, values in tails.items():
    cell = sweeps.Cell(f"{label}, budget", {})
    rows.append(make_row(part, cell, 0, [0.0, 0.0, 0.3]))
    for rate, value in zip((1e-4, 3e-4, 1e-3), values, strict=True):
      free = {"kl.enabled": False, "optimizer.learning_rate": rate}
      cell = sweeps.Cell(f"{label}, learning rate {rate:g}", free)
      rows.append(make_row(part, cell, 0, [0.0, 0.0, value]))
  runs = analysis.methods(rows)
  assert list(runs) == ["dense_adam", "logra rank 16"]
  assert runs["logra rank 16"].best_rate() == 3e-4
  assert not runs["logra rank 16"].at_edge(3e-4)
  assert runs["dense_adam"].best_rate() == 1e-3
  both = {budget: {"peak_bytes": 3 << 19} for budget in memory.BUDGETS}
  table = analysis.table(rows, {"dense_adam": both})
  edge = "none, learning rate 0.001 (edge of the grid)"
  assert f"| dense_adam | {edge} | 1 | 0.0333 | 0.1 |" in table
  assert (
      "| logra rank 16 | none, learning rate 0.0003 | 1 | 0.2 | 0.6 |" in table
  )
  assert "| dense_adam | 1e-3 | 1 | 0.1 | 0.3 | 0.5 | 3.000 | 1.5 |" in table
  # Means of three updates: 0.3 / 3 both; 0.6 / 3 against 0.1 / 3.
  found = line_of(table, "logra rank 16 - dense_adam")[1:]
  assert found == ["+0.000", "+0.000", "+0.167", "+0.000"]


def test_long_run():
  sweep, analysis = sweep_of("long_run"), analysis_of("long_run")
  part = sweep.FULL[0]
  # 48 updates, means of two: a dip before the first quarter is none of it.
  good = [0.8] * 4 + [0.0] * 4 + [0.8] * 40
  bad = [0.8] * 40 + [0.4] * 8
  rows = [
      make_row(part, part.cells[0], 0, good, 0.9),
      make_row(part, part.cells[1], 0, bad, 0.9),
  ]
  assert analysis.lowest_share(rows[0]) == pytest.approx(1.0)
  assert analysis.lowest_share(rows[1]) == pytest.approx(0.5)
  assert analysis.blocks(rows[1])[8:] == pytest.approx([0.8, 0.8, 0.4, 0.4])
  assert analysis.verdict(rows).startswith("1 of 2 runs of at least 48 updates")
  # A run that is still rising has not collapsed.
  rising = make_row(part, part.cells[0], 1, [i / 48 for i in range(48)])
  assert analysis.lowest_share(rising) == pytest.approx(1.0)


@pytest.mark.slow
def test_memory_of_learning_curves(tmp_path):
  from_file = lambda: memory.read(tmp_path)
  assert from_file() == {}
  labels = ("dense_adam", "logra rank 4")
  found = memory.measure_memory(tmp_path, labels)
  assert from_file() == found and tuple(found) == labels
  for sizes in found.values():
    # The probe's tangents take memory; the weights are given and handed back.
    assert sizes["budget"]["peak_bytes"] > sizes["no budget"]["peak_bytes"]
    assert sizes["budget"]["aliased_bytes"] > 0
  # Two dense moments against thin arrays.
  dense, thin = (found[label]["budget"]["argument_bytes"] for label in labels)
  assert dense > 2 * thin
  table = analysis_of("learning_curves").table(
      [
          make_row(
              sweep_of("learning_curves").FULL[0],
              sweeps.Cell("dense_adam, budget", {}),
              0,
              [1.0],
          )
      ],
      found,
  )
  peak = found["dense_adam"]["budget"]["peak_bytes"] / 2**20
  assert f"| {peak:.1f} |" in table
