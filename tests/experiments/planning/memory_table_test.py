"""The memory table and its figure, made from saved rows."""

import dataclasses
import json

import pytest

from experiments.planning import memory_table
from experiments.planning.request import Request, resolved
from experiments.reporting.units import GIB
from tests.helpers.paths import ROOT

FOLDER = ROOT / "docs/results/memory"


def saved(request, peak_gib, fits=True):
  return {
      "request": dataclasses.asdict(resolved(request)),
      "peak_bytes": None if peak_gib is None else int(peak_gib * GIB),
      "floor_bytes": 2 * GIB,
      "memory_bytes": 16 * GIB,
      "fits": fits,
      "flops": 1_500_000_000_000,
      "collective_bytes": {"all-gather": GIB, "all-reduce": GIB // 2},
  }


def test_rows_have_names_of_their_own_and_are_possible():
  names = [row.name for row in memory_table.SWEEP]
  assert len(set(names)) == len(names)
  assert "qwen2.5-7b-h100-4-logra-r256-bfloat16-frozen" in names
  for row in memory_table.SWEEP:
    resolved(row.request)


def test_the_table(tmp_path):
  logra = Request("qwen2.5-7b", "h100:4", param_dtype="bfloat16", probe=2)
  dense = dataclasses.replace(
      logra, optimizer="dense_adam", param_dtype="float32"
  )
  missing = dataclasses.replace(logra, target="h100:1")
  other = dataclasses.replace(logra, target="v5e:2x2")
  rows = [
      memory_table.MemoryRow(dense),
      memory_table.MemoryRow(logra, reach=4.5),
      memory_table.MemoryRow(missing),
      memory_table.MemoryRow(other),
  ]
  for row, peak in zip(rows, (20, 4, None, None), strict=True):
    if row.request is not missing:
      content = saved(row.request, peak, fits=peak is not None)
      (tmp_path / f"{row.name}.json").write_text(json.dumps(content))
  results = memory_table.read(tmp_path, rows)
  assert len(results) == 3
  lines = memory_table.peak_table(results).splitlines()
  assert len({line.count("|") for line in lines}) == 1
  first, second, third = lines[2:]
  sizes = "1 x 2048, probe 2"
  assert (
      f"| dense_adam | float32 | frozen | {sizes} | 20.00 | - | +0.0 % |"
      in first
  )
  assert "| 4.00 | ≤ 4.5 | -80.0 % | 2.00 | 2.00 | fits in 16.00 |" in second
  assert second.endswith("| 1.5 | 1.50 |")
  assert "| ? | - | - | 2.00 | - | does not fit in 16.00 |" in third
  pytest.importorskip("matplotlib", reason="the extra 'train'")
  figure = memory_table.peak_figure(results)
  widths = [bar.get_width() for bar in figure.axes[0].patches]
  assert widths == [20, 4, 0, 2, 2, 2]


def test_the_committed_table_is_made_from_the_committed_rows():
  results = memory_table.read(FOLDER)
  assert len(results) == len(memory_table.SWEEP)
  committed = (FOLDER / "table.md").read_text("utf-8")
  assert memory_table.peak_table(results) == committed


def test_committed_rows_are_those_of_the_sweep():
  for row in memory_table.SWEEP:
    saved = json.loads((FOLDER / f"{row.name}.json").read_text("utf-8"))
    for name, value in dataclasses.asdict(resolved(row.request)).items():
      if value is not None:
        assert saved["request"][name] == value, (row.name, name)
