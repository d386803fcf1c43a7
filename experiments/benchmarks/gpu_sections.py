"""Measures one update, or rollouts, on this machine's first device.

Each in a process of its own (see `device_check`): JAX tells only the highest
memory that a process ever had.
"""

from collections.abc import Callable
import dataclasses
import importlib.metadata
import math
import pathlib
import platform
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks import timed_update
from experiments.learning import batches, compiled_step, optimizers, train_step
from experiments.models import architectures, load
from experiments.models.decoder import Decoder
from experiments.parallel import sharding
from experiments.planning import plan
from experiments.rollouts import generate
from experiments.rollouts.sampling import Sampling

_GIB = 2**30
# Elements of a weight that are drawn at once, so that drawing needs less memory
# than an update.
_DRAWN = 2**24


@dataclasses.dataclass(frozen=True)
class Section:
  """One process.

  Attributes:
    kind: `'update'` or `'rollout'`.
    model: of `models.architecture`.
    optimizer: of an update, a name of `optimizers.OPTIMIZERS`.
    rank: of an update's sketches.
    prompts: of a rollout.
    prompt_tokens: of a rollout's prompts.
    responses: to each prompt.
    tokens: of an update's sequence, or of a rollout's responses.
    repeats: how often it is timed.
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
    what = "rollout" if self.kind == "rollout" else self.optimizer
    if self.kind == "update" and self.optimizer != "dense_adam":
      what += f", rank {self.rank}"
    return f"{pathlib.Path(self.model).name}: {what}"


Tell = Callable[[dict[str, Any]], None]


def measure(section: Section, tell: Tell) -> dict[str, Any]:
  """Runs a section in this process, whose peak of memory should be its own.

  Args:
    section: what to run.
    tell: called with what is known so far, whenever there is more.

  Returns:
    Plain data; with `skipped` or `error` if the device is too small.
  """
  device = jax.devices()[0]
  found: dict[str, Any] = {"device": _device(device)}
  tell(found)
  run = _update if section.kind == "update" else _rollout
  try:
    run(section, device, found, tell)
  except jax.errors.JaxRuntimeError as error:
    found["error"] = str(error).splitlines()[0]
  return found


def _device(device: jax.Device) -> dict[str, Any]:
  names = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin")
  installed = {d.metadata["Name"] for d in importlib.metadata.distributions()}
  return {
      "kind": device.device_kind,
      "platform": device.platform,
      "runtime": device.client.platform_version,
      "memory_limit": _memory(device, "bytes_limit"),
      "python": platform.python_version(),
      **{n: importlib.metadata.version(n) for n in names if n in installed},
  }


def _memory(device: jax.Device, key: str) -> int | None:
  """One of the device's memory statistics; a CPU has none."""
  return (device.memory_stats() or {}).get(key)


def request_of(section: Section, target: str) -> plan.Request:
  """The planner's request for a section's update."""
  return plan.Request(
      section.model,
      target,
      optimizer=section.optimizer,
      rank=section.rank,
      tokens=section.tokens,
  )


def _update(
    section: Section, device: jax.Device, found: dict[str, Any], tell: Tell
) -> None:
  """Compiles before it allocates: kernels are timed on memory, too."""
  architecture = architectures.architecture(section.model)
  mesh = sharding.make_mesh(dict.fromkeys(sharding.AXES, 1), [device])
  config = plan.config_of(request_of(section, "h100:1"), mesh)
  abstract, batch = compiled_step.abstract_arguments(architecture, config, mesh)
  found["state_bytes"] = sum(
      math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(abstract)
  )
  if _too_much(device, found["state_bytes"], found):
    return
  tx = optimizers.make_optimizer(config)
  model = Decoder(load.configure(architecture, config))
  with jax.set_mesh(mesh):
    step = compiled_step.jit_update(model, tx, config, abstract, mesh)
    started = time.perf_counter()
    step = step.lower(abstract, batch).compile()
    found["compile_seconds"] = round(time.perf_counter() - started, 2)
    sizes = compiled_step.sizes(step)
    found["compiled_peak_bytes"] = sizes.pop("peak_bytes")
    found |= sizes
    tell(found)
    if _too_much(device, found["compiled_peak_bytes"], found):
      return

    def make(key):
      params = random_params(abstract.params, key)
      return train_step.init_state(params, tx)

    where = sharding.shardings(abstract, abstract.params, mesh)
    state = jax.jit(make, out_shardings=where)(jax.random.key(0))
    arrays = timed_update.random_batch(config, architecture.vocab_size, 0)
    arrays = batches.put(arrays, mesh)
    jax.block_until_ready((state, arrays))
    found["peak_bytes_before"] = _memory(device, "peak_bytes_in_use")
    seconds = []
    for _ in range(1 + section.repeats):
      started = time.perf_counter()
      state, metrics = step(state, arrays)
      jax.block_until_ready((state, metrics))
      seconds.append(round(time.perf_counter() - started, 4))
      found["peak_bytes"] = _memory(device, "peak_bytes_in_use")
      found["first_seconds"], found["seconds"] = seconds[0], seconds[1:]
      found["loss"] = float(metrics["train/loss"])
      found["update_skipped"] = float(metrics["kl/skipped"])
      tell(found)


def _too_much(device: jax.Device, needed: int, found: dict[str, Any]) -> bool:
  """Whether the device has less memory than this; then says so."""
  limit = _memory(device, "bytes_limit")
  if limit is None or needed <= limit:
    return False
  found["skipped"] = f"{needed / _GIB:.1f} of {limit / _GIB:.1f} GiB"
  return True


def random_params(shapes: Any, key: jax.Array) -> Any:
  """Random weights, drawn in blocks.

  Args:
    shapes: the parameters' tree, of anything with shapes and dtypes.
    key: of `jax.random`.

  Returns:
    A tree of arrays: scales are 1, biases 0, all else normal with a standard
    deviation of 0.02.
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
    section: Section, device: jax.Device, found: dict[str, Any], tell: Tell
) -> None:
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
  found |= {"responses": responses, "seconds": []}
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
      found["first_seconds"] = seconds  # Most of it compiles.
      continue
    found["seconds"].append(seconds)
    tokens = responses * section.tokens / np.median(found["seconds"])
    found["tokens_per_second"] = round(float(tokens), 1)
    found["peak_bytes"] = _memory(device, "peak_bytes_in_use")
    tell(found)
