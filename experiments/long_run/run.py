"""Measures and draws; see `experiments/long_run/__init__.py`."""

from experiments import sweeps
from experiments.long_run import analysis, sweep

if __name__ == "__main__":
  sweeps.main(sweep.FULL, sweep.SMALL, analysis.draw)
