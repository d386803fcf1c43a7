"""The settings of LoGRA that are compared, all under the same KL budget."""

from typing import Any

import ml_collections

from experiments.configs import small
from experiments.studies import sweeps
from experiments.studies.kl_budget.sweep import smollm2_config
from experiments.studies.sweeps import Cell, Part

RANKS = (4, 16, 64, 256)
# Momentum needs a fixed basis, and so does Adam on sketches.
BASES = {
    "refreshed": {"optimizer.refresh": True, "optimizer.momentum": 0.0},
    "fixed": {"optimizer.refresh": False, "optimizer.momentum": 0.0},
    "fixed, momentum": {"optimizer.refresh": False, "optimizer.momentum": 0.9},
}
PRECONDITIONERS = ("row_adam", "norm_preserving", "none", "adam")
# For directions of the gradient's own size: with this learning rate the budget,
# and not alpha_max, sets the step.
_UNSCALED = {"optimizer.learning_rate": 100.0}


def _cell(rank: int, basis: str, preconditioner: str) -> Cell:
  """Makes a cell of the factorial."""
  values: dict[str, Any] = {
      "optimizer.rank": rank,
      "optimizer.preconditioner": preconditioner,
      **BASES[basis],
  }
  if preconditioner in ("none", "norm_preserving"):
    values |= _UNSCALED
  return Cell(f"rank {rank}, {basis}, {preconditioner}", values)


# Dense optimizers to compare with.
CONTROLS = (
    Cell("dense, adam", {"optimizer.name": "dense_adam"}),
    Cell(
        "dense, momentum",
        {"optimizer.name": "dense_sgd", **_UNSCALED},
    ),
    Cell(
        "dense, no momentum",
        {"optimizer.name": "dense_sgd", "optimizer.momentum": 0.0, **_UNSCALED},
    ),
)


def small_config() -> ml_collections.ConfigDict:
  """Makes a config of 30 updates of the small model."""
  return sweeps.with_length(small.get_config(), 30, 10)


# Every combination of the four factors that works.
FACTORIAL = tuple(
    _cell(rank, basis, preconditioner)
    for preconditioner in PRECONDITIONERS
    for basis in BASES
    for rank in RANKS
    if (basis, preconditioner) != ("refreshed", "adam")
)
# The cells whose curves are drawn, and which the real model is trained with.
TELLING = (
    _cell(256, "refreshed", "row_adam"),
    _cell(16, "fixed, momentum", "row_adam"),
    _cell(4, "fixed, momentum", "row_adam"),
    CONTROLS[0],
)


def _at_budget(cell: Cell, budget: float) -> Cell:
  """Makes the cell of another KL budget."""
  values = {**cell.overrides, **sweeps.budget_overrides(budget)}
  return Cell(f"{cell.name}, budget {budget:g}", values)


# With momentum, the steps of adjacent updates point the same way, so that with
# the same budget per update they lead further from the start. These cells show
# whether momentum does no more than a larger budget would.
BUDGETS = tuple(
    _at_budget(cell, budget)
    for cell in (
        _cell(16, "refreshed", "row_adam"),
        _cell(16, "fixed, momentum", "row_adam"),
    )
    for budget in (3e-4, 3e-3, 1e-2, 3e-2)
)

FULL = (
    Part("small", small_config, CONTROLS + FACTORIAL, (0, 1, 2, 3, 4)),
    Part("budgets", small_config, BUDGETS, (0, 1, 2, 3, 4)),
    Part("smollm2", smollm2_config, TELLING, (0, 1)),
)


SMALL = (Part("small", small.few_updates, TELLING[1:], (0, 1)),)
