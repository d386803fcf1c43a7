"""Measures and draws; see `experiments/studies/learning_curves/__init__.py`."""

from experiments.studies import sweeps
from experiments.studies.learning_curves import analysis, sweep

if __name__ == "__main__":
  sweeps.main(sweep.FULL, sweep.SMALL, analysis.draw)
