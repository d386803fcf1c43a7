"""RL-trains SmolLM2-135M to multiply and to find common divisors.

Two data sets of reasoning-gym, half of the prompts each. The model answers in
its own words, and the last number that it gives counts, as in GSM8K.

Command: python -m experiments.train \
    --config=experiments/configs/gsm8k_style.py --workdir=DIR
Cost: 17 minutes of training on two CPU cores, 4 GB of memory.
Expected: mean training reward from 0.25 to 0.75; pass@1 on held-out questions
  from 0.23 to 0.62 or 0.75, by seed (docs/results/gsm8k_style).
"""

import ml_collections

from experiments.configs import quickstart

# The question as it is, without a request for <answer> tags.
_ASKED = 'instruction=""&verifier="number"'
PRODUCTS = (
    "reasoning_gym:products?min_terms=2&max_terms=2&min_digits=1&max_digits=1"
    f"&heldout_size=32&{_ASKED}"
)
DIVISORS = (
    "reasoning_gym:gcd?min_numbers=2&max_numbers=2&min_value=2&max_value=20"
    f"&heldout_size=64&{_ASKED}"
)


def get_config() -> ml_collections.ConfigDict:
  """The quickstart's settings on other tasks, with longer responses."""
  c = quickstart.get_config().unlock()
  c.task.name = f"0.5*{PRODUCTS} + 0.5*{DIVISORS}"
  c.task.workers = 1
  c.updates = 60
  c.rollout.prompts = 12
  c.rollout.responses = 8
  c.rollout.temperature = 0.8
  c.rollout.max_prompt_tokens = 72
  c.rollout.max_new_tokens = 24
  c.loss.row_tokens = (192, 256, 320)  # Groups shrink from 230 to 110 tokens.
  c.loss.micro_rows = 1
  c.optimizer.learning_rate = 3e-5
  c.kl.budget = 4e-3
  c.kl.final_budget = 1e-3
  c.kl.anneal_updates = c.updates
  c.checkpoint.every = 10
  return c.lock()
