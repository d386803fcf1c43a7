"""The record of a run: one JSON object a line, and trackers beside it.

Every line of `metrics.jsonl` has `update`, the number of updates done when its
numbers were true, and names in groups, which `docs/metrics.md` explains. A
number that is not finite is written as `null`, so that every line is valid
JSON.
"""

from collections.abc import Mapping
import json
import math
import os
import pathlib
import resource
import sys
from typing import IO, Any

import jax

from experiments.runs import trackers

FILENAME = "metrics.jsonl"


class MetricsWriter:
  """Appends to `metrics.jsonl`, and tells the trackers the same."""

  def __init__(
      self,
      workdir: str | os.PathLike[str],
      *,
      resume_at: int,
      tensorboard: bool = True,
      wandb: str = "",
      trackio: str = "",
      config: Mapping[str, Any] | None = None,
  ):
    """Opens the record, forgetting what came after update `resume_at`.

    A run that was killed has lines after its last checkpoint; the resumed run
    repeats those updates, and no line may be there twice.

    Args:
      workdir: directory of the run; must exist.
      resume_at: number of updates already done; 0 starts the record anew.
      tensorboard: also write TensorBoard events to `workdir/tensorboard`.
      wandb: also log to this project at Weights & Biases; '' for none.
      trackio: also log to this project at Trackio; '' for none.
      config: nested dict of the run's settings, for those two.

    Raises:
      ImportError, ValueError: see `trackers.open_trackers`.
    """
    self._file: IO[str] | None = None
    self._trackers: list[trackers.Tracker] = []
    # Of many processes the first keeps the record.
    if jax.process_index():
      return
    workdir = pathlib.Path(workdir)
    path = workdir / FILENAME
    rows = [row for row in read_rows(path) if row["update"] <= resume_at]
    if resume_at == 0:
      rows = []
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.replace(temporary, path)
    self._file = path.open("a")
    self._trackers = trackers.open_trackers(
        workdir,
        resume_at=resume_at,
        tensorboard=tensorboard,
        wandb=wandb,
        trackio=trackio,
        config=config,
    )

  def write(self, update: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Writes one line at once (flushed); returns it as a dict of floats."""
    row: dict[str, Any] = {"update": int(update)}
    for name, value in values.items():
      value = float(value)
      row[name] = value if math.isfinite(value) else None
    if self._file is not None:
      self._file.write(json.dumps(row, allow_nan=False) + "\n")
      self._file.flush()
    finite = {k: v for k, v in row.items() if v is not None and k != "update"}
    for tracker in self._trackers:
      tracker.log(row["update"], finite)
    return row

  def __enter__(self) -> "MetricsWriter":
    return self

  def __exit__(self, *unused: Any) -> None:
    self.close()

  def close(self) -> None:
    """Closes all; further writes are an error."""
    if self._file is not None:
      self._file.close()
    for tracker in self._trackers:
      tracker.close()


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """The lines of a metrics file, in order; `[]` where there is no file.

  A last line that a kill cut short is left out; any other line that is not
  JSON raises `ValueError` with its number.
  """
  path = pathlib.Path(path)
  if not path.exists():
    return []
  rows = []
  lines = path.read_text().split("\n")
  for number, line in enumerate(lines, start=1):
    if not line:
      continue
    try:
      rows.append(json.loads(line))
    except json.JSONDecodeError as error:
      if number == len(lines):  # No newline after it: torn by a kill.
        break
      raise ValueError(
          f"{path}, line {number} is not JSON ({error}); remove that line"
      ) from error
  return rows


def column(rows: list[dict[str, Any]], name: str) -> tuple[list, list]:
  """The updates and the values of one metric, where it was written."""
  found = [(row["update"], row[name]) for row in rows if name in row]
  return [update for update, _ in found], [
      math.nan if value is None else value for _, value in found
  ]


def memory_peaks() -> dict[str, float]:
  """The most memory held so far, in GiB: by the process, by its first device.

  Not every device tells: a CPU does not.
  """
  # Linux counts KiB, macOS bytes.
  unit = 1 if sys.platform == "darwin" else 1024
  held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
  found = {"memory/host_peak": held / 2**30}
  device = jax.local_devices()[0].memory_stats() or {}
  if "peak_bytes_in_use" in device:
    found["memory/device_peak"] = device["peak_bytes_in_use"] / 2**30
  return found
