"""Trains a random model of a few thousand parameters, for quick tests.

Command: python -m experiments.train --config=experiments/configs/tiny.py
  --workdir=/tmp/tiny
Cost: ten seconds on one CPU core, nearly all of it compilation.
Expected: the weights change, but six updates teach nothing yet.
"""

import ml_collections

from experiments.configs import quickstart


def get_config() -> ml_collections.ConfigDict:
  """The quickstart's settings with small sizes."""
  config = quickstart.get_config().unlock()
  config.model = "tiny"
  config.updates = 6
  config.rollout.prompts = 8
  config.rollout.responses = 16
  config.rollout.temperature = 1.0
  config.rollout.max_prompt_tokens = 16
  config.rollout.max_new_tokens = 2
  config.loss.row_tokens = (24,)
  config.loss.micro_rows = 8
  config.optimizer.rank = 4
  config.optimizer.learning_rate = 1e-3
  config.kl.budget = config.kl.final_budget = 1e-4
  config.evaluate.every = 3
  config.checkpoint.every = 2
  config.log.tensorboard = False
  return config.lock()
