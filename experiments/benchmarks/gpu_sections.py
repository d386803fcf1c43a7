"""Measures one update, or rollouts, on this machine's first device.

`gpu_check` runs each section in a process of its own, because JAX reports only
the highest memory that a process ever had.
"""

from collections.abc import Callable
import dataclasses
import math
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.benchmarks import timed_update
from experiments.learning import batches, compiled_step, train_step
from experiments.learning.batches import BatchSettings
from experiments.learning.train_step import UpdateSettings
from experiments.models import architectures, load
from experiments.models.decoder import Decoder
from experiments.parallel import sharding
from experiments.planning.request import Request, training_config
from experiments.reporting import provenance, units
from experiments.rollouts import generate
from experiments.rollouts.sampling import Sampling

# Elements of a weight that are drawn at once. Drawing all of them at once would
# need more memory than an update.
_DRAWN = 2**24


@dataclasses.dataclass(frozen=True)
class Section:
  """What one process measures.

  Attributes:
    kind: `'update'` or `'rollout'`.
    model: The model, a name that `architectures.architecture` takes.
    optimizer: Optimizer of an update, a name of `optimizers.OPTIMIZERS`.
    rank: Rank of an update's sketches.
    prompts: Prompts of a rollout.
    prompt_tokens: Tokens of each prompt of a rollout.
    responses: Responses to each prompt of a rollout.
    tokens: Tokens of an update's sequence, or of each response of a rollout.
    repeats: Number of timed updates or rollouts.
  """

  kind: str
  model: str
  optimizer: str = "logra"
  rank: int = 16
  prompts: int = 8
  prompt_tokens: int = 128
  responses: int = 8
  tokens: int = 2048
  repeats: int = 4

  @property
  def label(self) -> str:
    """The section's name in tables and logs."""
    what = "rollout" if self.kind == "rollout" else self.optimizer
    if self.kind == "update" and self.optimizer != "dense_adam":
      what += f", rank {self.rank}"
    return f"{pathlib.Path(self.model).name}: {what}"


# Receives the results so far.
Tell = Callable[[dict[str, Any]], None]


def run_section(section: Section, tell: Tell) -> dict[str, Any]:
  """Runs a section in this process.

  The process should do nothing else, so that its peak of memory is the
  section's.

  Args:
    section: What to measure.
    tell: Called with the results so far whenever there are more.

  Returns:
    Results as plain data; `skipped` or `error` if the device is too small.
  """
  device = jax.devices()[0]
  result: dict[str, Any] = {"device": _device(device)}
  tell(result)
  run = _update if section.kind == "update" else _rollout
  try:
    run(section, device, result, tell)
  except jax.errors.JaxRuntimeError as error:
    result["error"] = str(error).splitlines()[0]
  return result


def _device(device: jax.Device) -> dict[str, Any]:
  """What is known of the device and of the packages that drive it."""
  packages = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin")
  return {
      "kind": device.device_kind,
      "platform": device.platform,
      "runtime": device.client.platform_version,
      "memory_limit": _memory(device, "bytes_limit"),
      **provenance.versions(packages),
  }


def _memory(device: jax.Device, key: str) -> int | None:
  """One of the device's memory statistics; None on a CPU, which has none."""
  return (device.memory_stats() or {}).get(key)


def request_of(section: Section, target: str) -> Request:
  """The planner's request for a section's update on a target."""
  return Request(
      section.model,
      target,
      optimizer=section.optimizer,
      rank=section.rank,
      tokens=section.tokens,
  )


