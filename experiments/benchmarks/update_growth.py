"""How the time and memory of an update grow with each of its sizes."""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

from experiments.benchmarks import timed_update
from experiments.benchmarks.timed_update import OptimizerSetting, UpdateSize
from experiments.models.config import DecoderConfig


@dataclasses.dataclass(frozen=True)
class Grid:
  """The sizes that `measure_growth` varies, one at a time, around a base.

  Attributes:
    architecture: Shapes of the base's model.
    size: Sizes of the base's update.
    rank: LoGRA's rank at the base.
    ranks: Further values of the axis `rank`; can include the base's.
    layers: Numbers of layers on the axis `layers`.
    micro_batches: Numbers of micro-batches on the axis `micro-batches`, each
      as large as the base's.
    tokens: Lengths of a sequence on the axis `tokens`; a quarter of it is the
      prompt.
  """

  architecture: DecoderConfig
  size: UpdateSize
  rank: int
  ranks: tuple[int, ...]
  layers: tuple[int, ...]
  micro_batches: tuple[int, ...]
  tokens: tuple[int, ...]


def default_grid(architecture: DecoderConfig) -> Grid:
  """The grid of `--growth`: the model with fewer layers and tokens."""
  return Grid(
      dataclasses.replace(architecture, n_layers=4, vocab_size=8192),
      UpdateSize(sequences=8, micro_batch=4, tokens=64, prompt_tokens=16),
      rank=64,
      ranks=(16, 64, 128, 256),
      layers=(2, 4, 8),
      micro_batches=(1, 2, 4, 8),
      tokens=(64, 128, 256, 512),
  )


# For tests.
SMALL_GRID = Grid(
    timed_update.SMALL,
    UpdateSize(sequences=4, micro_batch=2, tokens=8, prompt_tokens=2),
    rank=4,
    ranks=(4,),
    layers=(2,),
    micro_batches=(2,),
    tokens=(8, 16),
)


@dataclasses.dataclass(frozen=True)
class _Point:
  """A point of a grid."""

  axis: str
  value: int
  size: UpdateSize
  architecture: DecoderConfig


def _points(grid: Grid) -> list[_Point]:
  """The points of all axes but `rank`."""
  base, size = grid.architecture, grid.size
  points = []
  for n in grid.layers:
    architecture = dataclasses.replace(base, n_layers=n)
    points.append(_Point("layers", n, size, architecture))
  for n in grid.micro_batches:
    larger = dataclasses.replace(size, sequences=n * size.micro_batch)
    points.append(_Point("micro-batches", n, larger, base))
  for n in grid.tokens:
    longer = dataclasses.replace(size, tokens=n, prompt_tokens=n // 4)
    points.append(_Point("tokens", n, longer, base))
  return points


def measure_growth(
    grid: Grid, *, repeats: int, seed: int
) -> list[dict[str, Any]]:
  """Times LoGRA and the baseline over a grid.

  Args:
    grid: The sizes to vary.
    repeats: Timed updates at each point.
    seed: Random seed of weights and batch.

  Returns:
    Results like those of `timed_update.time_updates`, each with its `axis` and
    `value`.
  """
  measure = functools.partial(
      timed_update.time_updates, repeats=repeats, seed=seed
  )
  dense = OptimizerSetting(timed_update.BASELINE, None)
  pair = [dense, OptimizerSetting("logra", grid.rank)]
  at_base = measure(
      [*pair, *_other_ranks(grid.ranks, grid.rank)],
      grid.size,
      grid.architecture,
  )
  dense_result, *logra_results = at_base
  results = []
  for logra_result in sorted(logra_results, key=lambda result: result["rank"]):
    for result in (dense_result, logra_result):
      results.append({"axis": "rank", "value": logra_result["rank"], **result})
  for point in _points(grid):
    if (point.size, point.architecture) == (grid.size, grid.architecture):
      measured = at_base[:2]  # Every axis passes through the base.
    else:
      measured = measure(pair, point.size, point.architecture)
    results += [
        {"axis": point.axis, "value": point.value, **result}
        for result in measured
    ]
  return results


def _other_ranks(ranks: Sequence[int], base: int) -> list[OptimizerSetting]:
  return [OptimizerSetting("logra", rank) for rank in ranks if rank != base]
