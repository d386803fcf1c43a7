"""Trains with several optimizers, and draws the results."""

from experiments.studies import learning_curves, sweeps
from experiments.studies.learning_curves import analysis, sweep

# What --help prints.
__doc__ = f"{__doc__}\n\n{learning_curves.__doc__}"

if __name__ == "__main__":
  sweeps.run_training_study(sweep.FULL, sweep.SMALL, analysis.draw)
