"""Tests of the analyses of sweeps, on hand-made rows with known answers."""

import importlib

import pytest

from experiments.runs import record
from experiments.studies import curves, sweeps
from experiments.studies.learning_curves import memory
from tests.helpers.paths import ROOT
from tests.helpers.study_rows import line_of, make_cell_row

NAMES = ("kl_budget", "momentum", "learning_curves", "long_run")
GRADIENT_STUDIES = ("gain_per_kl", "rank_reconstruction")
RESULTS = ROOT / "docs" / "results"


def analysis_of(name):
  return importlib.import_module(f"experiments.studies.{name}.analysis")


def sweep_of(name):
  return importlib.import_module(f"experiments.studies.{name}.sweep")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("complete", [False, True])
def test_tables_and_figures_of_the_rows_that_exist(tmp_path, name, complete):
  rows = [
      make_cell_row(part, cell, seed, [0.1 * i for i in range(6)])
      for part in sweep_of(name).FULL
      for cell in part.cells
      for seed in part.seeds[:2]
  ]
  rows = rows if complete else rows[:1]
  analysis_of(name).draw(rows, tmp_path)
  table = (tmp_path / "table.md").read_text()
  for row in rows[:3]:
    # A cell's name, or a method's name before the comma, is an entry.
    assert row["cell"].rpartition(", ")[0] in table
  assert "nan" not in table
  assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("name", NAMES + GRADIENT_STUDIES)
def test_committed_tables_follow_from_committed_rows(name):
  rows = record.read_rows(RESULTS / name / sweeps.ROWS)
  more = [memory.read(RESULTS / name)] if name == "learning_curves" else []
  table = analysis_of(name).table(rows, *more)
  assert table == (RESULTS / name / "table.md").read_text("utf-8")


def test_kl_budget():
  sweep, analysis = sweep_of("kl_budget"), analysis_of("kl_budget")
  part = sweep.FULL[0]
  none, constant = part.cells[0], part.cells[3]
  rise = [0.5] * 5 + [0.9] * 5
  rows = [
      make_cell_row(part, constant, 0, rise, 0.75, realised=1.0),
      make_cell_row(part, constant, 1, rise[::-1], 0.25, realised=3.0),
      make_cell_row(part, none, 0, rise, 0.75),
  ]
  rows[1]["curves"]["kl/skipped"][-1] = 1.0
  rows[1]["curves"]["kl/predicted"][-1] = None  # As of a skipped step.
  # A step of KL 0 was not taken, so it has no ratio.
  rows[0]["curves"]["kl/predicted"][-1] = 0.0
  predicted, realised = analysis.kl_pairs(rows)
  assert len(predicted) == len(realised) == 9 + 9
  table = analysis.table(rows)
  assert line_of(table, constant.name)[1:] == [
      "2",
      # The last three of ten updates have 0.9 and 0.5. The running mean of one
      # run drops by 0.4.
      "0.7 [0.5, 0.9]",
      "0.5 [0.25, 0.75]",
      "0.2 [0, 0.4]",
      "0.003",
      "1",
      "2.00 [1.00, 3.00]",
  ]
  assert "annealed -" not in table
  rows.append(make_cell_row(part, part.cells[-1], 1, [0.6] * 10, 0.45))
  line = line_of(analysis.table(rows), f"annealed - {constant.name}")
  assert line[1:] == ["1", "+0.100", "+0.200"]
  entries = line_of(table, none.name)
  assert entries[1:4] == ["1", "0.9", "0.75"]
  assert entries[5:] == ["-", "-", "-"]


