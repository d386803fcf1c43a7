"""Compares memory and time of an update with published figures."""

import json
import pathlib
from typing import Any

from absl import flags

from experiments import _cli
from experiments.benchmarks import timed_update
from experiments.planning import update_plan
from experiments.planning.request import Request
from experiments.studies import scale
from experiments.studies.scale import analysis, sweep

# What --help prints.
__doc__ = f"{__doc__}\n\n{scale.__doc__}"


def read(
    memory: pathlib.Path, speed: pathlib.Path
) -> tuple[dict[str, int], list[dict[str, Any]]]:
  """Reads measurements of memory and of time.

  Args:
    memory: Folder that `experiments.planning.memory_table` wrote.
    speed: File that `experiments.benchmarks.update_time` wrote.

  Returns:
    Peak bytes by stem of the file, and results of `timed_update.time_updates`.

  Raises:
    FileNotFoundError: If the folder has no measurements, or there is no file.
  """
  files = sorted(memory.glob("qwen*.json"))
  if not files:
    raise FileNotFoundError(
        f"--memory={memory} holds no rows; run"
        " python -m experiments.planning.memory_table first"
    )
  peaks = {}
  for file in files:
    peaks[file.stem] = json.loads(file.read_text("utf-8"))["peak_bytes"]
  return peaks, json.loads(speed.read_text("utf-8"))["rows"]


def measure_small() -> tuple[dict[str, int], list[dict[str, Any]]]:
  """Compiles and times a small model; returns what `read` returns."""
  peaks = {}
  for name in ("dense_adam", "logra"):
    request = Request(
        sweep.SMALL_MODEL,
        sweep.SMALL_TARGET,
        optimizer=name,
        rank=sweep.SMALL_RANK,
        tokens=64,
    )
    peaks[name] = update_plan.plan(request).peak_bytes or 0
  times = timed_update.time_updates(
      timed_update.parse_settings(["logra"], [sweep.SMALL_RANK]),
      timed_update.UpdateSize(),
      timed_update.SMALL,
      repeats=3,
      seed=0,
  )
  return peaks, times


def main(values: flags.FlagValues) -> None:
  if values.small:
    comparisons = sweep.SMALL
    peaks, times = measure_small()
  else:
    comparisons = sweep.FULL
    peaks, times = read(pathlib.Path(values.memory), pathlib.Path(values.speed))
  text = analysis.table(comparisons, peaks, times)
  print(text)
  out = pathlib.Path(values.out)
  out.mkdir(parents=True, exist_ok=True)
  (out / "table.md").write_text(text, "utf-8")


if __name__ == "__main__":
  flags.DEFINE_string("out", None, "Folder for the tables.")
  flags.DEFINE_string(
      "memory",
      "docs/results/memory",
      "Folder that experiments.planning.memory_table wrote.",
  )
  flags.DEFINE_string(
      "speed",
      "docs/results/speed/speed-16x64.json",
      "File that experiments.benchmarks.update_time wrote.",
  )
  flags.DEFINE_bool("small", False, "Measure a small model instead.")
  flags.mark_flag_as_required("out")
  _cli.run(main)
