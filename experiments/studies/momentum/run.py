"""Measures and draws; see `experiments/studies/momentum/__init__.py`."""

from experiments.studies import sweeps
from experiments.studies.momentum import analysis, sweep

if __name__ == "__main__":
  sweeps.main(sweep.FULL, sweep.SMALL, analysis.draw)
