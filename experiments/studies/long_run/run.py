"""Trains the long runs, and draws the results."""

from experiments.studies import long_run, sweeps
from experiments.studies.long_run import analysis, sweep

# What --help prints.
__doc__ = f"{__doc__}\n\n{long_run.__doc__}"

if __name__ == "__main__":
  sweeps.run_training_study(sweep.FULL, sweep.SMALL, analysis.draw)