def test_momentum():
  sweep, analysis = sweep_of("momentum"), analysis_of("momentum")
  part = sweep.FULL[0]
  # Ranks below 16 add 0.1, and momentum adds 0.2, or 0.1 with seed 1.
  rows = []
  for cell in part.cells:
    levels = analysis.factors_of(cell.overrides)
    for seed in (0, 1):
      value = 0.4
      if levels is not None:
        value += 0.1 * (levels.rank < 16)
        value += (0.2 - 0.1 * seed) * (levels.basis == "fixed, momentum")
      rows.append(make_cell_row(part, cell, seed, [value] * 3, value))
  assert (
      sum(analysis.factors_of(cell.overrides) is None for cell in part.cells)
      == 3
  )
  table = analysis.table(rows)
  gain = "+0.150 [+0.100, +0.200]"
  name = "basis fixed, momentum - basis fixed"
  assert line_of(table, name)[1:] == ["2", gain, gain]
  # Adam has no refreshed cells; its fixed ones must not be compared.
  assert line_of(table, "basis fixed - basis refreshed")[2] == "+0.000"
  assert line_of(table, "rank 4 - rank 16")[2] == "+0.100"
  assert line_of(table, "rank 256 - rank 16 (fixed)")[2] == "+0.000"
  assert line_of(table, "adam - row_adam")[2] == "+0.000"
  advised = "rank 16, fixed, momentum, row_adam - dense, adam"
  assert line_of(table, advised)[1:] == ["2", gain, gain]
  best = line_of(table, "best LoGRA cell - dense, momentum")
  assert best[2] == "+0.250 [+0.200, +0.300]"
  # Budgets are those of the other part and the one of the factorial.
  other = sweep.FULL[1]
  rows += [make_cell_row(other, other.cells[1], 0, [0.3] * 3, 0.3)]
  rows[-1]["curves"]["kl/budget"] = [3e-3] * 3
  table = analysis.table(rows)
  assert line_of(table, "0.001")[1] == "2, 2" and gain in table
  assert line_of(table, "0.003")[1:3] == ["1, 0", "0.3"]
  del rows[-1]
  # A cell with fewer seeds says so, and is not chosen as the best.
  statistic = analysis.STATISTICS["mean reward"]
  best_of = lambda rows: analysis.best_cell(
      curves.rows_by_cell(rows)["small"], statistic
  )
  best = best_of(rows)
  few = [x for x in rows if (x["cell"], x["seed"]) != (best, 0)]
  assert "0.6, n = 1" in analysis.table(few)
  assert best.startswith("rank 4, fixed, momentum") and best_of(few) != best


def test_learning_curves():
  sweep, analysis = sweep_of("learning_curves"), analysis_of("learning_curves")
  part = sweep.FULL[0]
  # The best rate of LoGRA is the second, and that of dense Adam the last.
  tails = {"dense_adam": (0.0, 0.05, 0.1), "logra rank 16": (0.5, 0.6, 0.2)}
  rows = []
  for label, values in tails.items():
    cell = sweeps.Cell(f"{label}, budget", {})
    rows.append(make_cell_row(part, cell, 0, [0.0, 0.0, 0.3]))
    for rate, value in zip((1e-4, 3e-4, 1e-3), values, strict=True):
      free = {"kl.enabled": False, "optimizer.learning_rate": rate}
      cell = sweeps.Cell(f"{label}, learning rate {rate:g}", free)
      rows.append(make_cell_row(part, cell, 0, [0.0, 0.0, value]))
  runs = analysis.runs_by_method(rows)
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
  # Means of three updates: 0.3 / 3 for both; 0.6 / 3 against 0.1 / 3.
  line = line_of(table, "logra rank 16 - dense_adam")[1:]
  assert line == ["+0.000", "+0.000", "+0.167", "+0.000"]


def test_long_run():
  sweep, analysis = sweep_of("long_run"), analysis_of("long_run")
  part = sweep.FULL[0]
  # With 48 updates, windows are of two, and a dip before update 12 is ignored.
  good = [0.8] * 4 + [0.0] * 4 + [0.8] * 40
  bad = [0.8] * 40 + [0.4] * 8
  rows = [
      make_cell_row(part, part.cells[0], 0, good, 0.9),
      make_cell_row(part, part.cells[1], 0, bad, 0.9),
  ]
  assert analysis.lowest_share(rows[0]) == pytest.approx(1.0)
  assert analysis.lowest_share(rows[1]) == pytest.approx(0.5)
  assert analysis.blocks(rows[1])[8:] == pytest.approx([0.8, 0.8, 0.4, 0.4])
  assert analysis.verdict(rows).startswith("1 of 2 runs of at least 48 updates")
  # A rising run has not collapsed.
  rising = make_cell_row(part, part.cells[0], 1, [i / 48 for i in range(48)])
  assert analysis.lowest_share(rising) == pytest.approx(1.0)


@pytest.mark.slow
def test_memory_of_learning_curves(tmp_path):
  assert memory.read(tmp_path) == {}
  labels = ("dense_adam", "logra rank 4")
  methods = memory.measure_memory(tmp_path, labels)
  assert memory.read(tmp_path) == methods and tuple(methods) == labels
  for sizes in methods.values():
    # The tangents of the probe take memory. The weights are donated.
    assert sizes["budget"]["peak_bytes"] > sizes["no budget"]["peak_bytes"]
    assert sizes["budget"]["aliased_bytes"] > 0
  # Dense Adam has two dense moments, and LoGRA thin ones.
  dense, thin = (methods[label]["budget"]["argument_bytes"] for label in labels)
  assert dense > 2 * thin
  table = analysis_of("learning_curves").table(
      [
          make_cell_row(
              sweep_of("learning_curves").FULL[0],
              sweeps.Cell("dense_adam, budget", {}),
              0,
              [1.0],
          )
      ],
      methods,
  )
  peak = methods["dense_adam"]["budget"]["peak_bytes"] / 2**20
  assert f"| {peak:.1f} |" in table
