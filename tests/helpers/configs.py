"""Configs of small runs."""

from typing import Any

import ml_collections

from experiments.configs import tiny


def tiny_config(**changes: Any) -> ml_collections.ConfigDict:
  """The tiny config with some fields changed.

  Args:
    **changes: New values by dotted path, such as `**{"loss.epochs": 2}`.
  """
  config = tiny.get_config().unlock()
  config.update_from_flattened_dict(changes)
  return config.lock()
