"""The command line of experiments on gradients at points of a run."""

from collections.abc import Callable
import dataclasses
import importlib
import pathlib
from typing import Any

from absl import flags

from experiments.runs import record
from experiments.studies import gradients, sweeps
from experiments.studies.sweeps import Row


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
  sweeps.ensure_model(config.model)
  folder = cache / f"{sweep.config}-{sweep.prompts}"
  return gradients.Source(config, folder, sweep.points, sweep.prompts)


def main(
    full: Sweep,
    small: Sweep,
    measure: Callable[[Any, gradients.Source, list[Row], Any], None],
    draw: Callable[[list[Row], pathlib.Path], None],
) -> None:
  """The command line of an experiment on gradients; `--cache` keeps them.

  Args:
    full: the sweep whose rows are committed.
    small: one of the same shape that takes a minute.
    measure: `(sweep, source, rows, write)`; gives each row that is not among
      `rows` to `write` as soon as it has it.
    draw: writes tables and pictures from rows into a directory.
  """

  def measure_missing(values, out):
    sweep = small if values.small else full
    measure(
        sweep,
        source(sweep, pathlib.Path(values.cache)),
        record.read_rows(out / sweeps.ROWS),
        lambda row: sweeps.append(out, [row]),
    )

  flags.DEFINE_string(
      "cache", ".cache/gradients", "Where weights and gradients are kept."
  )
  sweeps.command_line(measure_missing, draw)
