"""Measures and draws; see `experiments/learning_curves/__init__.py`."""

from experiments import sweeps
from experiments.learning_curves import analysis, sweep

if __name__ == "__main__":
  sweeps.main(sweep.FULL, sweep.SMALL, analysis.draw)
