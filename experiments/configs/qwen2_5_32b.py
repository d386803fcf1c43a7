r"""RL-trains Qwen2.5-32B on problems with answers, on eight devices.

It stands for the paper's model of 27B. LoGRA is as published except for
storage: bfloat16 weights, merged with stochastic rounding, and an int8 KV cache
make eight devices of 31 GiB enough. The batch is that of qwen2_5_math_1_5b.py.

Command: python -m experiments.train \
    --config=experiments/configs/qwen2_5_32b.py --workdir=DIR
  with the model's Hugging Face directory at models/Qwen2.5-32B (or wherever
  --config.model=DIR says), and problems in data/math.jsonl (docs/tasks.md).
Cost: not run yet.
Memory: GiB per device, from compilation and not measured; the columns are those
of docs/results/configs/README.md.
  devices      update  temporaries  sampling  cache  evaluation  device
  h100:8        11.91         4.20     20.13  12.37        6.19   79.10
  v6e:2x4       13.01         5.31     28.26  12.37        6.19   31.24
Expected: not run yet.
"""

import ml_collections

from experiments.configs import qwen2_5_7b


def get_config() -> ml_collections.ConfigDict:
  """The settings of the 7B model on eight devices, with smaller storage."""
  config = qwen2_5_7b.get_config().unlock()
  config.model = "models/Qwen2.5-32B"
  config.param_dtype = "bfloat16"
  config.updates = 1100  # The paper shows this many to be stable.
  config.mesh.tensor = 8
  config.rollout.slots = 128
  config.rollout.cache_dtype = "int8"
  config.kl.probe_responses = (
      16  # Two for each of eight data shards, as published.
  )
  config.evaluate.prompts = 64
  return config.lock()
