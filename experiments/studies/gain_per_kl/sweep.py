"""The directions that are measured, and the batches they are made from."""

import dataclasses

from experiments.studies.gradient_sweeps import GradientSweep


@dataclasses.dataclass(frozen=True)
class Direction:
  """One way to make a step from a gradient.

  Attributes:
    kind: A name in `directions.KINDS`.
    rank: Rank of the sketch or of the approximation; 0 for other kinds.
    distribution: Distribution of the basis; "" for kinds without a basis.
  """

  kind: str
  rank: int = 0
  distribution: str = ""

  @property
  def name(self) -> str:
    """The name in rows and tables, such as `sketch-rademacher-16`."""
    parts = (self.kind, self.distribution, str(self.rank or ""))
    return "-".join(part for part in parts if part)


# One group is measured after the other, so that an interrupted study has whole
# groups.
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
class GainSweep(GradientSweep):
  """The directions that are measured, and on how many responses.

  Attributes:
    probe_prompts: Number of prompts whose responses the KL is measured on.
    probe_responses: Number of responses to each of these prompts.
    groups: The directions that are compared.
  """

  probe_prompts: int
  probe_responses: int
  groups: tuple[tuple[Direction, ...], ...]


FULL = GainSweep("quickstart", (0, 6, 12), 16, 6, 2, 8, GROUPS)
SMALL = GainSweep("small", (0, 4), 4, 16, 8, 8, GROUPS)
