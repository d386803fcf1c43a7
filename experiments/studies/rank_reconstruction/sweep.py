"""What is measured: points of a run, batches, bases."""

import dataclasses
import itertools

from experiments.studies import gradient_sweeps

DISTRIBUTIONS = ("rademacher", "gaussian", "orthonormal")


@dataclasses.dataclass(frozen=True)
class Sweep(gradient_sweeps.Sweep):
  """Sizes of the measurement; `batches` are those of a window.

  Attributes:
    singles: batches of each point whose gradient is also looked at by itself.
    ranks: of the bases.
    windows: distributions that are also looked at over a window.
  """

  singles: int
  ranks: tuple[int, ...]
  windows: tuple[str, ...]

  def n_bases(self, distribution: str) -> int:
    """How many bases of a distribution are needed."""
    return self.batches if distribution in self.windows else self.singles

  def cells(self) -> list[tuple[str, int]]:
    """Distributions and ranks of the bases."""
    return list(itertools.product(DISTRIBUTIONS, self.ranks))


FULL = Sweep(
    "quickstart", (0, 6, 12), 8, 6, 2, (4, 16, 64, 256), ("rademacher",)
)
SMALL = Sweep("small", (0, 4), 4, 16, 2, (4, 16, 64, 256), ("rademacher",))
