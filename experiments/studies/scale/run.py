"""Puts memory and time beside what was published; see the package."""

import json
import pathlib
import sys
from typing import Any

from absl import app, flags

from experiments.benchmarks import timed_update
from experiments.planning import update_plan
from experiments.planning.request import Request
from experiments.studies.scale import analysis, sweep


def read(
    memory: pathlib.Path, speed: pathlib.Path
) -> tuple[dict[str, int], list[dict[str, Any]]]:
  """Peak bytes by file name, and rows of times.

  Args:
    memory: folder that `experiments.planning.memory_table` wrote.
    speed: file that `experiments.benchmarks.update_time` wrote.

  Raises:
    FileNotFoundError: there is no such folder or file.
  """
  files = sorted(memory.glob("qwen*.json"))
  if not files:
    raise FileNotFoundError(
        f"--memory={memory} holds no rows; run"
        " experiments.planning.memory_table"
    )
  peaks = {}
  for file in files:
    peaks[file.stem] = json.loads(file.read_text("utf-8"))["peak_bytes"]
  return peaks, json.loads(speed.read_text("utf-8"))["rows"]


def measure_small() -> tuple[dict[str, int], list[dict[str, Any]]]:
  """The same of a small model, compiled and timed on this machine."""
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
  rows = timed_update.time_updates(
      timed_update.parse_settings(["logra"], [sweep.SMALL_RANK]),
      timed_update.UpdateSize(),
      timed_update.SMALL,
      repeats=3,
      seed=0,
  )
  return peaks, rows


def main(argv: list[str]) -> None:
  del argv
  values = flags.FLAGS
  try:
    if values.small:
      peaks, rows = measure_small()
      comparisons = sweep.SMALL_MEMORY, sweep.SMALL_TIME
    else:
      peaks, rows = read(
          pathlib.Path(values.memory), pathlib.Path(values.speed)
      )
      comparisons = sweep.MEMORY, sweep.TIME
  except (ValueError, FileNotFoundError, ImportError) as error:
    sys.exit(f"error: {error}")
  text = analysis.memory_table(comparisons[0], peaks)
  text += "\n" + analysis.time_table(comparisons[1], rows)
  print(text)
  out = pathlib.Path(values.out)
  out.mkdir(parents=True, exist_ok=True)
  (out / "table.md").write_text(text, "utf-8")


if __name__ == "__main__":
  flags.DEFINE_string("out", None, "Folder for the tables.")
  flags.DEFINE_string("memory", "docs/results/memory", "Folder of memory rows.")
  flags.DEFINE_string(
      "speed", "docs/results/speed/speed-16x64.json", "File of times."
  )
  flags.DEFINE_bool("small", False, "Measure a small model here instead.")
  flags.mark_flag_as_required("out")
  app.run(main)
