"""Makes the memory table: compiles each row for its target, draws the results.

  python -m experiments.planning.memory_table --out=docs/results/memory

`experiments.plan` writes one JSON file per row, in a process of its own; then
`table.md` and `memory.png` are made from all files that exist. A row that has a
file is not compiled again. `--only=REGEX` selects rows by name.

Cost: one to four minutes per row on two CPU cores. H100 needs the extra `cuda`,
TPUs need the extra `tpu`.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import json
import pathlib
import re
import subprocess
import sys
from typing import Any

from absl import flags

from experiments import _cli
from experiments.planning.request import Request
from experiments.reporting import figures, tables
from experiments.reporting.units import GIB


@dataclasses.dataclass(frozen=True)
class MemoryRow:
  """One row of the table.

  Attributes:
    request: What is compiled.
    reach: The peak in GiB per device that it should not exceed, or None.
  """

  request: Request
  reach: float | None = None

  @property
  def name(self) -> str:
    """The stem of the row's file."""
    r = self.request
    parts = [r.model, r.target, r.optimizer, f"r{r.rank}", r.param_dtype]
    parts.append(r.others)
    if r.sequences > 1:
      parts += [f"{r.sequences}x", f"probe{r.probe}"]
    return "-".join(str(part).replace(":", "-") for part in parts)


def _rows(
    model: str, target: str, rank: int, reach: float, dense: bool = True
) -> list[MemoryRow]:
  """Dense Adam; LoGRA with the other parameters frozen, and trained."""
  logra = Request(model, target, rank=rank, param_dtype="bfloat16")
  trained = dataclasses.replace(logra, others="adam")
  rows = [MemoryRow(logra, reach), MemoryRow(trained)]
  if not dense:
    return rows
  adam = dataclasses.replace(
      trained, optimizer="dense_adam", param_dtype="float32"
  )
  return [MemoryRow(adam), *rows]


def _peers(model: str, target: str) -> list[MemoryRow]:
  """The setting of published figures, and two other optimizers."""
  published = Request(
      model, target, rank=256, param_dtype="float32", others="adam"
  )
  frozen = Request(model, target, rank=256, param_dtype="bfloat16")
  rest = [
      dataclasses.replace(frozen, optimizer=name) for name in ("lora", "galore")
  ]
  return [MemoryRow(request) for request in (published, *rest)]


def _operations(model: str, target: str) -> list[MemoryRow]:
  """Updates of 16 sequences per device, to compare their operations."""
  logra = Request(model, target, sequences=16, probe=2, param_dtype="bfloat16")
  dense = dataclasses.replace(
      logra, optimizer="dense_adam", param_dtype="float32"
  )
  return [
      MemoryRow(logra),
      MemoryRow(dense),
      MemoryRow(dataclasses.replace(dense, probe=0)),
  ]


SWEEP: tuple[MemoryRow, ...] = (
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


def compile_row(row: MemoryRow, folder: pathlib.Path) -> None:
  """Plans a row in a process of its own, which writes the row's JSON file.

  Raises:
    ValueError: If the planner failed; has the last line that it printed.
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
    folder: pathlib.Path, rows: Iterable[MemoryRow] = SWEEP
) -> list[dict[str, Any]]:
  """Reads the files that exist, in the order of `rows`.

  Returns:
    The content of each file, with the row's `reach`.
  """
  results = []
  for row in rows:
    file = folder / f"{row.name}.json"
    if file.is_file():
      content = json.loads(file.read_text("utf-8"))
      results.append(content | {"reach": row.reach})
  return results


def peak_table(results: Sequence[Mapping[str, Any]]) -> str:
  """Makes a Markdown table of saved rows.

  Args:
    results: What `read` returned.
  """
  head = (
      "model, devices",
      "optimizer",
      "weights",
      "others",
      "sequences a device",
      "peak, GiB",
      "to reach",
      "against dense Adam",
      "floor",
      "peak / floor",
      "of a device",
      "TFLOP",
      "collectives, GiB",
  )
  return tables.markdown(head, [_cells(one, results) for one in results])


def _cells(
    result: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> list[str]:
  """The entries of one row of the table."""
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
  """Bytes as an entry in GiB."""
  return "?" if n_bytes is None else f"{n_bytes / GIB:.2f}"


def _dense_peak(
    request: Mapping[str, Any], results: Sequence[Mapping[str, Any]]
) -> int | None:
  """Peak of dense Adam with the same model, target and sequences."""
  for other in results:
    r = other["request"]
    same = all(
        r[key] == request[key] for key in ("model", "target", "sequences")
    )
    if same and r["optimizer"] == "dense_adam":
      return other["peak_bytes"]
  return None


def peak_figure(results: Sequence[Mapping[str, Any]]) -> Any:
  """Draws saved rows as bars: the peak, the weights and the device's memory."""
  figure = figures.make_figure(10, 1.2 + 0.32 * len(results))
  axes = figure.subplots()
  labels, at = [], range(len(results))
  for result in results:
    r = result["request"]
    labels.append(
        f"{r['model']}, {r['target']}: {r['optimizer']} {r['rank']},"
        f" {r['param_dtype']}, others {r['others']}"
    )
  gib = lambda key: [(result[key] or 0) / GIB for result in results]
  axes.barh(at, gib("peak_bytes"), color="tab:blue", label="peak of the update")
  axes.barh(
      at, gib("floor_bytes"), color="tab:orange", label="bfloat16 weights alone"
  )
  axes.plot(gib("memory_bytes"), at, "k|", markersize=12, label="device memory")
  axes.set_yticks(at, labels, fontsize=8)
  axes.invert_yaxis()
  axes.set_xscale("log")
  axes.set_xlabel("GiB per device")
  axes.grid(axis="x", alpha=0.3)
  axes.legend(loc="lower right", fontsize=8)
  return figure


def main(values: flags.FlagValues) -> None:
  folder = pathlib.Path(values.out)
  folder.mkdir(parents=True, exist_ok=True)
  failures = []
  for row in SWEEP:
    done = (folder / f"{row.name}.json").is_file()
    if done or not re.search(values.only, row.name):
      continue
    print(row.name, flush=True)
    try:
      compile_row(row, folder)
    except ValueError as error:
      failures.append(str(error))
      print(f"error: {error}", flush=True)
  results = read(folder)
  if results:
    (folder / "table.md").write_text(peak_table(results), "utf-8")
    peak_figure(results).savefig(folder / "memory.png", dpi=150)
    print(peak_table(results))
  if failures:
    raise _cli.UserError("\n".join(failures))


if __name__ == "__main__":
  flags.DEFINE_string("out", None, "Folder to write the files to.")
  flags.DEFINE_string(
      "only", "", "Regular expression that selects rows by name."
  )
  flags.mark_flags_as_required(["out"])
  _cli.run(main)
