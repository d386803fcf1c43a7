r"""RL-trains Qwen2.5-7B on problems with answers, on four devices.

LoGRA is as published; see qwen2_5_math_1_5b.py, which has the same batch. All
devices share responses and split heads and features, so that decoding gathers
no weights.

Command: python -m experiments.train \
    --config=experiments/configs/qwen2_5_7b.py --workdir=DIR
  with the model's Hugging Face directory at models/Qwen2.5-7B (or wherever
  --config.model=DIR says), and problems in data/math.jsonl (docs/tasks.md).
Cost: not run yet.
Memory: GiB per device, from compilation and not measured; the columns are those
of docs/results/configs/README.md.
  devices      update  temporaries  sampling  cache  evaluation  device
  h100:4         9.64         2.47     28.62  20.99       20.99   79.10
  v5p:2x2x1     12.67         5.50     38.56  20.99       20.99   95.73
Expected: not run yet.
"""

import ml_collections

from experiments.configs import qwen2_5_math_1_5b


def get_config() -> ml_collections.ConfigDict:
  """The settings of the 1.5B model on another mesh."""
  config = qwen2_5_math_1_5b.get_config().unlock()
  config.model = "models/Qwen2.5-7B"
  config.mesh.fsdp, config.mesh.tensor = 1, 4
  config.token_block = 1024
  config.loss.micro_rows = 4
  return config.lock()
