"""Rank, basis, momentum and preconditioner, all under the same KL budget."""

from typing import Any

import ml_collections

from experiments.configs import small
from experiments.studies import sweeps
from experiments.studies.kl_budget.sweep import smollm2_config
from experiments.studies.sweeps import Cell, Part

RANKS = (4, 16, 64, 256)
# Momentum needs a basis that stays, and so does Adam on sketches.
BASES = {
    "refreshed": {"optimizer.refresh": True, "optimizer.momentum": 0.0},
    "fixed": {"optimizer.refresh": False, "optimizer.momentum": 0.0},
    "fixed, momentum": {"optimizer.refresh": False, "optimizer.momentum": 0.9},
}
PRECONDITIONERS = ("row_adam", "norm_preserving", "none", "adam")
# Such that the budget, and not alpha_max, sets a step of the bare gradient.
_BARE = {"optimizer.learning_rate": 100.0}


def _cell(rank: int, basis: str, preconditioner: str) -> Cell:
  values: dict[str, Any] = {
      "optimizer.rank": rank,
      "optimizer.preconditioner": preconditioner,
      **BASES[basis],
  }
  if preconditioner in ("none", "norm_preserving"):
    values |= _BARE
  return Cell(f"rank {rank}, {basis}, {preconditioner}", values)


CONTROLS = (
    Cell("dense, adam", {"optimizer.name": "dense_adam"}),
    Cell(
        "dense, momentum",
        {"optimizer.name": "dense_sgd", **_BARE},
    ),
    Cell(
        "dense, no momentum",
        {"optimizer.name": "dense_sgd", "optimizer.momentum": 0.0, **_BARE},
    ),
)


def small_config() -> ml_collections.ConfigDict:
  """30 updates of the small model."""
  return sweeps.of_length(small.get_config(), 30, 10)


FACTORIAL = tuple(
    _cell(rank, basis, preconditioner)
    for preconditioner in PRECONDITIONERS
    for basis in BASES
    for rank in RANKS
    if (basis, preconditioner) != ("refreshed", "adam")
)
TELLING = (
    _cell(256, "refreshed", "row_adam"),
    _cell(16, "fixed, momentum", "row_adam"),
    _cell(4, "fixed, momentum", "row_adam"),
    CONTROLS[0],
)


def _at(cell: Cell, budget: float) -> Cell:
  values = {**cell.overrides, **sweeps.budget(budget)}
  return Cell(f"{cell.name}, budget {budget:g}", values)


# With momentum the steps of many updates point the same way: at one budget an
# update they lead further from the start. So is it only the larger budget?
BUDGETS = tuple(
    _at(cell, budget)
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
