"""Trains with several KL budgets, and draws the results."""

from experiments.studies import kl_budget, sweeps
from experiments.studies.kl_budget import analysis, sweep

# What --help prints.
__doc__ = f"{__doc__}\n\n{kl_budget.__doc__}"

if __name__ == "__main__":
  sweeps.run_training_study(sweep.FULL, sweep.SMALL, analysis.draw)
