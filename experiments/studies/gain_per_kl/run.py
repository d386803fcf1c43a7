"""Measures and draws; see `experiments/studies/gain_per_kl/__init__.py`."""

from collections.abc import Callable
import dataclasses
import functools
import itertools
import math
import time
from typing import Any

from experiments.runs import progress
from experiments.studies import gradient_sweeps, gradients
from experiments.studies.gain_per_kl import analysis, directions
from experiments.studies.gain_per_kl.sweep import FULL, SMALL, Sweep
from experiments.studies.sweeps import Row, short

# Seeds of bases: one for every point and batch.
_SEEDS = 1000


def measure(
    sweep: Sweep,
    source: gradients.Source,
    rows: list[Row],
    write: Callable[[Row], None],
) -> None:
  """Writes a row for each point, batch and direction not among `rows`."""
  kl = gradients.kl_fn(source.model, source.config)
  done = {(row["point"], row["batch"], row["direction"]) for row in rows}
  for group, point in itertools.product(sweep.groups, sweep.points):
    missing = {
        i: [d for d in group if (point, i, d.name) not in done]
        for i in range(sweep.batches)
    }
    if not any(missing.values()):
      continue
    params = source.params(point)
    total = total_gradient(source, params, point, sweep.batches)
    for i, wanted in missing.items():
      if not wanted:
        continue
      start = time.perf_counter()
      gradient = source.gradient(params, point, i)
      # The KL is that on responses of the next batch.
      k = sweep.probe_responses
      probe = gradients.some_responses(
          source.batch(params, point, (i + 1) % sweep.batches),
          source.config.rollout.responses,
          sweep.probe_prompts,
          k,
      )
      along = functools.partial(kl, params, probe, k)
      judge = Judge(gradient, total, sweep.batches, along)
      for direction in wanted:
        seed = _SEEDS * point + i
        made = directions.make(direction, gradient, source.config, seed)
        what = {"point": point, "batch": i, "direction": direction.name}
        write({**what, **judge(made)})
      seconds = time.perf_counter() - start
      progress.say(f"point {point}, batch {i}: {seconds:.0f} s")


def total_gradient(
    source: gradients.Source, params: Any, point: int, batches: int
) -> gradients.Arrays:
  """The sum of a point's gradients."""
  total = {k: x.copy() for k, x in source.gradient(params, point, 0).items()}
  for i in range(1, batches):
    for path, g in source.gradient(params, point, i).items():
      total[path] += g
  return total


@dataclasses.dataclass(frozen=True)
class Judge:
  """Judges directions that one batch's gradient was made into.

  Attributes:
    gradient: the batch's.
    total: the sum of all batches' gradients, this one's among them.
    batches: how many these are.
    kl: of a direction, on responses of another batch.
  """

  gradient: gradients.Arrays
  total: gradients.Arrays
  batches: int
  kl: Callable[[gradients.Arrays], Any]

  def __call__(self, direction: gradients.Arrays) -> dict[str, float]:
    """The numbers of a row.

    Returns:
      `held_out`: gain per √(2 KL) with the mean gradient of the other batches;
      `own`: the same with the batch's gradient; `cosine` of direction and
      gradient.
    """
    length = math.sqrt(2 * float(self.kl(direction)))
    own = gradients.inner(self.gradient, direction)
    others = gradients.inner(self.total, direction) - own
    size = math.sqrt(
        gradients.inner(direction, direction)
        * gradients.inner(self.gradient, self.gradient)
    )
    return {
        "held_out": short(others / (self.batches - 1) / length),
        "own": short(own / length),
        "cosine": short(own / size),
    }


if __name__ == "__main__":
  gradient_sweeps.main(FULL, SMALL, measure, analysis.draw)
