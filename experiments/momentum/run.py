"""Measures and draws; see `experiments/momentum/__init__.py`."""

from experiments import sweeps
from experiments.momentum import analysis, sweep

if __name__ == "__main__":
  sweeps.main(sweep.FULL, sweep.SMALL, analysis.draw)
