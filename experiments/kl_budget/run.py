"""Measures and draws; see `experiments/kl_budget/__init__.py`."""

from experiments import sweeps
from experiments.kl_budget import analysis, sweep

if __name__ == "__main__":
  sweeps.main(sweep.FULL, sweep.SMALL, analysis.draw)
