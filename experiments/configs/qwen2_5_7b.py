r"""RL-trains Qwen2.5-7B on problems with answers, on four devices.

LoGRA as published; see qwen2_5_math_1_5b.py, which has the same batch. All
devices share responses and split heads and features among them, so that
decoding gathers no weights.

Command: python -m experiments.train \
    --config=experiments/configs/qwen2_5_7b.py --workdir=DIR
  with the model's Hugging Face directory at models/Qwen2.5-7B, or given as
  --config.model=DIR, and problems in data/math.jsonl (docs/tasks.md).
Cost: not run yet.
Memory: GiB per device, compiled and not measured; columns as in
docs/results/configs/README.md.
  devices      update  temporaries  sampling  cache  evaluation  device
  h100:4         9.64         2.47     28.62  20.99       20.99   79.10
  v5p:2x2x1     12.67         5.50     38.56  20.99       20.99   95.73
Expected: not run yet.
"""

import ml_collections

from experiments.configs import qwen2_5_math_1_5b


def get_config() -> ml_collections.ConfigDict:
  """The settings of 1.5B on another mesh."""
  c = qwen2_5_math_1_5b.get_config().unlock()
  c.model = "models/Qwen2.5-7B"
  c.mesh.fsdp, c.mesh.tensor = 1, 4
  c.token_block = 1024
  c.loss.micro_rows = 4
  return c.lock()
