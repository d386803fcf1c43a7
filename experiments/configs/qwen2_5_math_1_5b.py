r"""RL-trains Qwen2.5-Math-1.5B on problems with answers, on four devices.

LoGRA is as published: rank 256 with a new basis for each update,
norm-preserving RowAdam, steps of 6e-5 of the weights' norm before a KL budget
that falls from 2e-4 to 2e-5 nats per token in 300 updates, and float32 weights
with bfloat16 products. Embeddings, norms, biases and head are frozen. The batch
is our choice: 64 prompts with 8 responses each, where a prompt and its response
have up to 4,096 tokens together, the model's context.

Command: python -m experiments.train \
    --config=experiments/configs/qwen2_5_math_1_5b.py --workdir=DIR
  with the model's Hugging Face directory at models/Qwen2.5-Math-1.5B (or
  wherever --config.model=DIR says), and problems in data/math.jsonl
  (docs/tasks.md).
Cost: not run yet.
Memory: GiB per device, from compilation and not measured; the columns are those
of docs/results/configs/README.md.
  devices      update  temporaries  sampling  cache  evaluation  device
  h100:4         3.24         1.78     12.08  10.50       10.50   79.10
  v5p:2x2x1      3.96         2.51     19.73  10.50       10.50   95.73
Expected: not run yet.
"""

import ml_collections

from experiments.configs import quickstart


def get_config() -> ml_collections.ConfigDict:
  """The published settings, with which the larger models' configs begin."""
  config = quickstart.get_config().unlock()
  config.model = "models/Qwen2.5-Math-1.5B"
  config.dtype = "bfloat16"
  config.param_dtype = "float32"
  config.remat = True
  config.attention_block = 256
  config.updates = 500
  config.mesh.fsdp = 4

  config.task.name = (
      "jsonl:data/math.jsonl?heldout_size=256"
      '&instruction="Put the final answer in \\\\boxed{}."'
  )
  config.task.workers = 8

  config.rollout.prompts = 64
  config.rollout.responses = 8
  config.rollout.temperature = 1.0
  config.rollout.max_prompt_tokens = 1024
  config.rollout.max_new_tokens = 3072
  config.rollout.slots = 256

  config.loss.name = "grpo"
  config.loss.row_tokens = (4096,)
  config.loss.micro_rows = 8  # Two per device.
  config.loss.chunk = 1024

  config.optimizer.rank = 256
  config.optimizer.refresh = True
  config.optimizer.momentum = 0.0
  config.optimizer.preconditioner = "norm_preserving"
  config.optimizer.learning_rate = 0.0
  config.optimizer.update_ratio = 6e-5

  config.kl.budget = 2e-4
  config.kl.final_budget = 2e-5
  config.kl.probe_responses = 8  # Two per data shard, as published.

  config.evaluate.every = 25
  config.evaluate.prompts = 256
  config.checkpoint.every = 50
  config.checkpoint.minutes = 30.0
  return config.lock()
