"""Optimizers with a KL budget, and without it at several learning rates."""

from collections.abc import Mapping
from typing import Any

from experiments.configs import small
from experiments.studies.momentum.sweep import small_config
from experiments.studies.sweeps import Cell, Part

RANKS = (4, 16, 64, 256)
# Learning rates without a budget, by optimizer.
GRIDS: dict[str, tuple[float, ...]] = {
    "logra": (3e-5, 1e-4, 3e-4),
    "dense_adam": (3e-5, 1e-4, 3e-4),
    "lora": (3e-4, 1e-3, 3e-3),
    "galore": (1e-4, 3e-4, 1e-3),
}

# More learning rates, for methods whose best one was at the edge of the grid.
FURTHER: dict[str, tuple[float, ...]] = {
    "logra rank 4": (1e-3,),
    "logra rank 16": (1e-3,),
    "logra rank 256": (1e-5,),
    "lora rank 4": (1e-2,),
    "lora rank 256": (1e-4,),
    "galore rank 16": (3e-3,),
    "galore rank 64": (3e-3,),
}


def _method(name: str, rank: int | None) -> tuple[str, dict[str, Any]]:
  """Returns the label and the overrides of an optimizer at a rank."""
  values: dict[str, Any] = {"optimizer.name": name}
  if rank is None:
    return name, values
  values["optimizer.rank"] = rank
  if name == "lora":
    # Scales the adapters by 2, as is usual.
    values["optimizer.lora_alpha"] = 2.0 * rank
  return f"{name} rank {rank}", values


# Overrides by label of a method: an optimizer at a rank.
METHODS: Mapping[str, dict[str, Any]] = dict(
    [_method("dense_adam", None)]
    + [_method("logra", rank) for rank in RANKS]
    + [_method("lora", rank) for rank in RANKS]
    + [_method("galore", rank) for rank in (16, 64)]
)


def _cells(labels: list[str], rates: int | None = None) -> tuple[Cell, ...]:
  """Makes cells with a budget, and without it at the first `rates` rates."""
  cells = []
  for label in labels:
    values = METHODS[label]
    cells.append(Cell(f"{label}, budget", values))
    grid = GRIDS[values["optimizer.name"]]
    if label in FURTHER:
      grid += FURTHER[label]
    for rate in grid[:rates]:
      free = {"kl.enabled": False, "optimizer.learning_rate": rate}
      cells.append(Cell(f"{label}, learning rate {rate:g}", values | free))
  return tuple(cells)


FULL = (Part("small", small_config, _cells(list(METHODS)), (0, 1, 2)),)


SMALL = (
    Part(
        "small",
        small.few_updates,
        _cells(["dense_adam", "logra rank 16"], 1),
        (0,),
    ),
)
