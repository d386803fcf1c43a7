"""The record of a run: one JSON object a line, and TensorBoard beside it.

Every line of `metrics.jsonl` has `update`, the number of updates done when its
numbers were true, and names in groups: `train/`, `kl/` (nats per token),
`rollout/` (tokens), `time/` (seconds), `eval/`. A number that is not finite is
written as `null`, so that every line is valid JSON.
"""

from collections.abc import Mapping
import json
import math
import os
import pathlib
from typing import IO, Any

import jax

from experiments import extras

FILENAME = "metrics.jsonl"


class MetricsWriter:
  """Appends to `metrics.jsonl` and, optionally, to TensorBoard event files."""

  def __init__(
      self,
      workdir: str | os.PathLike[str],
      *,
      resume_at: int,
      tensorboard: bool = True,
  ):
    """Opens the record, forgetting what came after update `resume_at`.

    A run that was killed has lines after its last checkpoint; the resumed run
    repeats those updates, and no line may be there twice.

    Args:
      workdir: directory of the run; must exist.
      resume_at: number of updates already done; 0 starts the record anew.
      tensorboard: also write TensorBoard events to `workdir/tensorboard`.
    """
    self._file: IO[str] | None = None
    self._events: Any = None
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
    if tensorboard:
      module = extras.require("tensorboardX", "train")
      # Events after the step are hidden by TensorBoard itself.
      self._events = module.SummaryWriter(
          str(workdir / "tensorboard"), purge_step=resume_at + 1
      )

  def write(self, update: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Writes one line at once (flushed); returns it as a dict of floats."""
    row: dict[str, Any] = {"update": int(update)}
    for name, value in values.items():
      value = float(value)
      row[name] = value if math.isfinite(value) else None
      if self._events is not None and row[name] is not None:
        self._events.add_scalar(name, value, update)
    if self._file is not None:
      self._file.write(json.dumps(row, allow_nan=False) + "\n")
      self._file.flush()
    return row

  def __enter__(self) -> "MetricsWriter":
    return self

  def __exit__(self, *unused: Any) -> None:
    self.close()

  def close(self) -> None:
    """Closes the files; further writes are an error."""
    if self._file is not None:
      self._file.close()
    if self._events is not None:
      self._events.close()


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
