"""The planner: what it compiles, counts, finds and refuses."""

import dataclasses
import importlib.util
import json
import math
import subprocess
import sys

import jax
import pytest

from experiments import plan as plan_command
from experiments.benchmarks import gpu_check
from experiments.models import architectures
from experiments.parallel import sharding
from experiments.planning import plan as plan_lib
from experiments.planning import targets
from experiments.planning.plan import Request

needs_libtpu = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"),
    reason="libtpu is not installed (the extra 'tpu')",
)
GIB = 2**30


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
  """A Hugging Face directory without weights."""
  folder = tmp_path_factory.mktemp("tiny")
  (folder / "config.json").write_text(json.dumps(gpu_check.SMALL_MODEL))
  return str(folder)


@pytest.fixture(scope="module")
def small_plan(tiny):
  return plan_lib.plan(Request(tiny, "cpu:1", rank=8, tokens=64))


def test_what_the_arguments_are(tiny, small_plan):
  n = architectures.n_params(architectures.architecture(tiny))
  assert small_plan.n_params == n
  assert small_plan.arguments["weights"] == 2 * n == small_plan.floor_bytes
  # One row of 64 tokens, 56 of them generated, and the probe's: four integers
  # of each token, four and a mask of those generated; of the row's also a mask,
  # an integer and three numbers; and the sampler's gap.
  rows = 64 * 4 * 4 + 56 * (4 * 4 + 1)
  tokens = 56 * (1 + 4 + 3 * 4)
  assert small_plan.arguments["batch"] == 2 * rows + tokens + 4
  outputs = {"q": 64, "k": 32, "v": 32, "o": 64, "gate": 160, "up": 160}
  d_out = 2 * (sum(outputs.values()) + 64)
  assert small_plan.gradient_bytes == 4 * 8 * d_out
  # RowAdam keeps a number per output, and a few scalars.
  assert 0 <= small_plan.arguments["optimizer"] - 4 * d_out < 200


def test_the_peak(small_plan):
  p = small_plan
  rest = p.argument_bytes + p.output_bytes - p.aliased_bytes
  assert p.peak_bytes == rest + p.temporary_bytes > p.floor_bytes
  # What this loss does not read of the batch is no argument.
  unread = sum(p.arguments.values()) - p.argument_bytes
  assert -64 <= unread < p.arguments["batch"] / 2
  # The state is donated: what is not aliased are the metrics.
  assert p.output_bytes - p.aliased_bytes < 1000
  assert p.fits and p.memory_bytes > GIB


def test_operations_are_at_least_those_of_forward_and_backward(small_plan):
  layers = small_plan.n_params - 256 * 64 * 2  # Without embedding and head.
  assert small_plan.flops > 2 * 2 * 64 * layers
  assert small_plan.unknown_loops == 0


def test_the_table_and_the_file_say_the_same(tmp_path, monkeypatch, small_plan):
  monkeypatch.setattr(plan_command, "plan", lambda request, dump: small_plan)
  out = tmp_path / "deep" / "out.json"
  plan_command.run(small_plan.request, out=str(out))
  read = json.loads(out.read_text())
  assert read["peak_bytes"] == small_plan.peak_bytes
  assert read["request"]["rank"] == 8
  assert "jax" in read["versions"] and "command" in read
  text = plan_command.table(small_plan)
  assert f"{small_plan.peak_bytes / GIB:.3f} GiB  per device" in text
  assert text.splitlines()[-1].startswith("fits in ")


def test_verdicts(small_plan):
  short = dataclasses.replace(
      small_plan, fits=False, peak_bytes=3 * GIB, memory_bytes=2 * GIB
  )
  assert plan_command.table(short).endswith(": 1.00 GiB too much")
  refused = dataclasses.replace(short, refusal="RESOURCE_EXHAUSTED: no room")
  assert plan_command.table(refused).endswith("RESOURCE_EXHAUSTED: no room")
  request = dataclasses.replace(small_plan.request, target="h100:1")
  tight = dataclasses.replace(
      small_plan, request=request, peak_bytes=70 * GIB, memory_bytes=79 * GIB
  )
  assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in plan_command.table(tight)


