"""Bounds on the memory of the real update, as the TPU compiler reports it.

For other models and targets, see docs/results/memory.
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
  planned = plan("qwen2.5-1.5b")
  assert planned.peak_bytes < 0.21 * DENSE_1_5B
  assert planned.peak_bytes < 2.1 * planned.floor_bytes


@pytest.mark.slow
def test_7_billion_parameters():  # A minute and a half.
  planned = plan("qwen2.5-7b")
  assert planned.peak_bytes < 0.16 * DENSE_7B
  assert planned.peak_bytes < 1.5 * planned.floor_bytes
