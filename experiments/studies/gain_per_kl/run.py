"""Measures and draws the gain of directions per unit of KL."""

from collections.abc import Callable
import dataclasses
import functools
import itertools
import math
import time

import chex

from experiments.runs import progress
from experiments.studies import gain_per_kl, gradient_sweeps, gradients
from experiments.studies.gain_per_kl import analysis, directions, sweep
from experiments.studies.gradient_sweeps import GradientRow
from experiments.studies.gradients import GradientSource, TargetArrays
from experiments.studies.sweeps import rounded

# What --help prints.
__doc__ = f"{__doc__}\n\n{gain_per_kl.__doc__}"

# The basis of batch i at point p is drawn with the seed `_SEEDS * p + i`.
_SEEDS = 1000


def measure_gains(
    sizes: sweep.GainSweep,
    source: GradientSource,
    rows: list[GradientRow],
    write: Callable[[GradientRow], None],
) -> None:
  """Measures each direction of each batch at each point.

  Args:
    sizes: What to measure.
    source: Where batches and gradients come from.
    rows: Rows that exist and are not measured again.
    write: Called with each new row.
  """
  kl = gradients.kl_fn(source.model, source.config)
  done = {(row["point"], row["batch"], row["direction"]) for row in rows}
  for group, point in itertools.product(sizes.groups, sizes.points):
    missing = {
        i: [d for d in group if (point, i, d.name) not in done]
        for i in range(sizes.batches)
    }
    if not any(missing.values()):
      continue
    params = source.params(point)
    total = total_gradient(source, params, point, sizes.batches)
    for i, wanted in missing.items():
      if not wanted:
        continue
      start = time.perf_counter()
      gradient = source.gradient(params, point, i)
      # The KL is that on responses of the next batch.
      k = sizes.probe_responses
      probe = gradients.first_responses(
          source.batch(params, point, (i + 1) % sizes.batches),
          source.config.rollout.responses,
          sizes.probe_prompts,
          k,
      )
      along = functools.partial(kl, params, probe, k)
      judge = Judge(gradient, total, sizes.batches, along)
      for direction in wanted:
        seed = _SEEDS * point + i
        step = directions.make(direction, gradient, source.config, seed)
        names = {"point": point, "batch": i, "direction": direction.name}
        write({**names, **judge(step)})
      seconds = time.perf_counter() - start
      progress.say(f"point {point}, batch {i}: {seconds:.0f} s")


def total_gradient(
    source: GradientSource, params: chex.ArrayTree, point: int, batches: int
) -> TargetArrays:
  """Returns the sum of the gradients of a point's first batches."""
  total = {k: x.copy() for k, x in source.gradient(params, point, 0).items()}
  for i in range(1, batches):
    for path, g in source.gradient(params, point, i).items():
      total[path] += g
  return total


@dataclasses.dataclass(frozen=True)
class Judge:
  """Measures directions that were made from the gradient of one batch.

  Attributes:
    gradient: Gradient of the batch.
    total: Sum of the gradients of all batches, including this one.
    batches: Number of batches in `total`.
    kl: Returns the KL of a direction on responses of another batch.
  """

  gradient: TargetArrays
  total: TargetArrays
  batches: int
  kl: Callable[[TargetArrays], chex.Scalar]

  def __call__(self, direction: TargetArrays) -> dict[str, float]:
    """Measures one direction.

    Returns:
      `held_out`, the gain per √(2 KL) by the mean gradient of the other
      batches; `own`, the same by the gradient of this batch; and `cosine`, that
      of direction and gradient.
    """
    length = math.sqrt(2 * float(self.kl(direction)))
    own = gradients.inner_product(self.gradient, direction)
    others = gradients.inner_product(self.total, direction) - own
    size = math.sqrt(
        gradients.inner_product(direction, direction)
        * gradients.inner_product(self.gradient, self.gradient)
    )
    return {
        "held_out": rounded(others / (self.batches - 1) / length),
        "own": rounded(own / length),
        "cosine": rounded(own / size),
    }


if __name__ == "__main__":
  gradient_sweeps.run_gradient_study(
      sweep.FULL, sweep.SMALL, measure_gains, analysis.draw
  )
