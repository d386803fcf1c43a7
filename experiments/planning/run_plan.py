"""What a run of a training config needs: its update, and sampling.

`update_plan` chooses sizes and a mesh by itself; here they are the config's.
Sampling means a block of decoding steps, which is compiled too, and the keys
and values that it keeps. The two do not overlap: the cache is freed before the
update. Reading prompts is not compiled.
"""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
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
    mesh: Mesh,
    *,
    evaluation: bool = False,
) -> int:
  """Bytes on one device of the keys and values that sampling keeps.

  Args:
    architecture: The model, as the config runs it.
    config: A config like `configs/quickstart.py`.
    mesh: A mesh of `sharding.make_mesh`.
    evaluation: Whether to count an evaluation, which has one response to each
      of `evaluate.prompts`, instead of a rollout.
  """
  c = config.rollout
  prompts, responses = c.prompts, c.responses
  if evaluation:
    prompts, responses = config.evaluate.prompts, 1
  slots = min(sampling.slots(c), prompts * responses)
  total = generate.memory_bytes(
      architecture,
      prompts=prompts,
      group_size=responses,
      prompt_tokens=c.max_prompt_tokens,
      max_new_tokens=c.max_new_tokens,
      slots=slots,
      cache_dtype=c.cache_dtype or None,
  )
  return _part(total, slots, architecture, mesh)


def _part(
    total: int, slots: int, architecture: DecoderConfig, mesh: Mesh
) -> int:
  """The share that one device has of a cache of `slots` slots."""
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
  c, dtype = config.rollout, config.rollout.cache_dtype or None
  length = c.max_prompt_tokens + decode_steps.ring_size(c.max_new_tokens)
  n = sampling.slots(c)
  of_slots = kv_cache.cache_bytes(architecture, n, length, dtype)
  beside = cache_bytes(architecture, config, mesh)
  beside -= _part(of_slots, n, architecture, mesh)
  lowered = _lower_decode(architecture, config, mesh)
  try:
    compiled = lowered.compile(compiler_options=dict(options))
  except jax.errors.JaxRuntimeError as error:
    if not str(error).startswith("RESOURCE_EXHAUSTED"):
      raise
    needed = update_plan.needed_bytes(str(error))
    return None if needed is None else needed + beside
  return compiled_step.sizes(compiled)["peak_bytes"] + beside


def _lower_decode(
    architecture: DecoderConfig, config: ml_collections.ConfigDict, mesh: Mesh
) -> jax.stages.Lowered:
  """A block of decoding from empty slots, ready to compile."""
  c, n = config.rollout, sampling.slots(config.rollout)
  state = compiled_step.abstract_state(
      Decoder(load.configure(architecture, config)),
      UpdateSettings.of_config(config),
      mesh,
  )
  how = sampling.Sampling.of_config(c)
  how = dataclasses.replace(how, temperature=1.0, stop=())

  def block(params, valid, alive):
    slots = decode_steps.empty(
        architecture,
        n,
        c.max_prompt_tokens,
        c.max_new_tokens,
        c.cache_dtype or config.dtype,
    )
    return decode_steps.decode(
        Decoder(architecture),
        decode_steps.Options(how, (0,)),
        decode_steps.DecodeInputs(
            params, jax.random.key(0), jnp.float32(1.0), None
        ),
        slots.replace(prompt_valid=valid, alive=alive),
        jnp.int32(0),
        jnp.int32(0),
    )

  masks = [
      jax.ShapeDtypeStruct(shape, bool, sharding=sharding.replicated(mesh))
      for shape in ((n, c.max_prompt_tokens), (n,))
  ]
  with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
    traced = jax.jit(block).trace(state.params, *masks)
  found = mesh.devices.reshape(-1)
  return traced.lower(lowering_platforms=platforms.lowering_platforms(found))


def plan_config(
    config: ml_collections.ConfigDict, model: str, target: str
) -> dict[str, Any]:
  """What a run of a config needs on each device.

  Args:
    config: A config like `configs/quickstart.py`; `config.model` is not read.
    model: A name of `architectures.architecture`.
    target: A name of `targets.parse`, with as many devices as `config.mesh`.

  Returns:
    `model` and `target`; the fields of `update_plan.Account` for the update;
    `sampling_bytes`, the peak while a rollout is sampled, with
    `rollout_cache_bytes` of it; `evaluation_cache_bytes`; `fits`, for both the
    update and sampling; and `gib`, the figures of `summary_line`.

  Raises:
    ValueError: If no run could start with the settings, or if the mesh has
      another number of devices than the target or cannot split the model or
      the batch.
    ImportError: If the target's library is missing; names the extra.
  """
  check_config.check_config(config)
  found = targets.parse(target)
  mesh = sharding.make_mesh(config.mesh, found.devices())
  check_config.check_mesh(config, mesh)
  architecture = load.configure(architectures.architecture(model), config)
  caches = [
      cache_bytes(architecture, config, mesh, evaluation=evaluation)
      for evaluation in (False, True)
  ]
  decode = _sampling_bytes(architecture, config, mesh, found.compiler_options)
  account = update_plan.account(architecture, config, found)
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


# Header of `summary_line`; its columns are the names of `gib`.
HEAD = "  devices      update  temporaries  sampling  cache  evaluation  device"


def summary_line(content: Mapping[str, Any]) -> str:
  """The figures as a line of a config's docstring, in GiB per device.

  Args:
    content: What `plan_config` returned.
  """
  cells = [f"  {content['target']:<11}"]
  for name, value in content["gib"].items():
    text = "?" if value is None else f"{value:.2f}"
    cells.append(text.rjust(len(name)))
  return "  ".join(cells)


def summary(content: Mapping[str, Any]) -> str:
  """Header, figures, and whether the run fits, as text for a terminal."""
  verdict = "fits" if content["fits"] else f"does not fit {content['refusal']}"
  return f"{HEAD}\n{summary_line(content)}\n{verdict}"
