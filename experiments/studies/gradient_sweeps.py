"""The command of studies that look at gradients at points of a run."""

from collections.abc import Callable
import dataclasses
import importlib
import pathlib
from typing import Any, TypeVar

from absl import flags

from experiments.runs import record
from experiments.studies import gradients, sweeps

# A line of the rows file: what was measured at one point, as numbers by name.
GradientRow = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class GradientSweep:
  """The batches whose gradients are measured.

  Attributes:
    config: Name of the config in `experiments.configs` that is run.
    points: Numbers of updates of the run after which batches are sampled,
      ascending.
    batches: Number of batches, and so of gradients, at each point.
    prompts: Number of prompts of a batch; each has as many responses as the
      config says.
  """

  config: str
  points: tuple[int, ...]
  batches: int
  prompts: int


SweepT = TypeVar("SweepT", bound=GradientSweep)


def make_source(
    sweep: GradientSweep, cache: pathlib.Path
) -> gradients.GradientSource:
  """Returns the source of the sweep's gradients, which are kept in `cache`."""
  module = importlib.import_module(f"experiments.configs.{sweep.config}")
  config = module.get_config()
  sweeps.ensure_model(config.model)
  folder = cache / f"{sweep.config}-{sweep.prompts}"
  return gradients.GradientSource(config, folder, sweep.points, sweep.prompts)


def run_gradient_study(
    full: SweepT,
    small: SweepT,
    measure: Callable[
        [
            SweepT,
            gradients.GradientSource,
            list[GradientRow],
            Callable[[GradientRow], None],
        ],
        None,
    ],
    draw: Callable[[list[GradientRow], pathlib.Path], None],
) -> None:
  """Runs the command of a study of gradients.

  It has the flags of `sweeps.run_study`, and `--cache=DIR` for the gradients.

  Args:
    full: The sweep whose rows are committed.
    small: A sweep of the same shape that takes a minute.
    measure: Function of `(sweep, source, rows, write)`, which calls `write`
      with each row that is not in `rows` as soon as it has measured it.
    draw: Writes table and figure of rows into a directory.
  """
  cache = flags.DEFINE_string(
      "cache", ".cache/gradients", "Directory that keeps weights and gradients."
  )

  def measure_missing(is_small: bool, out: pathlib.Path) -> None:
    sweep = small if is_small else full
    measure(
        sweep,
        make_source(sweep, pathlib.Path(cache.value)),
        record.read_rows(out / sweeps.ROWS),
        lambda row: sweeps.append_row(out, row),
    )

  sweeps.run_study(measure_missing, draw, [cache])
