"""The record of a run: a file of JSON lines, and trackers that get the same.

Every line of `metrics.jsonl` has `update`, the number of updates done, and
metrics, which docs/metrics.md explains. A non-finite number is written as
`null`, so that every line is valid JSON.
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

from experiments.reporting.units import GIB
from experiments.runs import trackers

FILENAME = "metrics.jsonl"


class MetricsWriter:
  """Writes metrics to `metrics.jsonl` and to the trackers."""

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
    """Opens the record and drops the lines after update `resume_at`.

    A killed run has lines after its last checkpoint. The resumed run repeats
    those updates, and every line must be there once.

    Args:
      workdir: Directory of the run, which must exist.
      resume_at: Number of updates already done; 0 starts a new record.
      tensorboard: Whether to write TensorBoard events to `workdir/tensorboard`.
      wandb: Project at Weights & Biases to log to; `""` for none.
      trackio: Project at Trackio to log to; `""` for none.
      config: Nested dict of the run's config, for those two.

    Raises:
      ImportError, ValueError: See `trackers.open_trackers`.
    """
    self._file: IO[str] | None = None
    self._trackers: list[trackers.Tracker] = []
    # The first process alone keeps the record.
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
    """Writes and flushes one line; returns it as a dict of floats."""
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
    """Closes the file and the trackers; further writes are an error."""
    if self._file is not None:
      self._file.close()
    for tracker in self._trackers:
      tracker.close()


def read_rows(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Reads the lines of a metrics file.

  Args:
    path: The file; one that does not exist has no lines.

  Returns:
    The lines in order, without a last line that a kill cut short.

  Raises:
    ValueError: If any other line is not JSON; names it.
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
  """The updates that have a metric, and its values, NaN for non-finite ones."""
  pairs = [(row["update"], row[name]) for row in rows if name in row]
  return [update for update, _ in pairs], [
      math.nan if value is None else value for _, value in pairs
  ]


def memory_peaks() -> dict[str, float]:
  """Peak memory so far in GiB, of the process and of its first device.

  A device that does not report its peak, such as a CPU, is left out.
  """
  # Linux counts KiB, macOS bytes.
  unit = 1 if sys.platform == "darwin" else 1024
  held_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
  peaks = {"memory/host_peak": held_bytes / GIB}
  device = jax.local_devices()[0].memory_stats() or {}
  if "peak_bytes_in_use" in device:
    peaks["memory/device_peak"] = device["peak_bytes_in_use"] / GIB
  return peaks
