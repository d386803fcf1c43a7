"""Platform names for lowering."""

import types

import jax
import pytest

from experiments.parallel import platforms


@pytest.mark.parametrize(
    "platform, wanted",
    # JAX would resolve "gpu" by the GPUs at hand, and there may be none.
    [("gpu", "cuda"), ("cuda", "cuda"), ("tpu", "tpu"), ("cpu", "cpu")],
)
def test_the_platform_to_lower_for(platform, wanted):
  devices = [types.SimpleNamespace(platform=platform)] * 2
  assert platforms.lowering_platforms(devices) == (wanted,)


def test_devices_of_this_process():
  devices = jax.devices("cpu")
  assert platforms.lowering_platforms(devices) == ("cpu",)