def test_messages_of_compilers():
  messages = {
      "Used 26.60G of 15.75G hbm. Exceeded": 26.6 * GIB,
      "HLO temporaries (256.00G) exceeds available HBM (15.75G)": 256 * GIB,
      "temporaries (512.5M) exceeds available HBM (15.75G)": 512.5 * 2**20,
  }
  for text, expected in messages.items():
    assert plan_lib.needed_bytes(text) == int(expected)
  assert plan_lib.needed_bytes("no number") is None


@pytest.mark.parametrize("best", [0, 1, 2, 3, 7, 8, 33, 100])
def test_the_largest_is_found_by_few_tries(best):
  tried = []

  def fits(n):
    tried.append(n)
    return n <= best

  assert plan_command.largest(fits, 64) == min(best, 64)
  assert len(tried) <= 2 * math.log2(max(best, 1)) + 2
  assert len(set(tried)) == len(tried)


def fake_plans(monkeypatch, small_plan, peak):
  """Replaces the compiler by a formula, to test the search around it."""

  def plan(request):
    n_bytes = peak(request)
    return dataclasses.replace(
        small_plan,
        request=request,
        peak_bytes=n_bytes,
        fits=n_bytes <= 15.75 * GIB,
    )

  monkeypatch.setattr(plan_command, "plan", plan)


def test_search_for_a_batch(monkeypatch, small_plan):
  fake_plans(monkeypatch, small_plan, lambda r: (4 + r.micro_batch) * GIB)
  tried = plan_command.search_batch(Request("qwen2.5-7b", "v5e:2x2"))
  assert tried[-1].request.micro_batch == tried[-1].request.sequences == 11
  assert [p.request.micro_batch for p in tried[:-1]] == [1, 2, 4, 8, 16, 12, 10]


def test_search_for_a_batch_where_none_fits(monkeypatch, small_plan):
  fake_plans(monkeypatch, small_plan, lambda r: 16 * GIB)
  (only,) = plan_command.search_batch(Request("qwen2.5-7b", "v5e:2x2"))
  assert not only.fits and only.request.micro_batch == 1


