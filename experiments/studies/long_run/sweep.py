"""The long runs: the quickstart's setting and the published one."""

import ml_collections

from experiments.configs import small, tiny
from experiments.studies import sweeps
from experiments.studies.sweeps import Cell, Part

CELLS = (
    Cell("rank 16, fixed, momentum", {}),
    Cell(
        "rank 256, refreshed (published)",
        {
            "optimizer.rank": 256,
            "optimizer.refresh": True,
            "optimizer.momentum": 0.0,
        },
    ),
)


def _long(
    config: ml_collections.ConfigDict, updates: int
) -> ml_collections.ConfigDict:
  """Sets the published budget: a cosine for a quarter of the run, then flat."""
  config.kl.budget, config.kl.final_budget = 1e-3, 1e-4
  config.kl.anneal_updates = updates // 4
  return sweeps.with_length(config, updates, updates // 12)


FULL = (Part("small", lambda: _long(small.get_config(), 1200), CELLS, (0,)),)
# A random model, which learns nothing in the seconds that this takes.
SMALL = (Part("tiny", lambda: _long(tiny.get_config(), 24), CELLS[:1], (0,)),)
