r"""RL-trains Qwen2.5-32B on problems with answers, on eight devices.

In place of the paper's 27B. LoGRA as published but for storage: bfloat16
weights that are merged by stochastic rounding, and a KV cache in int8, so that
eight devices of 31 GiB are enough. The batch is that of qwen2_5_math_1_5b.py.

Command: python -m experiments.train \
    --config=experiments/configs/qwen2_5_32b.py --workdir=DIR
  with the model's Hugging Face directory at models/Qwen2.5-32B, or given as
  --config.model=DIR, and problems in data/math.jsonl (docs/tasks.md).
Cost: not run yet.
Memory: GiB per device, compiled and not measured; columns as in
docs/results/configs/README.md.
  devices      update  temporaries  sampling  cache  evaluation  device
  h100:8        11.91         4.20     20.13  12.37        6.19   79.10
  v6e:2x4       13.01         5.31     28.26  12.37        6.19   31.24
Expected: not run yet.
"""

import ml_collections

from experiments.configs import qwen2_5_7b


def get_config() -> ml_collections.ConfigDict:
  """The settings of 7B on eight devices, with thinner storage."""
  c = qwen2_5_7b.get_config().unlock()
  c.model = "models/Qwen2.5-32B"
  c.param_dtype = "bfloat16"
  c.updates = 1100  # As many as the paper shows to be stable.
  c.mesh.tensor = 8
  c.rollout.slots = 128
  c.rollout.cache_dtype = "int8"
  c.kl.probe_responses = 16  # What the paper's eight data shards would have.
  c.evaluate.prompts = 64
  return c.lock()
