"""Plans a run of a training config: its update, and sampling.

Sizes and mesh are those of the config; `update_plan` chooses them by itself.
Sampling is a block of decoding steps, which is compiled too, and the keys and
values that it keeps. It does not overlap with the update, because the cache is
freed before. Reading prompts is not compiled.
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
import ml_collections

from experiments.learning import compiled_step
from experiments.learning.train_step import UpdateSettings
from experiments.models import architectures, kv_cache, load
from experiments.models.config import DecoderConfig
from experiments.models.decoder import Decoder
from experiments.parallel import platforms, sharding
from experiments.planning import targets, update_plan
from experiments.reporting.units import GIB
from experiments.rollouts import decode_steps, generate, sampling
from experiments.runs import check_config


def cache_bytes(
    architecture: DecoderConfig,
    config: ml_collections.ConfigDict,
    mesh: Mesh | AbstractMesh,
    *,
    evaluation: bool = False,
) -> int:
  """Bytes on one device of the keys and values that sampling keeps.

  Args:
    architecture: The model, as the config runs it.
    config: A config like `configs/quickstart.py`.
    mesh: The mesh, from `sharding.make_mesh`.
    evaluation: Whether to count an evaluation, which has one response to each
      of `evaluate.prompts`, instead of a rollout.
  """
  rollout = config.rollout
  prompts, responses = rollout.prompts, rollout.responses
  if evaluation:
    prompts, responses = config.evaluate.prompts, 1
  slots = min(sampling.slots(rollout), prompts * responses)
  total = generate.memory_bytes(
      architecture,
      prompts=prompts,
      group_size=responses,
      prompt_tokens=rollout.max_prompt_tokens,
      max_new_tokens=rollout.max_new_tokens,
      slots=slots,
      cache_dtype=rollout.cache_dtype or None,
  )
  return _device_share(total, slots, architecture, mesh)


def _device_share(
    total: int,
    slots: int,
    architecture: DecoderConfig,
    mesh: Mesh | AbstractMesh,
) -> int:
  """Bytes on one device of a cache of `slots` slots with `total` bytes."""
  whole = (slots, architecture.n_kv_heads)
  spec = sharding.spec(("batch", "heads"), whole, mesh)
  part = NamedSharding(mesh, spec).shard_shape(whole)
  return total * math.prod(part) // math.prod(whole)


def _sampling_bytes(
    architecture: DecoderConfig,
    config: ml_collections.ConfigDict,
    mesh: Mesh,
    options: Mapping[str, Any],
) -> int | None:
  """Peak on one device while a rollout is sampled, without optimizer state.

  It is the peak of decoding with all slots, plus what `generate.memory_bytes`
  counts besides their cache. None if the compiler ran out of memory without
  saying how much it needs.
  """
  rollout = config.rollout
  length = rollout.max_prompt_tokens
  length += decode_steps.ring_size(rollout.max_new_tokens)
  n = sampling.slots(rollout)
  slot_bytes = kv_cache.cache_bytes(
      architecture, n, length, rollout.cache_dtype or None
  )
  # What sampling keeps besides the cache of the slots, which is compiled.
  others = cache_bytes(architecture, config, mesh)
  others -= _device_share(slot_bytes, n, architecture, mesh)
  lowered = _lower_decode(architecture, config, mesh)
  try:
    compiled = lowered.compile(compiler_options=dict(options))
  except jax.errors.JaxRuntimeError as error:
    if not str(error).startswith("RESOURCE_EXHAUSTED"):
      raise
    needed = update_plan.needed_bytes(str(error))
    return None if needed is None else needed + others
  return compiled_step.sizes(compiled)["peak_bytes"] + others


def _lower_decode(
    architecture: DecoderConfig, config: ml_collections.ConfigDict, mesh: Mesh
) -> jax.stages.Lowered:
  """Lowers a block of decoding from empty slots, ready to compile."""
  rollout, n = config.rollout, sampling.slots(config.rollout)
  state = compiled_step.abstract_state(
      Decoder(load.configure(architecture, config)),
      UpdateSettings.of_config(config),
      mesh,
  )
  settings = sampling.Sampling.of_config(rollout)
  settings = dataclasses.replace(settings, temperature=1.0, stop=())

  def block(params, valid, alive):
    slots = decode_steps.empty(
        architecture,
        n,
        rollout.max_prompt_tokens,
        rollout.max_new_tokens,
        rollout.cache_dtype or config.dtype,
    )
    return decode_steps.decode(
        Decoder(architecture),
        decode_steps.Options(settings, (0,)),
        decode_steps.DecodeInputs(
            params, jax.random.key(0), jnp.float32(1.0), None
        ),
        slots.replace(prompt_valid=valid, alive=alive),
        jnp.int32(0),
        jnp.int32(0),
    )

  masks = [
      jax.ShapeDtypeStruct(shape, bool, sharding=sharding.replicated(mesh))
      for shape in ((n, rollout.max_prompt_tokens), (n,))
  ]
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    traced = jax.jit(block).trace(state.params, *masks)
  names = platforms.lowering_platforms(mesh.devices.reshape(-1))
  return traced.lower(lowering_platforms=names)


def plan_config(
    config: ml_collections.ConfigDict, model: str, target: str
) -> dict[str, Any]:
  """Compiles what a run of a config needs on each device.

  Args:
    config: A config like `configs/quickstart.py`; `config.model` is not read.
    model: The model, a name that `architectures.architecture` takes.
    target: The target, a name that `targets.parse` takes; has as many devices
      as `config.mesh`.

  Returns:
    `model` and `target`; the fields of `update_plan.Account` for the update;
    `sampling_bytes`, the peak while a rollout is sampled, with
    `rollout_cache_bytes` of it; `evaluation_cache_bytes`; `fits`, for both the
    update and sampling; and `gib`, the figures of `report.run_plan_line`.

  Raises:
    ValueError: If no run could start with the settings, or if the mesh has
      another number of devices than the target or cannot split the model or
      the batch.
    ImportError: If the target's library is missing; names the extra.
  """
  check_config.check_config(config)
  parsed = targets.parse(target)
  mesh = sharding.make_mesh(config.mesh, parsed.devices())
  check_config.check_mesh(config, mesh)
  architecture = load.configure(architectures.architecture(model), config)
  caches = [
      cache_bytes(architecture, config, mesh, evaluation=evaluation)
      for evaluation in (False, True)
  ]
  decode = _sampling_bytes(architecture, config, mesh, parsed.compiler_options)
  account = update_plan.account(architecture, config, parsed)
  optimizer = account.arguments["optimizer"]
  peak = None if decode is None else decode + optimizer
  sizes = {
      "update": account.peak_bytes,
      "temporaries": account.temporary_bytes,
      "sampling": peak,
      "cache": caches[0],
      "evaluation": caches[1],
      "device": account.memory_bytes,
  }
  return (
      {"model": model, "target": target}
      | dataclasses.asdict(account)
      | {
          "sampling_bytes": peak,
          "rollout_cache_bytes": caches[0],
          "evaluation_cache_bytes": caches[1],
          "fits": (
              account.fits and peak is not None and peak <= account.memory_bytes
          ),
          "gib": {
              name: None if size is None else round(size / GIB, 2)
              for name, size in sizes.items()
          },
      }
  )
