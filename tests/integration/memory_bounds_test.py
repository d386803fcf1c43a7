"""Bounds on the memory of the real update, as a TPU's compiler states it.

docs/results/memory has the figures of more models and targets.
"""

import importlib.util

import pytest

from experiments.planning import update_plan
from experiments.planning.request import Request
from experiments.reporting.units import GIB

# Peak of dense Adam in float32 on four v5p chips, before LoGRA was written.
DENSE_1_5B, DENSE_7B = 7.25 * GIB, 32.69 * GIB

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"),
    reason="libtpu is not installed (the extra 'tpu')",
)


def plan(model):
  request = Request(model, "v5p:2x2x1", rank=256, tokens=2048)
  return update_plan.plan(request)


@pytest.mark.slow  # Two minutes.
def test_1_5_billion_parameters():
  found = plan("qwen2.5-1.5b")
  assert found.peak_bytes < 0.21 * DENSE_1_5B
  assert found.peak_bytes < 2.1 * found.floor_bytes


@pytest.mark.slow
def test_7_billion_parameters():  # A minute and a half.
  found = plan("qwen2.5-7b")
  assert found.peak_bytes < 0.16 * DENSE_7B
  assert found.peak_bytes < 1.5 * found.floor_bytes
