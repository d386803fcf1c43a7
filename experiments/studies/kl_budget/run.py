"""Measures and draws; see `experiments/studies/kl_budget/__init__.py`."""

from experiments.studies import sweeps
from experiments.studies.kl_budget import analysis, sweep

if __name__ == "__main__":
  sweeps.main(sweep.FULL, sweep.SMALL, analysis.draw)
