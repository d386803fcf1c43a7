"""Sweeps: many runs of the training program, one JSON line per run.

A sweep is data: parts, each of which is a config with cells (overrides of the
config) and seeds. `run_training_study` is the command of a study that is a
sweep. Rows that exist are not measured again, so the same command continues an
interrupted sweep.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import sys
import tempfile
import time
from typing import Any

from absl import flags
import ml_collections

from experiments import _cli
from experiments.configs import small as small_config
from experiments.models import download
from experiments.reporting import provenance
from experiments.runs import check_config, loop, progress, record
from experiments.studies import small_model

# What `measure_run` returns, and a line of the rows file.
RunRow = dict[str, Any]
ROWS = "rows.jsonl"
# The metrics of each update that a row keeps.
CURVES = (
    "train/reward",
    "train/entropy",
    "train/clip_fraction",
    "kl/budget",
    "kl/predicted",
    "kl/realised",
    "kl/step_scale",
    "kl/skipped",
    "time/rollout",
    "time/update",
)
_MACHINE = "machine.json"


@dataclasses.dataclass(frozen=True)
class Cell:
  """One setting of a sweep.

  Attributes:
    name: Name that is unique within the part.
    overrides: Values by dotted path of the config, `{'optimizer.rank': 4}`.
  """

  name: str
  overrides: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Part:
  """Cells that override the same config.

  Attributes:
    name: Name that is unique within the sweep.
    config: Makes the config that the cells override.
    cells: The settings that are compared.
    seeds: Seeds of the runs of every cell. A seed decides the prompts, the
      responses and the bases of a run.
  """

  name: str
  config: Callable[[], ml_collections.ConfigDict]
  cells: tuple[Cell, ...]
  seeds: tuple[int, ...]


def with_length(
    config: ml_collections.ConfigDict, updates: int, evaluate_every: int
) -> ml_collections.ConfigDict:
  """Sets the number of updates, with one checkpoint after the last of them.

  Args:
    config: The config, which is changed in place.
    updates: Number of updates of a run.
    evaluate_every: Number of updates between evaluations.

  Returns:
    The config.
  """
  config.updates = config.checkpoint.every = updates
  config.evaluate.every = evaluate_every
  return config


def budget_overrides(
    first: float, last: float | None = None
) -> dict[str, float]:
  """Returns overrides for a KL budget that is constant or falls to `last`."""
  last = first if last is None else last
  return {"kl.budget": first, "kl.final_budget": last}


def run_config(part: Part, cell: Cell, seed: int) -> ml_collections.ConfigDict:
  """Makes the config of one run.

  Args:
    part: The part that the cell belongs to.
    cell: The setting.
    seed: Seed of the run.

  Returns:
    A new config.

  Raises:
    ValueError: If the config does not have a path that the cell overrides, or
      has a value of another type there.
  """
  config = part.config()
  try:
    config.update_from_flattened_dict(dict(cell.overrides))
  except (KeyError, TypeError) as error:
    raise ValueError(
        f"cell {cell.name!r} of part {part.name!r}: {error}"
    ) from error
  config.seed = config.task.seed = seed
  config.optimizer.seed += seed
  return config


def measure_run(part: Part, cell: Cell, seed: int) -> RunRow:
  """Trains one run in a temporary directory.

  Args:
    part: The part that the cell belongs to.
    cell: The setting.
    seed: Seed of the run.

  Returns:
    A dict of `part`, `cell`, `seed`, `overrides`; `curves`, a list with one
    value per update for each metric of `CURVES` (`kl/` only with a budget);
    `evals`, the same per evaluation, including `update`; and `seconds` of the
    whole run, including compilation if the program was not compiled before.
    Numbers have four significant digits.
  """
  start = time.perf_counter()
  with tempfile.TemporaryDirectory() as folder:
    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
      result = loop.train(run_config(part, cell, seed), folder)
    if result.stopped_by is not None:
      sys.exit(128 + result.stopped_by)
    lines = record.read_rows(pathlib.Path(folder) / record.FILENAME)
  updates = [line for line in lines if "train/reward" in line]
  evals = [line for line in lines if "eval/accuracy" in line]
  return {
      "part": part.name,
      "cell": cell.name,
      "seed": seed,
      "overrides": dict(cell.overrides),
      "curves": _columns(updates, [x for x in CURVES if x in updates[0]]),
      "evals": _columns(evals, list(evals[0])),
      "seconds": rounded(time.perf_counter() - start),
  }


def _columns(
    lines: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> dict[str, list[float | None]]:
  """Lists the rounded values of each metric; None stays None."""
  values = lambda name: (line[name] for line in lines)
  return {
      name: [None if x is None else rounded(x) for x in values(name)]
      for name in names
  }


def rounded(value: float, digits: int = 4) -> float:
  """Rounds a number of a row to a few significant digits."""
  return float(f"{value:.{digits}g}")


def measure_runs(
    parts: Iterable[Part], out: pathlib.Path, only: str = ""
) -> None:
  """Measures the runs that `out/rows.jsonl` does not have.

  All cells of a part are measured with one seed before the next seed begins.

  Args:
    parts: The sweep.
    out: Directory of the results, which is made if it does not exist.
    only: Regular expression; only cells whose `part/cell` it matches are
      measured.
  """
  done = {_key(row) for row in record.read_rows(out / ROWS)}
  wanted = [
      (part, cell, seed)
      for part in parts
      for seed in part.seeds
      for cell in part.cells
      if re.search(only, f"{part.name}/{cell.name}")
  ]
  missing = [x for x in wanted if (x[0].name, x[1].name, x[2]) not in done]
  configs = [run_config(*run) for run in missing]
  for config in configs:  # Refuses a bad cell before anything is trained.
    check_config.check_config(config)
  for model in {config.model for config in configs}:
    ensure_model(model)
  for number, (part, cell, seed) in enumerate(missing, 1):
    row = measure_run(part, cell, seed)
    append_row(out, row)
    progress.say(
        f"{number}/{len(missing)} {part.name}/{cell.name} seed {seed}: accuracy"
        f" {row['evals']['eval/accuracy'][-1]:.3f}, {row['seconds']:.0f} s"
    )


def append_row(out: pathlib.Path, row: Mapping[str, Any]) -> None:
  """Adds a row to the rows file, and records command and machine."""
  out.mkdir(parents=True, exist_ok=True)
  with (out / ROWS).open("a") as file:
    file.write(json.dumps(row) + "\n")
  machine = provenance.machine() | {"command": provenance.command()}
  (out / _MACHINE).write_text(json.dumps(machine, indent=2) + "\n")


def _key(row: RunRow) -> tuple[str, str, int]:
  return row["part"], row["cell"], row["seed"]


def ensure_model(path: str) -> None:
  """Makes or downloads the model at a path if it is one of the project's."""
  if path == small_config.PATH:
    small_model.ensure_small_model(path)
  elif path.endswith(download.MEMBER.rpartition("/")[2]):
    download.ensure_model(path)


