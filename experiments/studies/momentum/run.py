"""Trains with several settings of LoGRA, and draws the results."""

from experiments.studies import momentum, sweeps
from experiments.studies.momentum import analysis, sweep

# What --help prints.
__doc__ = f"{__doc__}\n\n{momentum.__doc__}"

if __name__ == "__main__":
  sweeps.run_training_study(sweep.FULL, sweep.SMALL, analysis.draw)
