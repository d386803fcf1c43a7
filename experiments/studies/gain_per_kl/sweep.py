"""What is measured: points of a run, batches, directions."""

import dataclasses

from experiments.studies import gradient_sweeps


@dataclasses.dataclass(frozen=True)
class Direction:
  """One way to make a step of a gradient.

  Attributes:
    kind: a name in `directions.KINDS`.
    rank: of the sketch or of the approximation; 0 where there is none.
    distribution: of the basis; "" where there is none.
  """

  kind: str
  rank: int = 0
  distribution: str = ""

  @property
  def name(self) -> str:
    parts = (self.kind, self.distribution, str(self.rank or ""))
    return "-".join(part for part in parts if part)


# Measured one group after the other: a run cut short has whole groups.
GROUPS = (
    (
        Direction("dense"),
        Direction("sketch", 16, "rademacher"),
        Direction("sketch", 256, "rademacher"),
        Direction("sketch", 16, "orthonormal"),
        Direction("row_adam", 16, "rademacher"),
        Direction("row_adam_norm", 16, "rademacher"),
        Direction("sign"),
    ),
    (
        Direction("sketch", 4, "rademacher"),
        Direction("sketch", 64, "rademacher"),
        Direction("sketch", 256, "orthonormal"),
        Direction("low_rank", 4),
        Direction("row_adam_norm", 64, "rademacher"),
        Direction("orthogonal"),
    ),
)


@dataclasses.dataclass(frozen=True)
class Sweep(gradient_sweeps.Sweep):
  """Sizes of the measurement.

  Attributes:
    probe_prompts: of the responses that the KL is measured on.
    probe_responses: to each of these prompts.
    groups: the directions that are compared.
  """

  probe_prompts: int
  probe_responses: int
  groups: tuple[tuple[Direction, ...], ...]


FULL = Sweep("quickstart", (0, 6, 12), 16, 6, 2, 8, GROUPS)
SMALL = Sweep("small", (0, 4), 4, 16, 8, 8, GROUPS)
