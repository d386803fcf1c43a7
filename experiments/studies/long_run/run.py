"""Measures and draws; see `experiments/studies/long_run/__init__.py`."""

from experiments.studies import sweeps
from experiments.studies.long_run import analysis, sweep

if __name__ == "__main__":
  sweeps.main(sweep.FULL, sweep.SMALL, analysis.draw)
