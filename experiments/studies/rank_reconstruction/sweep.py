"""The bases that are measured, and the gradients they are applied to."""

import dataclasses
import itertools

from experiments.studies.gradient_sweeps import GradientSweep

DISTRIBUTIONS = ("rademacher", "gaussian", "orthonormal")


@dataclasses.dataclass(frozen=True)
class CosineSweep(GradientSweep):
  """The bases that are measured; the batches of a point are a window.

  Attributes:
    singles: Number of batches of each point whose gradients are also measured
      one by one.
    ranks: Ranks of the bases.
    windows: Distributions that are also measured over a window.
  """

  singles: int
  ranks: tuple[int, ...]
  windows: tuple[str, ...]

  def n_bases(self, distribution: str) -> int:
    """Returns the number of bases of a distribution that are needed."""
    return self.batches if distribution in self.windows else self.singles

  def cells(self) -> list[tuple[str, int]]:
    """Returns pairs of distribution and rank of the bases."""
    return list(itertools.product(DISTRIBUTIONS, self.ranks))


FULL = CosineSweep(
    "quickstart", (0, 6, 12), 8, 6, 2, (4, 16, 64, 256), ("rademacher",)
)
SMALL = CosineSweep(
    "small", (0, 4), 4, 16, 2, (4, 16, 64, 256), ("rademacher",)
)
