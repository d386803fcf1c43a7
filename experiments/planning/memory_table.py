"""The memory table: every row compiled for its target, written and drawn.

  python -m experiments.planning.memory_table --out=docs/results/memory

One JSON file a row (`experiments.plan` writes it, in a process of its own),
then `table.md` and `memory.png` from the files that are there. Rows that have
a file are not compiled again; `--only=REGEX` selects rows by their names.
Cost: one to four minutes a row on two CPU cores. H100 needs the extra `cuda`,
TPUs need the extra `tpu`.
"""

from collections.abc import Iterable, Sequence
import dataclasses
import json
import pathlib
import re
import subprocess
import sys
from typing import Any

from absl import app, flags

from experiments.planning.request import Request
from experiments.reporting import figures

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Row:
  """One row of the table.

  Attributes:
    request: what is compiled.
    reach: GiB per device that it should not exceed, or None.
  """

  request: Request
  reach: float | None = None

  @property
  def name(self) -> str:
    """Of its file, without the ending."""
    r = self.request
    parts = [r.model, r.target, r.optimizer, f"r{r.rank}", r.param_dtype]
    parts += [r.others]
    if r.sequences > 1:
      parts += [f"{r.sequences}x", f"probe{r.probe}"]
    return "-".join(str(part).replace(":", "-") for part in parts)


def _rows(
    model: str, target: str, rank: int, reach: float, dense: bool = True
) -> list[Row]:
  """Dense Adam, and LoGRA with the rest frozen and trained."""
  logra = Request(model, target, rank=rank, param_dtype="bfloat16")
  trained = dataclasses.replace(logra, others="adam")
  rows = [Row(logra, reach), Row(trained)]
  if not dense:
    return rows
  adam = dataclasses.replace(
      trained, optimizer="dense_adam", param_dtype="float32"
  )
  return [Row(adam), *rows]


def _peers(model: str, target: str) -> list[Row]:
  """The peers' setting, and other optimizers of the same weights."""
  published = Request(
      model, target, rank=256, param_dtype="float32", others="adam"
  )
  frozen = Request(model, target, rank=256, param_dtype="bfloat16")
  rest = [
      dataclasses.replace(frozen, optimizer=name) for name in ("lora", "galore")
  ]
  return [Row(request) for request in (published, *rest)]


def _operations(model: str, target: str) -> list[Row]:
  """A whole update of 16 sequences a device, to compare operations."""
  logra = Request(model, target, sequences=16, probe=2, param_dtype="bfloat16")
  dense = dataclasses.replace(
      logra, optimizer="dense_adam", param_dtype="float32"
  )
  return [Row(logra), Row(dense), Row(dataclasses.replace(dense, probe=0))]


SWEEP: tuple[Row, ...] = (
    *_rows("qwen2.5-1.5b", "h100:4", 256, 1.2),
    *_peers("qwen2.5-1.5b", "h100:4"),
    *_rows("qwen2.5-7b", "h100:4", 256, 4.7),
    *_peers("qwen2.5-7b", "h100:4"),
    *_rows("qwen2.5-32b", "h100:8", 256, 10.0),
    *_rows("qwen2.5-7b", "h100:1", 16, 16.0, dense=False),
    *_rows("qwen2.5-32b", "h100:1", 16, 64.0, dense=False),
    *_rows("qwen2.5-32b", "v5e:2x4", 16, 10.5, dense=False),
    *_operations("qwen2.5-7b", "h100:4"),
)


def compile_row(row: Row, folder: pathlib.Path) -> None:
  """Runs the planner on a row and writes its JSON file.

  Raises:
    ValueError: the planner has failed; with what it said last.
  """
  values = dataclasses.asdict(row.request)
  arguments = [
      f"--{name}={value}" for name, value in values.items() if value is not None
  ]
  arguments.append(f"--out={folder / f'{row.name}.json'}")
  process = subprocess.run(
      [sys.executable, "-m", "experiments.plan", *arguments],
      capture_output=True,
      text=True,
      check=False,
  )
  if process.returncode:
    last = process.stderr.strip().splitlines()[-1:]
    raise ValueError(f"{row.name}: {''.join(last)}")


def read(
    folder: pathlib.Path, rows: Iterable[Row] = SWEEP
) -> list[dict[str, Any]]:
  """The files that are there, in the sweep's order, each with its `reach`."""
  found = []
  for row in rows:
    file = folder / f"{row.name}.json"
    if file.is_file():
      found.append(json.loads(file.read_text("utf-8")) | {"reach": row.reach})
  return found


