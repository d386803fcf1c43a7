"""RL-trains SmolLM2-135M to multiply and to find common divisors.

Half of the prompts are from each of two data sets of reasoning-gym. The model
answers in its own words, and its last number counts, as in GSM8K.

Command: python -m experiments.train \
    --config=experiments/configs/gsm8k_style.py --workdir=DIR
Cost: 17 minutes of training on two CPU cores, 4 GB of memory.
Expected: the mean training reward rises from 0.25 to 0.75, and pass@1 on
  held-out questions from 0.23 to 0.62 or 0.75, depending on the seed
  (docs/results/gsm8k_style).
"""

import ml_collections

from experiments.configs import quickstart

# The question alone, without a request for <answer> tags.
_OPTIONS = 'instruction=""&verifier="number"'
PRODUCTS = (
    "reasoning_gym:products?min_terms=2&max_terms=2&min_digits=1&max_digits=1"
    f"&heldout_size=32&{_OPTIONS}"
)
DIVISORS = (
    "reasoning_gym:gcd?min_numbers=2&max_numbers=2&min_value=2&max_value=20"
    f"&heldout_size=64&{_OPTIONS}"
)


def get_config() -> ml_collections.ConfigDict:
  """The quickstart's settings with other tasks and longer responses."""
  config = quickstart.get_config().unlock()
  config.task.name = f"0.5*{PRODUCTS} + 0.5*{DIVISORS}"
  config.task.workers = 1
  config.updates = 60
  config.rollout.prompts = 12
  config.rollout.responses = 8
  config.rollout.temperature = 0.8
  config.rollout.max_prompt_tokens = 72
  config.rollout.max_new_tokens = 24
  config.loss.row_tokens = (192, 256, 320)  # Groups shrink from 230 to 110.
  config.loss.micro_rows = 1
  config.optimizer.learning_rate = 3e-5
  config.kl.budget = 4e-3
  config.kl.final_budget = 1e-3
  config.kl.anneal_updates = config.updates
  config.checkpoint.every = 10
  return config.lock()
