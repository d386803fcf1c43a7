"""RL-trains the small model, for studies of many runs.

Command: python -m experiments.studies.small_model
  python -m experiments.train --config=experiments/configs/small.py \
    --workdir=DIR
Cost: 20 seconds on two CPU cores, half of it compilation.
Expected: the mean training reward rises from 0.5 to 0.8 in 40 updates.
"""

import ml_collections

from experiments.configs import quickstart

# The model that `studies.small_model` teaches, and its task.
TASK = "addition:2"
PATH = ".cache/small-adder"
MAX_PROMPT_TOKENS = 6  # "1 2 + 3 4 ="
MAX_NEW_TOKENS = 4  # Three digits and the end.


def get_config() -> ml_collections.ConfigDict:
  """The quickstart's settings with the small model and two-digit sums."""
  c = quickstart.get_config().unlock()
  c.model = PATH
  c.task.name = TASK
  c.updates = 40
  c.rollout.prompts = 16
  c.rollout.responses = 8
  c.rollout.temperature = 1.0
  c.rollout.max_prompt_tokens = MAX_PROMPT_TOKENS
  c.rollout.max_new_tokens = MAX_NEW_TOKENS
  c.loss.row_tokens = (MAX_PROMPT_TOKENS + 8 * MAX_NEW_TOKENS,)
  c.loss.micro_rows = 16
  # Large enough that the budget, and not alpha_max, sets the step.
  c.optimizer.learning_rate = 1e-2
  c.kl.budget = c.kl.final_budget = 1e-3
  c.kl.probe_responses = 32
  c.evaluate.every = 10
  c.evaluate.prompts = 512
  c.checkpoint.every = c.updates
  c.log.tensorboard = False
  return c.lock()


def few_updates() -> ml_collections.ConfigDict:
  """The same settings for six updates, for the small versions of sweeps."""
  c = get_config()
  c.updates = c.checkpoint.every = 6
  c.evaluate.every = 3
  return c