def run_training_study(
    full: Sequence[Part],
    small: Sequence[Part],
    draw: Callable[[list[RunRow], pathlib.Path], None],
) -> None:
  """Runs the command of a study that is a sweep of training runs.

  It has the flags of `run_study`, and `--only=REGEX`, which selects cells.

  Args:
    full: The sweep whose rows are committed.
    small: A sweep of the same shape that takes minutes.
    draw: Writes table and figure of rows into a directory.
  """
  only = flags.DEFINE_string(
      "only", "", "Regular expression; selects cells by part/cell."
  )
  run_study(
      lambda is_small, out: measure_runs(
          small if is_small else full, out, only.value
      ),
      draw,
      [only],
  )


def run_study(
    measure: Callable[[bool, pathlib.Path], None],
    draw: Callable[[list[dict[str, Any]], pathlib.Path], None],
    more_flags: Sequence[flags.FlagHolder],
) -> None:
  """Runs the command of a study.

  `--out=DIR` measures what is missing and draws, `--small` measures a small
  version, `--redraw` only draws.

  Args:
    measure: Function of `--small` and the directory, which appends the rows
      that are missing.
    draw: Writes table and figure of rows into a directory.
    more_flags: Flags that the caller has defined, to be shown by `--help`.
  """
  folder = flags.DEFINE_string(
      "out", None, "Directory of the results.", required=True
  )
  is_small = flags.DEFINE_bool("small", False, "Measure the small version.")
  redraw = flags.DEFINE_bool(
      "redraw", False, "Measure nothing; draw the rows that exist."
  )

  def main(values: flags.FlagValues) -> None:
    del values
    out = pathlib.Path(folder.value)
    if not redraw.value:
      measure(is_small.value, out)
    rows = record.read_rows(out / ROWS)
    if not rows:
      raise ValueError(
          f"{out / ROWS} holds no rows; run without --redraw first"
      )
    draw(rows, out)
    progress.say(f"rows, table and figure are in {out}")

  for flag in (folder, is_small, redraw, *more_flags):
    # Otherwise --help would list only flags that run.py itself defines.
    flags.FLAGS.register_key_flag_for_module(
        sys.argv[0], flags.FLAGS[flag.name]
    )
  _cli.run(main)
