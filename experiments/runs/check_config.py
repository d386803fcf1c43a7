"""Refuses settings that no run could start with, before anything slow is done.

The owner of a setting checks it; this calls the owners.
"""

from jax.sharding import Mesh
import ml_collections

from experiments.learning.batches import BatchSettings
from experiments.learning.train_step import UpdateSettings
from experiments.parallel import sharding
from experiments.rollouts.engine import EngineSettings
from experiments.runs.collect import CollectSettings
from experiments.runs.loop_settings import LoopSettings


def check_config(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError for settings that no run could start with."""
  LoopSettings.of_config(config)
  CollectSettings.of_config(config)
  EngineSettings.of_config(config.rollout)
  BatchSettings.of_config(config)
  UpdateSettings.of_config(config).make_optimizer()
  if config.task.workers < 0:
    raise ValueError(
        f"config.task.workers={config.task.workers} must be at least 0"
    )


def check_mesh(config: ml_collections.ConfigDict, mesh: Mesh) -> None:
  """Raises ValueError if devices cannot have equal shares of the batch."""
  sizes = {
      "config.rollout.prompts": config.rollout.prompts,
      "config.loss.micro_rows": config.loss.micro_rows,
      "config.kl.probe_responses": config.kl.probe_responses,
  }
  for name, size in sizes.items():
    sharding.check_batch(name, size, mesh)
