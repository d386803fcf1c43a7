"""Measures and draws cosines of gradients and their reconstructions."""

from collections.abc import Callable, Sequence
import functools
from typing import Any

import numpy as np

from experiments.runs import progress
from experiments.studies import (
    gradient_sweeps,
    gradients,
    rank_reconstruction,
)
from experiments.studies.gradient_sweeps import GradientRow
from experiments.studies.rank_reconstruction import analysis, cosines, sweep
from experiments.studies.rank_reconstruction.cosines import Products
from experiments.studies.sweeps import rounded

# What --help prints.
__doc__ = f"{__doc__}\n\n{rank_reconstruction.__doc__}"

_SEED = 42


def measure_cosines(
    sizes: sweep.CosineSweep,
    source: gradients.GradientSource,
    rows: list[GradientRow],
    write: Callable[[GradientRow], None],
) -> None:
  """Measures each basis with the gradients of each module at each point.

  Args:
    sizes: What to measure.
    source: Where gradients come from.
    rows: Rows that exist and are not measured again.
    write: Called with each new row.
  """
  names = ("point", "module", "distribution", "rank")
  done = {tuple(row[name] for name in names) for row in rows}
  for point in sizes.points:
    params = source.params(point)
    for path, weights in gradients.targets_of(params).items():
      module = gradients.module_type(path)
      wanted = [x for x in sizes.cells() if (point, module, *x) not in done]
      if not wanted:
        continue
      window = source.gradients_of(params, point, sizes.batches, path)
      total = np.sum(window, axis=0)
      for distribution, rank in wanted:
        draw = functools.partial(
            gradients.draw_bases, {path: weights}, rank, distribution, _SEED
        )
        bases = [draw(i)[path] for i in range(sizes.n_bases(distribution))]
        for method in cosines.methods(distribution):
          values = (point, module, distribution, rank)
          products = compare(bases, window, total, sizes.singles, method)
          write(
              {
                  **dict(zip(names, values, strict=True)),
                  "d_in": total.shape[-2],
                  "method": method,
                  **numbers_of(products),
              }
          )
      progress.say(f"point {point}, {module}")


def compare(
    bases: Sequence[np.ndarray],
    window: Sequence[np.ndarray],
    total: np.ndarray,
    singles: int,
    method: str,
) -> dict[str, list[Products]]:
  """Compares the gradients of a kernel with their reconstructions.

  Args:
    bases: A basis for each batch of the window, or for the first batches only.
    window: Gradients of the batches.
    total: Sum of the gradients.
    singles: Number of batches whose gradients are compared one by one.
    method: One of `cosines.METHODS`.

  Returns:
    Products by name. `one`: of the first batches' gradients, each with its own
    basis. If there is a basis for each batch, also products of the sum: `fixed`
    with the first basis for all batches, `refreshed` with a basis for each.
  """
  of_sketch = functools.partial(cosines.of_sketch, method=method)
  pairs = list(zip(bases, window, strict=False))[:singles]
  products = {"one": [of_sketch(*pair) for pair in pairs]}
  if len(bases) == len(window):
    rebuilt = cosines.reconstruct(bases, window, method)
    products["fixed"] = [of_sketch(bases[0], total)]
    products["refreshed"] = [cosines.of_arrays(rebuilt, total)]
  return products


def numbers_of(products: dict[str, list[Products]]) -> dict[str, Any]:
  """Returns what a row keeps: cosines by layer, products summed over layers."""
  return {
      "cosine": {
          name: [[rounded(x, 3) for x in p.cosine()] for p in some]
          for name, some in products.items()
      },
      "products": {
          name: [[rounded(float(np.sum(x))) for x in p] for p in some]
          for name, some in products.items()
      },
  }


if __name__ == "__main__":
  gradient_sweeps.run_gradient_study(
      sweep.FULL, sweep.SMALL, measure_cosines, analysis.draw
  )
