"""The small model for 1,200 short updates, to be killed and resumed.

Command: python -m experiments.benchmarks.soak --workdir=DIR
Cost: five minutes on two CPU cores, twice.
Expected: parameters and record of the killed run are those of the other.
"""

import ml_collections

from experiments.configs import small


def get_config() -> ml_collections.ConfigDict:
  """The small model's settings, with 32 responses an update."""
  c = small.get_config().unlock()
  c.updates = 1200
  c.rollout.prompts = 4
  c.loss.micro_rows = 4
  c.kl.probe_responses = 8
  c.evaluate.every = 200
  c.evaluate.prompts = 64
  c.checkpoint.every = 10
  return c.lock()
