"""A random model of a few thousand parameters, for tests: seconds.

Command: python -m experiments.train --config=experiments/configs/tiny.py
  --workdir=/tmp/tiny
Cost: ten seconds on one CPU core, nearly all of it compilation.
Expected: it runs; it runs, and moves; six updates teach nothing yet.
"""

import ml_collections

from experiments.configs import quickstart


def get_config() -> ml_collections.ConfigDict:
  """The quickstart with everything made small."""
  c = quickstart.get_config().unlock()
  c.model = "tiny"
  c.updates = 6
  c.rollout.prompts = 8
  c.rollout.responses = 16
  c.rollout.temperature = 1.0
  c.rollout.max_prompt_tokens = 16
  c.rollout.max_new_tokens = 2
  c.loss.row_tokens = (24,)
  c.loss.micro_rows = 8
  c.optimizer.rank = 4
  c.optimizer.learning_rate = 1e-3
  c.kl.budget = c.kl.final_budget = 1e-4
  c.evaluate.every = 3
  c.checkpoint.every = 2
  c.log.tensorboard = False
  return c.lock()
