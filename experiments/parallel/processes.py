"""Coordination between the processes of one run."""

import jax
from jax.experimental import multihost_utils
import numpy as np


def is_first_process() -> bool:
  """Whether this is the process that writes files and prints."""
  return jax.process_index() == 0


def wait_for_all(name: str) -> None:
  """Waits until every process has reached the place called `name`."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def any_process(value: bool) -> bool:
  """Whether `value` is true in any process; all processes must call this."""
  if jax.process_count() == 1:
    return value
  return bool(multihost_utils.process_allgather(np.asarray(value)).any())
