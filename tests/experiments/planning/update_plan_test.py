"""Plans of updates: their figures, and the requests that are refused."""

import dataclasses
import importlib.util

import jax
import pytest

from experiments.models import architectures
from experiments.parallel import sharding
from experiments.planning import report, update_plan
from experiments.planning.request import Request
from experiments.reporting.units import GIB

needs_libtpu = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"),
    reason="libtpu is not installed (the extra 'tpu')",
)


def test_what_the_arguments_are(tiny, small_plan):
  n = architectures.n_params(architectures.architecture(tiny))
  assert small_plan.n_params == n
  assert small_plan.arguments["weights"] == 2 * n == small_plan.floor_bytes
  # The row and the probe each have 64 tokens, 56 of them generated: four
  # integers per token, and four more and a mask per generated token. The row
  # also has a mask, an integer and three floats per generated token. The last
  # float is the sampler's gap.
  rows = 64 * 4 * 4 + 56 * (4 * 4 + 1)
  tokens = 56 * (1 + 4 + 3 * 4)
  assert small_plan.arguments["batch"] == 2 * rows + tokens + 4
  outputs = {"q": 64, "k": 32, "v": 32, "o": 64, "gate": 160, "up": 160}
  d_out = 2 * (sum(outputs.values()) + 64)
  assert small_plan.gradient_bytes == 4 * 8 * d_out
  # RowAdam keeps one number per output and a few scalars.
  assert 0 <= small_plan.arguments["optimizer"] - 4 * d_out < 200


def test_the_peak(small_plan):
  p = small_plan
  kept = p.argument_bytes + p.output_bytes - p.aliased_bytes
  assert p.peak_bytes == kept + p.temporary_bytes > p.floor_bytes
  # Parts of the batch that this loss does not read are not arguments.
  unread = sum(p.arguments.values()) - p.argument_bytes
  assert -64 <= unread < p.arguments["batch"] / 2
  # The state is donated, so only the metrics are not aliased.
  assert p.output_bytes - p.aliased_bytes < 1000
  assert p.fits and p.memory_bytes > GIB


def test_operations_are_at_least_those_of_forward_and_backward(small_plan):
  layers = small_plan.n_params - 256 * 64 * 2  # Without embedding and head.
  assert small_plan.flops > 2 * 2 * 64 * layers
  assert small_plan.unknown_loops == 0


def test_messages_of_compilers():
  messages = {
      "Used 26.60G of 15.75G hbm. Exceeded": 26.6 * GIB,
      "HLO temporaries (256.00G) exceeds available HBM (15.75G)": 256 * GIB,
      "temporaries (512.5M) exceeds available HBM (15.75G)": 512.5 * 2**20,
  }
  for text, expected in messages.items():
    assert update_plan.needed_bytes(text) == int(expected)
  assert update_plan.needed_bytes("no number") is None


@pytest.mark.parametrize(
    "change,match",
    [
        ({"model": "qwen9"}, "model='qwen9' is neither"),
        ({"target": "abacus:4"}, "target='abacus:4' is unknown"),
        ({"optimizer": "sgd"}, "config.optimizer.name='sgd' must be one of"),
        ({"mesh": {"fsdp": 2}}, "fsdp=2 .* but there are 1"),
        ({"mesh": {"rows": 1}}, r"axes \['rows'\]; there are data, fsdp"),
        ({"tokens": 129}, "tokens=129 must be at most 128, the max_length"),
        ({"rank": 65}, "rank=65 must be at most 64, the d_model"),
        ({"rank": 0}, "rank=0 must be at least 1"),
        ({"sequences": 3, "micro_batch": 2}, "micro_batch=2 must divide"),
        ({"probe": 2}, "probe=2 must be at most 1, a shard's share"),
        ({"probe": -1}, "probe=-1 must be 0 or more"),
        ({"prompt_tokens": 64}, "prompt_tokens=64 .* leave some of tokens=64"),
        ({"param_dtype": "int8"}, "param_dtype='int8' must be"),
        ({"others": "sgd"}, "config.optimizer.others='sgd'"),
    ],
)
def test_bad_requests(tiny, change, match):
  request = Request(tiny, "cpu:1", rank=8, tokens=64)
  with pytest.raises(ValueError, match=match):
    update_plan.plan(dataclasses.replace(request, **change))


@needs_libtpu
def test_a_small_model_on_a_tpu(tiny):
  plan = update_plan.plan(Request(tiny, "v5e:2x2", rank=8, tokens=64))
  assert plan.fits and plan.n_devices == 4
  assert plan.collective_bytes["all-gather"] > 0


@needs_libtpu
def test_what_a_tpu_has_no_room_for_is_an_answer(monkeypatch, tiny):
  def too_large(architecture, config, mesh):
    whole = sharding.replicated(mesh)
    x = jax.ShapeDtypeStruct((2**18, 2**18), "bfloat16", sharding=whole)
    traced = jax.jit(lambda x: (x @ x) @ x).trace(x)
    return traced.lower(lowering_platforms=("tpu",))

  monkeypatch.setattr(update_plan.compiled_step, "lower_update", too_large)
  plan = update_plan.plan(Request(tiny, "v5e:1x1", rank=8, tokens=64))
  assert not plan.fits and plan.peak_bytes >= 128 * GIB
  assert "RESOURCE_EXHAUSTED" in report.plan_table(plan).splitlines()[-1]
