"""Trains the small model for 1,200 short updates, to be killed and resumed.

Command: python -m experiments.benchmarks.soak --workdir=DIR
Cost: two runs of five minutes each on two CPU cores.
Expected: the run that is killed ends with the parameters and the record of the
  run that is not.
"""

import ml_collections

from experiments.configs import small


def get_config() -> ml_collections.ConfigDict:
  """The small model's settings with 32 responses per update."""
  config = small.get_config().unlock()
  config.updates = 1200
  config.rollout.prompts = 4
  config.loss.micro_rows = 4
  config.kl.probe_responses = 8
  config.evaluate.every = 200
  config.evaluate.prompts = 64
  config.checkpoint.every = 10
  return config.lock()
