"""The platform names that JAX needs to lower a program for given devices."""

from collections.abc import Sequence
from typing import Any


def lowering_platforms(devices: Sequence[Any]) -> tuple[str, ...]:
  """Returns the `lower(lowering_platforms=...)` that devices need.

  JAX resolves the platform "gpu" by the GPUs at hand, but a program for
  described devices can be compiled without any.

  Args:
    devices: Devices of one kind, at hand or only described.
  """
  platform = devices[0].platform
  return ("cuda",) if platform == "gpu" else (platform,)
