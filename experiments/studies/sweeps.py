"""Sweeps: many runs of the training program, one JSON line each.

A sweep is data: parts, each a config with cells (what differs from it) and
seeds. `main` is the command line of an experiment's `run.py`. Rows that are
there are not measured again, so that a sweep that was cut short goes on.
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

from absl import app, flags, logging
import ml_collections

from experiments.configs import small
from experiments.models import download
from experiments.reporting import provenance
from experiments.runs import check_config, loop, progress, record
from experiments.studies import small_model

Row = dict[str, Any]
ROWS = "rows.jsonl"
# What a row keeps of each update.
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
  """One setting.

  Attributes:
    name: unique within its part.
    overrides: values by dotted path of the config, `{'optimizer.rank': 4}`.
  """

  name: str
  overrides: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Part:
  """Cells that share a config.

  Attributes:
    name: unique within the sweep.
    config: makes the config that cells override.
    cells: what is compared.
    seeds: each run draws its prompts, responses and bases from one.
  """

  name: str
  config: Callable[[], ml_collections.ConfigDict]
  cells: tuple[Cell, ...]
  seeds: tuple[int, ...]


def of_length(
    config: ml_collections.ConfigDict, updates: int, evaluate_every: int
) -> ml_collections.ConfigDict:
  """The config with so many updates, and no checkpoint before the last."""
  config.updates = config.checkpoint.every = updates
  config.evaluate.every = evaluate_every
  return config


def budget(first: float, last: float | None = None) -> dict[str, Any]:
  """Overrides of a KL budget, constant or falling from `first` to `last`."""
  last = first if last is None else last
  return {"kl.budget": first, "kl.final_budget": last}


def config_of(part: Part, cell: Cell, seed: int) -> ml_collections.ConfigDict:
  """The config of one run.

  Raises:
    ValueError: a path that the config does not have, or a value of another
      type than its.
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


def run_one(part: Part, cell: Cell, seed: int) -> Row:
  """Trains one run in a directory of its own, which is then removed.

  Returns:
    `part`, `cell`, `seed`, `overrides`; `curves`, a list by metric of `CURVES`
    (KL only with a budget) with a value an update; `evals`, the same by
    evaluation, `update` included; `seconds` of the whole run, compilation
    included if it came first. Numbers have four significant digits.
  """
  start = time.perf_counter()
  with tempfile.TemporaryDirectory() as folder:
    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
      result = loop.train(config_of(part, cell, seed), folder)
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
      "seconds": short(time.perf_counter() - start),
  }


def _columns(lines: list[Row], names: list[str]) -> dict[str, list[Any]]:
  return {name: [_or_none(line[name]) for line in lines] for name in names}


def _or_none(value: float | None) -> float | None:
  return None if value is None else short(value)


def short(value: float, digits: int = 4) -> float:
  """A number for a row, with few significant digits."""
  return float(f"{value:.{digits}g}")


def run(parts: Iterable[Part], out: pathlib.Path, only: str = "") -> None:
  """Measures what is not in `out/rows.jsonl` yet, a seed of all cells at once.

  Args:
    parts: of the sweep.
    out: directory of the results; made if it is not there.
    only: a regular expression; only the cells `part/cell` that it finds.
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
  for part, cell, seed in missing:  # Bad cells show before anything runs.
    check_config.check_config(config_of(part, cell, seed))
  for model in {config_of(*one).model for one in missing}:
    ensure_model(model)
  for number, (part, cell, seed) in enumerate(missing, 1):
    row = run_one(part, cell, seed)
    append(out, [row])
    progress.say(
        f"{number}/{len(missing)} {part.name}/{cell.name} seed {seed}: accuracy"
        f" {row['evals']['eval/accuracy'][-1]:.3f}, {row['seconds']:.0f} s"
    )


def append(out: pathlib.Path, rows: Sequence[Row]) -> None:
  """Adds lines to `out/rows.jsonl`, and says in `machine.json` what ran."""
  out.mkdir(parents=True, exist_ok=True)
  with (out / ROWS).open("a") as file:
    for row in rows:
      file.write(json.dumps(row) + "\n")
  command = " ".join(["python", *sys.orig_argv[1:]])
  machine = provenance.machine() | {"command": command}
  (out / _MACHINE).write_text(json.dumps(machine, indent=2) + "\n")


def _key(row: Row) -> tuple[str, str, int]:
  return row["part"], row["cell"], row["seed"]


def ensure_model(path: str) -> None:
  """Makes the models that a sweep may name, if they are not there."""
  if path == small.PATH:
    small_model.ensure_small_model(path)
  elif path.endswith(download.MEMBER.rpartition("/")[2]):
    download.ensure_model(path)


def main(
    full: Sequence[Part],
    small: Sequence[Part],
    draw: Callable[[list[Row], pathlib.Path], None],
) -> None:
  """The command line of an experiment that is a sweep of training runs.

  `--out=DIR` measures and draws, `--small` measures the small sweep,
  `--redraw` only draws, `--only=REGEX` selects cells.

  Args:
    full: the sweep whose rows are committed.
    small: one of the same shape that takes minutes.
    draw: writes tables and pictures from rows into a directory.
  """

  def measure(values, out):
    run(small if values.small else full, out, values.only)

  flags.DEFINE_string("only", "", "Regular expression of part/cell.")
  command_line(measure, draw)


def command_line(
    measure: Callable[[Any, pathlib.Path], None],
    draw: Callable[[list[Row], pathlib.Path], None],
) -> None:
  """`--out=DIR` measures and draws, `--small` less, `--redraw` only draws.

  Args:
    measure: `(flag values, directory)`; appends the rows that are missing.
    draw: writes tables and pictures from rows into a directory.
  """

  def start(argv):
    values = flags.FLAGS
    if len(argv) > 1:
      sys.exit(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    out = pathlib.Path(values.out)
    try:
      if not values.redraw:
        measure(values, out)
      rows = record.read_rows(out / ROWS)
      if not rows:
        sys.exit(f"{out / ROWS} holds no rows; run without --redraw first")
      draw(rows, out)
    except (ValueError, FileNotFoundError) as error:
      sys.exit(f"error: {error}")
    progress.say(f"rows, tables and pictures: {out}")

  flags.DEFINE_string("out", None, "Directory of the results.")
  flags.DEFINE_bool("small", False, "The small sweep.")
  flags.DEFINE_bool("redraw", False, "Draw from the rows that are there.")
  flags.mark_flag_as_required("out")
  app.run(start)
