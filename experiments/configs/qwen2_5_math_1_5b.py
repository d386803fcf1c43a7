r"""RL-trains Qwen2.5-Math-1.5B on problems with answers, on four devices.

LoGRA as published: rank 256 of a basis drawn anew for each update, RowAdam that
keeps norms, steps of 6e-5 of the weights' norm before a KL budget that falls
from 2e-4 to 2e-5 nats per token in 300 updates, float32 weights with bfloat16
products. Embeddings, norms, biases and head are frozen. The batch is our
choice: 64 prompts with 8 responses each; prompt and response have up to 4,096
tokens together, the model's context.

Command: python -m experiments.train \
    --config=experiments/configs/qwen2_5_math_1_5b.py --workdir=DIR
  with the model's Hugging Face directory at models/Qwen2.5-Math-1.5B, or given
  as --config.model=DIR, and problems in data/math.jsonl (docs/tasks.md).
Cost: not run yet.
Memory: GiB per device, compiled and not measured; columns as in
docs/results/configs/README.md.
  devices      update  temporaries  sampling  cache  evaluation  device
  h100:4         3.24         1.78     12.08  10.50       10.50   79.10
  v5p:2x2x1      3.96         2.51     19.73  10.50       10.50   95.73
Expected: not run yet.
"""

import ml_collections

from experiments.configs import quickstart


def get_config() -> ml_collections.ConfigDict:
  """The published settings; the configs of larger models begin with them."""
  c = quickstart.get_config().unlock()
  c.model = "models/Qwen2.5-Math-1.5B"
  c.dtype = "bfloat16"
  c.param_dtype = "float32"
  c.remat = True
  c.attention_block = 256
  c.updates = 500
  c.mesh.fsdp = 4

  c.task.name = (
      "jsonl:data/math.jsonl?heldout_size=256"
      '&instruction="Put the final answer in \\\\boxed{}."'
  )
  c.task.workers = 8

  c.rollout.prompts = 64
  c.rollout.responses = 8
  c.rollout.temperature = 1.0
  c.rollout.max_prompt_tokens = 1024
  c.rollout.max_new_tokens = 3072
  c.rollout.slots = 256

  c.loss.name = "grpo"
  c.loss.row_tokens = (4096,)
  c.loss.micro_rows = 8  # Two to a device.
  c.loss.chunk = 1024

  c.optimizer.rank = 256
  c.optimizer.refresh = True
  c.optimizer.momentum = 0.0
  c.optimizer.preconditioner = "norm_preserving"
  c.optimizer.learning_rate = 0.0
  c.optimizer.update_ratio = 6e-5

  c.kl.budget = 2e-4
  c.kl.final_budget = 2e-5
  c.kl.probe_responses = 8  # Two to a data shard, as published.

  c.evaluate.every = 25
  c.evaluate.prompts = 256
  c.checkpoint.every = 50
  c.checkpoint.minutes = 30.0
  return c.lock()
