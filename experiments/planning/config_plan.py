"""Does a training config fit? Compiles its update for devices not at hand.

  python -m experiments.planning.config_plan \
    --config=experiments/configs/qwen2_5_7b.py --model=qwen2.5-7b \
    --target=v5p:2x2x1 --out=docs/results/configs/qwen2_5_7b-v5p-2x2x1.json

The planner (`experiments.plan`) chooses sizes and a mesh by itself; this
takes them as a config has them. Beside the update stands sampling: a block of
decoding steps, compiled too, and the keys and values that it keeps. The two do
not overlap: these are gone before the update. Reading prompts is not compiled.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import math
import pathlib
import sys
from typing import Any

from absl import app, flags
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
import ml_collections
from ml_collections import config_flags

from experiments.learning import compiled_step
from experiments.learning.train_step import UpdateSettings
from experiments.models import architectures, kv_cache, load
from experiments.models.config import DecoderConfig
from experiments.models.decoder import Decoder
from experiments.parallel import platforms, sharding
from experiments.planning import plan, targets
from experiments.rollouts import decode_steps, generate, sampling
from experiments.runs import check_config

_GIB = 2**30


def cache_bytes(
    architecture: DecoderConfig,
    config: ml_collections.ConfigDict,
    mesh: Mesh,
    *,
    evaluation: bool = False,
) -> int:
  """Bytes on one device of the keys and values that sampling keeps.

  Args:
    architecture: of the model, as the config runs it.
    config: a config like `configs/quickstart.py`.
    mesh: of `sharding.make_mesh`.
    evaluation: of an evaluation in place of a rollout: a response to each of
      `evaluate.prompts`.
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
  """What one device has of a cache of so many slots."""
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
  """Peak on one device while a rollout is sampled, less the optimizer's state.

  The peak of decoding with all slots, and what `rollout.memory_bytes` has
  beside their cache. None where the compiler ran out of memory without a word
  of how much.
  """
  c, dtype = config.rollout, config.rollout.cache_dtype or None
  length = c.max_prompt_tokens + decode_steps.circle(c.max_new_tokens)
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
    needed = plan.needed_bytes(str(error))
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
        decode_steps.Sampler(params, jax.random.key(0), jnp.float32(1.0), None),
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


def measure(
    config: ml_collections.ConfigDict, model: str, target: str
) -> dict[str, Any]:
  """What a run of a config needs on each device.

  Args:
    config: a config like `configs/quickstart.py`; `config.model` is not read.
    model: of `models.architecture`.
    target: of `devices.parse`, as many devices as `config.mesh` has.

  Returns:
    The fields of `planner.Account`, of the update; the peak of `sampling`; of
    that the `rollout_cache`; the `evaluation_cache`, in bytes; `fits`, both the
    update and sampling; and `gib`, figures for `line`.

  Raises:
    ValueError: settings that no run could start with; a mesh of another size
      than the target, or that cannot split the model or the batch.
    ImportError: the target's library is missing; names the extra.
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
  account = plan.account(architecture, config, found)
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
  return dataclasses.asdict(account) | {
      "sampling_bytes": peak,
      "rollout_cache_bytes": caches[0],
      "evaluation_cache_bytes": caches[1],
      "fits": (
          account.fits and peak is not None and peak <= account.memory_bytes
      ),
      "gib": {
          name: None if size is None else round(size / _GIB, 2)
          for name, size in sizes.items()
      },
  }


# Above `line`; the names of `gib`.
HEAD = "  devices      update  temporaries  sampling  cache  evaluation  device"


def line(found: Mapping[str, Any]) -> str:
  """The figures as a line of a config's docstring, GiB per device.

  Args:
    found: of `measure`, with its `target`.
  """
  cells = [f"  {found['target']:<11}"]
  for name, value in found["gib"].items():
    text = "?" if value is None else f"{value:.2f}"
    cells.append(text.rjust(len(name)))
  return "  ".join(cells)


def run(
    config: ml_collections.ConfigDict,
    model: str,
    target: str,
    out: str | None = None,
) -> None:
  """Measures, prints, and writes JSON; arguments and errors of `measure`."""
  found = {
      "command": " ".join(
          [
              "python -m experiments.planning.config_plan",
              *(repr(a) if " " in a else a for a in sys.argv[1:]),
          ]
      ),
      "model": model,
      "target": target,
      **measure(config, model, target),
  }
  print(f"{HEAD}\n{line(found)}")
  print("fits" if found["fits"] else f"does not fit {found['refusal']}")
  if out is not None:
    pathlib.Path(out).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(out).write_text(json.dumps(found, indent=2) + "\n", "utf-8")


def main(argv: Sequence[str]) -> None:
  del argv
  # Accelerators of this machine have no part in this.
  jax.config.update("jax_platforms", "cpu")
  values = flags.FLAGS
  try:
    run(_CONFIG.value, values.model, values.target, values.out)
  except (ValueError, ImportError, OSError) as error:
    sys.exit(f"error: {error}")


if __name__ == "__main__":
  _CONFIG = config_flags.DEFINE_config_file("config", None, "Config file.")
  flags.DEFINE_string(
      "model", None, "A name of experiments/models/architectures.py."
  )
  flags.DEFINE_string("target", None, "Like h100:4 or v5p:2x2x1.")
  flags.DEFINE_string("out", None, "JSON file to write.")
  flags.mark_flags_as_required(["config", "model", "target"])
  app.run(main)