def test_search_for_a_slice(monkeypatch, small_plan):
  size = lambda r: math.prod(targets.parse(r.target).shape)
  fake_plans(monkeypatch, small_plan, lambda r: 100 * GIB // size(r))
  tried = plan_command.search_slice(Request("qwen2.5-32b", "v5e:1x1"))
  # 61 GiB of weights alone have no room on one chip.
  assert [p.request.target for p in tried] == ["v5e:2x2", "v5e:2x4"]
  assert tried[-1].fits


def test_defaults():
  one = plan_lib.resolved(Request("qwen2.5-7b", "h100:4"))
  assert (one.param_dtype, one.prompt_tokens) == ("bfloat16", 256)
  dense = Request("qwen2.5-7b", "h100:4", optimizer="dense_adam", sequences=4)
  assert plan_lib.resolved(dense).param_dtype == "float32"


@pytest.mark.parametrize(
    "name,n,fsdp,tensor",
    [
        ("qwen2.5-7b", 4, 1, 4),  # 28 heads
        ("qwen2.5-7b", 8, 2, 4),
        ("qwen2.5-32b", 8, 1, 8),  # 40 heads
        ("qwen2.5-32b", 64, 8, 8),  # a host's devices at most
        ("qwen2.5-0.5b", 4, 2, 2),  # 14 heads
        ("qwen2.5-0.5b", 1, 1, 1),
    ],
)
def test_the_default_mesh_splits_heads_first(name, n, fsdp, tensor):
  found = plan_lib.default_mesh(architectures.architecture(name), n)
  assert found == {"data": 1, "fsdp": fsdp, "tensor": tensor}


def test_the_default_token_block_keeps_products_tall():
  request = Request("qwen2.5-7b", "h100:4", tokens=2048)
  mesh = {"data": 1, "fsdp": 1, "tensor": 1}
  block = lambda r, **sizes: plan_lib.default_token_block(r, mesh | sizes)
  assert block(request) == 512
  assert block(request, tensor=2) == 256
  assert block(request, tensor=8) == 128
  assert block(request, fsdp=2) == 0
  assert block(dataclasses.replace(request, tokens=64)) == 64


def test_the_probe_is_of_a_data_shard(tiny):
  request = Request(tiny, "cpu:1", tokens=64, sequences=3)
  for sizes, wanted in (({"fsdp": 4}, 8), ({"tensor": 4}, 2)):
    mesh = jax.sharding.AbstractMesh(
        tuple(sizes.get(axis, 1) for axis in sharding.AXES), sharding.AXES
    )
    kl = plan_lib.config_of(request, mesh).kl
    assert kl.enabled and kl.probe_responses == wanted
  none = dataclasses.replace(request, probe=0)
  assert not plan_lib.config_of(none, mesh).kl.enabled


def test_the_config_is_for_all_devices(tiny):
  mesh = sharding.make_mesh(
      dict.fromkeys(sharding.AXES, 1), jax.devices("cpu")[:1]
  )
  request = Request(tiny, "cpu:1", tokens=64, sequences=4, micro_batch=2)
  c = plan_lib.config_of(request, mesh)
  assert c.rollout.prompts * c.rollout.responses == 4
  assert c.loss.micro_rows == 2 and c.kl.probe_responses == 2
  assert c.rollout.max_prompt_tokens + c.rollout.max_new_tokens == 64
  assert c.optimizer.refresh and c.optimizer.momentum == 0


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
    plan_lib.plan(dataclasses.replace(request, **change))


def test_mesh_in_words():
  assert plan_command.parse_mesh("fsdp:4,tensor:2") == {"fsdp": 4, "tensor": 2}
  with pytest.raises(ValueError, match="mesh='fsdp=4' must be like"):
    plan_command.parse_mesh("fsdp=4")
  with pytest.raises(ValueError, match="fixes the number of devices"):
    plan_command.search_slice(
        Request("qwen2.5-7b", "v5e:2x2", mesh={"fsdp": 4})
    )


def test_the_command_ends_without_a_traceback():
  process = subprocess.run(
      [
          *(sys.executable, "-m", "experiments.plan"),
          *("--model=qwen2.5-7", "--target=cpu:1"),
      ],
      capture_output=True,
      text=True,
      check=False,
  )
  assert process.returncode == 1 and "Traceback" not in process.stderr
  assert process.stderr.startswith("error: model='qwen2.5-7' is neither")


@needs_libtpu
def test_a_small_model_on_a_tpu(tiny):
  found = plan_lib.plan(Request(tiny, "v5e:2x2", rank=8, tokens=64))
  assert found.fits and found.n_devices == 4
  assert found.collective_bytes["all-gather"] > 0


@needs_libtpu
def test_what_a_tpu_has_no_room_for_is_an_answer(monkeypatch, tiny):
  def too_large(architecture, config, mesh):
    whole = sharding.replicated(mesh)
    x = jax.ShapeDtypeStruct((2**18, 2**18), "bfloat16", sharding=whole)
    traced = jax.jit(lambda x: (x @ x) @ x).trace(x)
    return traced.lower(lowering_platforms=("tpu",))

  monkeypatch.setattr(plan_lib.compiled_step, "lower_update", too_large)
  found = plan_lib.plan(Request(tiny, "v5e:1x1", rank=8, tokens=64))
  assert not found.fits and found.peak_bytes >= 128 * GIB
  assert "RESOURCE_EXHAUSTED" in plan_command.table(found).splitlines()[-1]