def table(results: Sequence[dict[str, Any]]) -> str:
  """Saved rows as a Markdown table.

  Args:
    results: of `read`.
  """
  head = (
      "| model, devices | optimizer | weights | others | sequences a device |"
      " peak, GiB | to reach |"
      " against dense Adam | floor | peak / floor | of a device | TFLOP |"
      " collectives, GiB |"
  )
  lines = [head, "|---|---|---|---|---|---|---|---|---|---|---|---|---|"]
  for result in results:
    lines.append(f"| {' | '.join(_cells(result, results))} |")
  return "\n".join(lines) + "\n"


def _cells(result: dict[str, Any], results: Sequence[dict[str, Any]]) -> list:
  """One row of the table."""
  r, peak = result["request"], result["peak_bytes"]
  dense = _dense_peak(r, results)
  floor = result["floor_bytes"]
  rank = "" if r["optimizer"] == "dense_adam" else f", rank {r['rank']}"
  moved = sum(result["collective_bytes"].values())
  return [
      f"{r['model']}, {r['target']}",
      f"{r['optimizer']}{rank}",
      r["param_dtype"],
      r["others"],
      f"{r['sequences']} x {r['tokens']}, probe {r['probe']}",
      _gib(peak),
      "-" if result["reach"] is None else f"≤ {result['reach']}",
      f"{100 * (peak / dense - 1):+.1f} %" if peak and dense else "-",
      _gib(floor),
      f"{peak / floor:.2f}" if peak else "-",
      f"{'fits' if result['fits'] else 'does not fit'} in"
      f" {_gib(result['memory_bytes'])}",
      f"{result['flops'] / 1e12:.1f}" if result["flops"] else "-",
      _gib(moved) if result["flops"] else "-",
  ]


def _gib(n_bytes: int | None) -> str:
  return "?" if n_bytes is None else f"{n_bytes / _GIB:.2f}"


def _dense_peak(
    request: dict[str, Any], results: Sequence[dict[str, Any]]
) -> int | None:
  """Peak of dense Adam with the same model and target."""
  for other in results:
    r = other["request"]
    same = all(
        r[key] == request[key] for key in ("model", "target", "sequences")
    )
    if same and r["optimizer"] == "dense_adam":
      return other["peak_bytes"]
  return None


def figure_of(results: Sequence[dict[str, Any]]) -> Any:
  """Saved rows as bars: peak, the weights' floor, a device's memory."""
  height = 1.2 + 0.32 * len(results)
  figure = figures.make_figure(10, height)
  axes = figure.subplots()
  labels, at = [], range(len(results))
  for result in results:
    r = result["request"]
    labels.append(
        f"{r['model']}, {r['target']}: {r['optimizer']} {r['rank']},"
        f" {r['param_dtype']}, others {r['others']}"
    )
  of = lambda key: [(result[key] or 0) / _GIB for result in results]
  axes.barh(at, of("peak_bytes"), color="tab:blue", label="peak of the update")
  axes.barh(
      at, of("floor_bytes"), color="tab:orange", label="bfloat16 weights alone"
  )
  axes.plot(of("memory_bytes"), at, "k|", markersize=12, label="device memory")
  axes.set_yticks(at, labels, fontsize=8)
  axes.invert_yaxis()
  axes.set_xscale("log")
  axes.set_xlabel("GiB per device")
  axes.grid(axis="x", alpha=0.3)
  axes.legend(loc="lower right", fontsize=8)
  return figure


def main(argv: Sequence[str]) -> None:
  del argv
  folder = pathlib.Path(flags.FLAGS.out)
  folder.mkdir(parents=True, exist_ok=True)
  failed = []
  for row in SWEEP:
    there = (folder / f"{row.name}.json").is_file()
    if there or not re.search(flags.FLAGS.only, row.name):
      continue
    print(row.name, flush=True)
    try:
      compile_row(row, folder)
    except ValueError as error:
      failed.append(f"error: {error}")
      print(failed[-1], flush=True)
  results = read(folder)
  if results:
    (folder / "table.md").write_text(table(results), "utf-8")
    figure_of(results).savefig(folder / "memory.png", dpi=150)
    print(table(results))
  if failed:
    sys.exit("\n".join(failed))


if __name__ == "__main__":
  flags.DEFINE_string("out", None, "Folder for the files.")
  flags.DEFINE_string("only", "", "Regular expression of rows' names.")
  flags.mark_flags_as_required(["out"])
  app.run(main)
