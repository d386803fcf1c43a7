"""The KL budgets that are compared: none, constant and annealed."""

import ml_collections

from experiments.configs import quickstart, small
from experiments.studies import sweeps
from experiments.studies.sweeps import Cell, Part


def _constant(budget: float) -> Cell:
  return Cell(f"constant {budget:g}", sweeps.budget_overrides(budget))


def _annealed(first: float, last: float, updates: int) -> Cell:
  values = sweeps.budget_overrides(first, last) | {"kl.anneal_updates": updates}
  return Cell(f"annealed {first:g} to {last:g}", values)


def _none(learning_rate: float) -> Cell:
  values = {"kl.enabled": False, "optimizer.learning_rate": learning_rate}
  return Cell(f"none, learning rate {learning_rate:g}", values)


def small_config() -> ml_collections.ConfigDict:
  """Makes a config of 60 updates of the small model."""
  return sweeps.with_length(small.get_config(), 60, 10)


def smollm2_config() -> ml_collections.ConfigDict:
  """Makes a config of 10 updates of the quickstart with half the responses."""
  config = quickstart.get_config()
  config.rollout.prompts = 6
  # Large enough that the budget, and not alpha_max, sets the step.
  config.optimizer.learning_rate = 1e-4
  config.kl.probe_responses = 8
  config.log.tensorboard = False
  return sweeps.with_length(config, 10, 5)


SMALL_CELLS = (
    _none(3e-5),
    _none(1e-4),
    _none(3e-4),
    _constant(3e-4),
    _constant(1e-3),
    _constant(3e-3),
    _annealed(3e-3, 3e-4, 60),
)
SMOLLM2_CELLS = (
    _none(1e-5),
    _constant(5e-4),
    _constant(2e-3),
    _constant(8e-3),
    _annealed(8e-3, 5e-4, 10),
)

FULL = (
    Part("small", small_config, SMALL_CELLS, (0, 1, 2, 3, 4)),
    Part("smollm2", smollm2_config, SMOLLM2_CELLS, (0, 1)),
)


SMALL = (Part("small", small.few_updates, SMALL_CELLS[2:5:2], (0, 1)),)