def _update(
    section: Section, device: jax.Device, result: dict[str, Any], tell: Tell
) -> None:
  """Measures an update.

  Compiles before it allocates: the compiler needs memory to time kernels.
  """
  architecture = architectures.architecture(section.model)
  mesh = sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), [device])
  config = training_config(request_of(section, "h100:1"), mesh)
  settings = UpdateSettings.of_config(config)
  model = Decoder(load.configure(architecture, config))
  abstract = compiled_step.abstract_state(model, settings, mesh)
  batch = compiled_step.abstract_batch(BatchSettings.of_config(config), mesh)
  result["state_bytes"] = sum(
      math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(abstract)
  )
  if _too_much(device, result["state_bytes"], result):
    return
  tx = settings.make_optimizer()
  with jax.set_mesh(mesh):
    step = compiled_step.jit_update(model, tx, settings, abstract, mesh)
    started = time.perf_counter()
    step = step.lower(abstract, batch).compile()
    result["compile_seconds"] = round(time.perf_counter() - started, 2)
    sizes = compiled_step.sizes(step)
    result["compiled_peak_bytes"] = sizes.pop("peak_bytes")
    result |= sizes
    tell(result)
    if _too_much(device, result["compiled_peak_bytes"], result):
      return

    def make(key):
      params = random_params(abstract.params, key)
      return train_step.init_state(params, tx)

    where = sharding.shardings(abstract, abstract.params, mesh)
    state = jax.jit(make, out_shardings=where)(jax.random.key(0))
    arrays = timed_update.random_batch(config, architecture.vocab_size, 0)
    arrays = batches.put(arrays, mesh)
    jax.block_until_ready((state, arrays))
    result["peak_bytes_before"] = _memory(device, "peak_bytes_in_use")
    seconds = []
    for _ in range(1 + section.repeats):
      started = time.perf_counter()
      state, metrics = step(state, arrays)
      jax.block_until_ready((state, metrics))
      seconds.append(round(time.perf_counter() - started, 4))
      result["peak_bytes"] = _memory(device, "peak_bytes_in_use")
      result["first_seconds"], result["seconds"] = seconds[0], seconds[1:]
      result["loss"] = float(metrics["train/loss"])
      result["update_skipped"] = float(metrics["kl/skipped"])
      tell(result)


def _too_much(device: jax.Device, needed: int, result: dict[str, Any]) -> bool:
  """Whether `needed` bytes do not fit; if so, the result says it."""
  limit = _memory(device, "bytes_limit")
  if limit is None or needed <= limit:
    return False
  result["skipped"] = f"{needed / units.GIB:.1f} of {limit / units.GIB:.1f} GiB"
  return True


def random_params(shapes: optax.Params, key: jax.Array) -> optax.Params:
  """Draws random weights in blocks.

  Args:
    shapes: The parameters' tree; its leaves need only shapes and dtypes.
    key: Random key.

  Returns:
    A tree of arrays: scales are 1, biases are 0, and all other weights are
    normal with a standard deviation of 0.02.
  """
  leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)

  def one(name, leaf, key):
    if name in ("scale", "bias"):
      return jnp.full(leaf.shape, float(name == "scale"), leaf.dtype)
    size = math.prod(leaf.shape)
    n = next(n for n in range(-(-size // _DRAWN), size + 1) if size % n == 0)
    draw = lambda key: 0.02 * jax.random.normal(key, (size // n,), leaf.dtype)
    return jax.lax.map(draw, jax.random.split(key, n)).reshape(leaf.shape)

  keys = jax.random.split(key, len(leaves))
  drawn = [
      one(path[-1].key, leaf, key)
      for (path, leaf), key in zip(leaves, keys, strict=True)
  ]
  return jax.tree.unflatten(tree, drawn)


def _rollout(
    section: Section, device: jax.Device, result: dict[str, Any], tell: Tell
) -> None:
  """Measures rollouts of a model with bfloat16 weights."""
  architecture = dataclasses.replace(
      architectures.architecture(section.model),
      dtype="bfloat16",
      param_dtype="bfloat16",
  )
  model = Decoder(architecture)
  shapes = jax.eval_shape(
      lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
  )["params"]
  make = jax.jit(lambda key: random_params(shapes, key))
  params = make(jax.random.key(0))
  shape = (section.prompts, section.prompt_tokens)
  prompts = np.random.default_rng(0).integers(0, architecture.vocab_size, shape)
  responses = section.prompts * section.responses
  result |= {"responses": responses, "seconds": []}
  for repeat in range(1 + section.repeats):
    started = time.perf_counter()
    jax.block_until_ready(
        generate.generate(
            model,
            params,
            jnp.asarray(prompts, jnp.int32),
            jnp.ones(shape, bool),
            jax.random.key(repeat),
            sampling=Sampling(section.tokens),
            eos_ids=(),
            pad_id=0,
            group_size=section.responses,
        )
    )
    seconds = round(time.perf_counter() - started, 4)
    if not repeat:
      result["first_seconds"] = seconds  # Most of it is compilation.
      continue
    result["seconds"].append(seconds)
    tokens = responses * section.tokens / np.median(result["seconds"])
    result["tokens_per_second"] = round(float(tokens), 1)
    result["peak_bytes"] = _memory(device, "peak_bytes_in_use")
    tell(result)
