"""The platform names that JAX needs to lower a program for given devices."""

from collections.abc import Sequence
from typing import Any


def lowering_platforms(devices: Sequence[Any]) -> tuple[str, ...]:
  """Returns the `lower(lowering_platforms=...)` that devices need.

  JAX resolves the platform "gpu" by the GPUs at hand, of which there may be
  none when a program is compiled for described devices.

  Args:
    devices: Devices of one kind, at hand or only described.
  """
  platform = devices[0].platform
  return ("cuda",) if platform == "gpu" else (platform,)
