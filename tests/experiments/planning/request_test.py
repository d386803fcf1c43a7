"""Requests: their defaults, and their training configs."""

import dataclasses

import jax
import pytest

from experiments.models import architectures
from experiments.parallel import sharding
from experiments.planning import request as request_lib
from experiments.planning.request import Request


def test_defaults():
  one = request_lib.resolved(Request("qwen2.5-7b", "h100:4"))
  assert (one.param_dtype, one.prompt_tokens) == ("bfloat16", 256)
  dense = Request("qwen2.5-7b", "h100:4", optimizer="dense_adam", sequences=4)
  assert request_lib.resolved(dense).param_dtype == "float32"


@pytest.mark.parametrize(
    "name,n,fsdp,tensor",
    [
        ("qwen2.5-7b", 4, 1, 4),  # 28 heads.
        ("qwen2.5-7b", 8, 2, 4),
        ("qwen2.5-32b", 8, 1, 8),  # 40 heads.
        ("qwen2.5-32b", 64, 8, 8),  # At most the devices of one host.
        ("qwen2.5-0.5b", 4, 2, 2),  # 14 heads.
        ("qwen2.5-0.5b", 1, 1, 1),
    ],
)
def test_the_default_mesh_splits_heads_first(name, n, fsdp, tensor):
  mesh = request_lib.default_mesh(architectures.architecture(name), n)
  assert mesh == {"data": 1, "fsdp": fsdp, "tensor": tensor}


def test_the_default_token_block_keeps_products_tall():
  request = Request("qwen2.5-7b", "h100:4", tokens=2048)
  mesh = {"data": 1, "fsdp": 1, "tensor": 1}
  block = lambda r, **sizes: request_lib.default_token_block(r, mesh | sizes)
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
    kl = request_lib.training_config(request, mesh).kl
    assert kl.enabled and kl.probe_responses == wanted
  none = dataclasses.replace(request, probe=0)
  assert not request_lib.training_config(none, mesh).kl.enabled


def test_the_config_is_for_all_devices(tiny):
  mesh = sharding.make_mesh(
      dict.fromkeys(sharding.AXES, 1), jax.devices("cpu")[:1]
  )
  request = Request(tiny, "cpu:1", tokens=64, sequences=4, micro_batch=2)
  config = request_lib.training_config(request, mesh)
  assert config.rollout.prompts * config.rollout.responses == 4
  assert config.loss.micro_rows == 2 and config.kl.probe_responses == 2
  rollout = config.rollout
  assert rollout.max_prompt_tokens + rollout.max_new_tokens == 64
  assert config.optimizer.refresh and config.optimizer.momentum == 0
