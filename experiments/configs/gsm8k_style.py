"""RL-trains SmolLM2-135M on questions with an answer to be given in a form.

One-digit products of reasoning-gym, asked as GSM8K's questions are: the model
may reason, and the last thing it gives is to be the answer. The scorer gives
parts of a point to texts that hold the right number among others.

Command: python -m experiments.train \
    --config=experiments/configs/gsm8k_style.py --workdir=DIR
Cost: 14 minutes on two CPU cores that were shared with other jobs.
Expected: mean training reward from 0.06 to 0.37, held-out reward of samples
  from 0.05 to 0.26 (docs/results/gsm8k_style).
"""

import ml_collections

from experiments.configs import quickstart


def get_config() -> ml_collections.ConfigDict:
  """The quickstart's settings on another task, with longer responses."""
  c = quickstart.get_config().unlock()
  c.task.name = (
      "reasoning_gym:products?min_terms=2&max_terms=2&min_digits=1"
      "&max_digits=1&heldout_size=24"
  )
  c.task.reward = "correctness + 0.1*format"
  c.task.workers = 1
  c.updates = 40
  c.rollout.prompts = 8
  c.rollout.responses = 8
  c.rollout.temperature = 0.8
  c.rollout.max_prompt_tokens = 72
  c.rollout.max_new_tokens = 24
  c.loss.row_tokens = (192, 256, 320)  # Groups shrink from 180 to 90 tokens.
  c.loss.micro_rows = 1
  c.optimizer.learning_rate = 3e-5
  c.kl.budget = c.kl.final_budget = 4e-3
  c.evaluate.prompts = 24
  c.checkpoint.every = 10
  return c.lock()
