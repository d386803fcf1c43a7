"""Measures and draws; see the package."""

from collections.abc import Callable, Sequence
import functools

import numpy as np

from experiments.runs import progress
from experiments.studies import gradient_sweeps, gradients
from experiments.studies.rank_reconstruction import analysis, cosines
from experiments.studies.rank_reconstruction.cosines import Products
from experiments.studies.rank_reconstruction.sweep import FULL, SMALL, Sweep
from experiments.studies.sweeps import Row, short

_SEED = 42


def measure(
    sweep: Sweep,
    source: gradients.Source,
    rows: list[Row],
    write: Callable[[Row], None],
) -> None:
  """Writes a row for each point, module, basis and rank not among `rows`."""
  names = ("point", "module", "distribution", "rank")
  done = {tuple(row[name] for name in names) for row in rows}
  for point in sweep.points:
    params = source.params(point)
    for path, weights in gradients.split(params).items():
      module = gradients.module_type(path)
      wanted = [x for x in sweep.cells() if (point, module, *x) not in done]
      if not wanted:
        continue
      window = source.gradients_of(params, point, sweep.batches, path)
      total = np.sum(window, axis=0)
      for distribution, rank in wanted:
        bases = [
            gradients.bases({path: weights}, rank, distribution, _SEED, i)[path]
            for i in range(sweep.n_bases(distribution))
        ]
        for method in cosines.methods(distribution):
          what = (point, module, distribution, rank)
          found = compare(bases, window, total, sweep.singles, method)
          write(
              {
                  **dict(zip(names, what, strict=True)),
                  "d_in": total.shape[-2],
                  "method": method,
                  **numbers(found),
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
  """Gradients beside their reconstructions.

  Args:
    bases: one for each batch of the window, or for the first ones only.
    window: the batches' gradients.
    total: their sum.
    singles: how many of them are looked at by themselves.
    method: of `cosines.METHODS`.

  Returns:
    `one`: of the first batches' gradients, each with a basis of its own;
    with a basis for each, `fixed` and `refreshed`: of the sum, with the first
    basis for all batches, or each with its own.
  """
  of_sketch = functools.partial(cosines.of_sketch, method=method)
  pairs = list(zip(bases, window, strict=False))[:singles]
  found = {"one": [of_sketch(*pair) for pair in pairs]}
  if len(bases) == len(window):
    rebuilt = cosines.reconstruct(bases, window, method)
    found["fixed"] = [of_sketch(bases[0], total)]
    found["refreshed"] = [cosines.of_arrays(rebuilt, total)]
  return found


def numbers(found: dict[str, list[Products]]) -> Row:
  """The numbers of a row: cosines by layer, products summed over layers."""
  return {
      "cosine": {
          name: [[short(x, 3) for x in p.cosine()] for p in products]
          for name, products in found.items()
      },
      "products": {
          name: [[short(float(np.sum(x))) for x in p] for p in products]
          for name, products in found.items()
      },
  }


if __name__ == "__main__":
  gradient_sweeps.main(FULL, SMALL, measure, analysis.draw)
