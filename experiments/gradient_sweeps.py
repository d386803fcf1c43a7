"""The command line of experiments on gradients at points of a run."""

from collections.abc import Callable
import dataclasses
import importlib
import pathlib
import sys
from typing import Any

from absl import app, flags, logging

from experiments import (
    gradients,
    metrics,
    progress,
    setup_model,
    small_model,
    sweeps,
)

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sweep:
  """Where gradients are looked at.

  Attributes:
    config: name of the config in `experiments.configs` that is run.
    points: updates of the run after which there are batches, ascending.
    batches: gradients at each point.
    prompts: of a batch; each has the config's number of responses.
  """

  config: str
  points: tuple[int, ...]
  batches: int
  prompts: int


def source(sweep: Sweep, cache: pathlib.Path) -> gradients.Source:
  """The sweep's batches and gradients, kept under `cache`."""
  module = importlib.import_module(f"experiments.configs.{sweep.config}")
  config = module.get_config()
  if sweep.config == "small":
    small_model.ensure_small_model(config.model)
  elif sweep.config == "quickstart":
    setup_model.ensure_model(config.model)
  folder = cache / f"{sweep.config}-{sweep.prompts}"
  return gradients.Source(config, folder, sweep.points, sweep.prompts)


def main(
    full: Sweep,
    small: Sweep,
    measure: Callable[[Any, gradients.Source, list[Row], Any], None],
    draw: Callable[[list[Row], pathlib.Path], None],
) -> None:
  """`--out=DIR` measures and draws, `--small` less, `--redraw` only draws.

  Args:
    full: the sweep whose rows are committed.
    small: one of the same shape that takes a minute.
    measure: `(sweep, source, rows, write)`; gives each row that is not among
      `rows` to `write` as soon as it has it.
    draw: writes tables and pictures from rows into a directory.
  """

  def start(argv: list[str]) -> None:
    values = flags.FLAGS
    if len(argv) > 1:
      sys.exit(f"unexpected arguments {argv[1:]}")
    logging.set_verbosity(logging.WARNING)
    out = pathlib.Path(values.out)
    sweep = small if values.small else full
    try:
      if not values.redraw:
        out.mkdir(parents=True, exist_ok=True)
        measure(
            sweep,
            source(sweep, pathlib.Path(values.cache)),
            metrics.read_rows(out / sweeps.ROWS),
            lambda row: sweeps.append(out, [row]),
        )
      rows = metrics.read_rows(out / sweeps.ROWS)
      if not rows:
        sys.exit(f"{out / sweeps.ROWS} holds no rows; run without --redraw")
      draw(rows, out)
    except (ValueError, FileNotFoundError) as error:
      sys.exit(f"error: {error}")
    progress.say(f"rows, tables and pictures: {out}")

  flags.DEFINE_string("out", None, "Directory of the results.")
  flags.DEFINE_bool("small", False, "The small sweep.")
  flags.DEFINE_bool("redraw", False, "Draw from the rows that are there.")
  flags.DEFINE_string(
      "cache", ".cache/gradients", "Where weights and gradients are kept."
  )
  flags.mark_flag_as_required("out")
  app.run(start)


def short(value: float, digits: int = 4) -> float:
  """A number for a row, with few significant digits."""
  return float(f"{value:.{digits}g}")
