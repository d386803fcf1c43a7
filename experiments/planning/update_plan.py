"""Plans an update: what it needs on a target, according to its compiler.

The real update is compiled for devices that need not be at hand; nothing runs.
The peak memory of a device is arguments + outputs - aliased + temporaries.
"""

from collections.abc import Mapping
import dataclasses
import math
import os
import pathlib
import re
import tempfile
import time
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import ml_collections

from experiments.learning import compiled_step
from experiments.learning.batches import BatchSettings
from experiments.learning.train_step import TrainState, UpdateSettings
from experiments.models import architectures, load
from experiments.models.config import DecoderConfig
from experiments.models.decoder import Decoder
from experiments.parallel import sharding
from experiments.planning import hlo_cost, targets
from experiments.planning import request as request_lib
from experiments.planning.request import Request
from experiments.reporting import provenance
import logra_jax

_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin")


@dataclasses.dataclass(frozen=True)
class Account:
  """What the compiler states; bytes and operations are per device.

  Attributes:
    n_devices: Number of devices of the target.
    n_params: Number of parameters of the model.
    memory_bytes: Memory of a device.
    arguments: Bytes of the update's arguments by kind: `weights`, `optimizer`,
      `batch`.
    gradient_bytes: Bytes of the gradients, which are sketches for `logra`.
    argument_bytes: Bytes of all arguments, with the compiler's padding.
    output_bytes: Bytes of all results.
    aliased_bytes: Bytes of results that reuse the memory of an argument.
    temporary_bytes: Bytes of everything in between.
    peak_bytes: Arguments + outputs - aliased + temporaries. If the compiler ran
      out of memory, what it said that it needs, or None if it did not say.
    floor_bytes: Bytes of the weights alone in bfloat16, spread over the
      devices.
    fits: Whether the peak is at most the memory of a device.
    refusal: The compiler's first line if it ran out of memory, else empty.
    flops: Operations of matrix products, see `hlo_cost`.
    collective_bytes: Bytes sent by kind of collective, see `hlo_cost`.
    unknown_loops: Number of loops of unknown length, which are counted once.
    compile_seconds: Time that tracing and compiling took.
    versions: Versions of the packages that compiled.
  """

  n_devices: int
  n_params: int
  memory_bytes: int
  arguments: dict[str, int]
  gradient_bytes: int
  argument_bytes: int
  output_bytes: int
  aliased_bytes: int
  temporary_bytes: int
  peak_bytes: int | None
  floor_bytes: int
  fits: bool
  refusal: str
  flops: int
  collective_bytes: dict[str, int]
  unknown_loops: int
  compile_seconds: float
  versions: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Plan(Account):
  """What the compiler states for a request.

  Attributes:
    request: The request, with every None replaced by its default.
  """

  request: Request


def plan(request: Request, dump: str | os.PathLike[str] | None = None) -> Plan:
  """Compiles one update.

  Args:
    request: What to compile.
    dump: Folder for the compiler's own files (the program, its buffers and
      their lifetimes), or None.

  Returns:
    The compiler's account, even if it ran out of the device's memory.

  Raises:
    ValueError: If the model, target or optimizer is unknown, if the mesh has
      another number of devices or cannot split the model, or if sizes
      contradict each other.
    ImportError: If the target's library is missing; names the extra.
  """
  request = request_lib.resolved(request)
  target = targets.parse(request.target)
  architecture = architectures.architecture(request.model)
  request_lib.check_sizes(request, architecture)
  mesh = request_lib.make_mesh(request, target, architecture)
  request = dataclasses.replace(
      request,
      mesh=dict(mesh.shape),
      token_block=request_lib.token_block(request, mesh),
      probe=request_lib.probe_responses(request, mesh),
  )
  config = request_lib.training_config(request, mesh)
  stated = account(architecture, config, target, dump)
  return Plan(request=request, **vars(stated))


def account(
    architecture: DecoderConfig,
    config: ml_collections.ConfigDict,
    target: targets.Target,
    dump: str | os.PathLike[str] | None = None,
) -> Account:
  """Compiles the update of a training config.

  Args:
    architecture: Shapes of the model.
    config: A config like `configs/quickstart.py`.
    target: The target, with as many devices as `config.mesh`.
    dump: Folder for the compiler's own files, or None.

  Returns:
    The compiler's account, even if it ran out of the device's memory.

  Raises:
    ValueError: If the mesh has another number of devices than the target, or
      cannot split the model or the batch.
    ImportError: If the target's library is missing; names the extra.
  """
  mesh = sharding.make_mesh(config.mesh, target.devices())
  state = compiled_step.abstract_state(
      Decoder(load.configure(architecture, config)),
      UpdateSettings.of_config(config),
      mesh,
  )
  batch = compiled_step.abstract_batch(BatchSettings.of_config(config), mesh)
  common = {
      "n_devices": mesh.size,
      "n_params": architectures.n_params(architecture),
      "memory_bytes": target.memory_bytes,
      "arguments": {
          "weights": _bytes(state.params),
          "optimizer": _bytes(state.opt_state) + _bytes(state.update),
          "batch": _bytes(batch),
      },
      "gradient_bytes": _gradient_bytes(state, mesh),
      "floor_bytes": -(-2 * architectures.n_params(architecture) // mesh.size),
      "versions": provenance.versions(_PACKAGES),
  }
  started = time.monotonic()
  lowered = compiled_step.lower_update(architecture, config, mesh)
  with tempfile.TemporaryDirectory() as temporary:
    folder = pathlib.Path(temporary if dump is None else dump)
    options = target.compiler_options | {
        "xla_dump_to": str(folder),
        "xla_dump_hlo_as_text": True,
    }
    try:
      compiled = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
      return _refused(common, target, error, time.monotonic() - started)
    seconds = time.monotonic() - started
    return _compiled(common, compiled, _dumped_text(folder), seconds)


def _dumped_text(folder: pathlib.Path) -> str:
  """The compiled program, as the compiler dumped it.

  `Compiled.as_text` would parse the program again, which fails if `libtpu` is
  newer than `jaxlib`.
  """
  files = list(folder.glob("*after_optimizations.txt"))
  newest = max(files, key=lambda file: file.stat().st_mtime_ns)
  return newest.read_text("utf-8")


def _compiled(
    common: Mapping[str, Any],
    compiled: jax.stages.Compiled,
    text: str,
    seconds: float,
) -> Account:
  """The account of a compiled program."""
  sizes: dict[str, Any] = compiled_step.sizes(compiled)
  cost = hlo_cost.cost(text)
  return Account(
      **common,
      **sizes,
      fits=sizes["peak_bytes"] <= common["memory_bytes"],
      refusal="",
      flops=cost.flops,
      collective_bytes=dict(sorted(cost.collective_bytes.items())),
      unknown_loops=cost.unknown_loops,
      compile_seconds=round(seconds, 1),
  )


def _refused(
    common: Mapping[str, Any],
    target: targets.Target,
    error: jax.errors.JaxRuntimeError,
    seconds: float,
) -> Account:
  """The account of a program that exceeds the device's memory."""
  if not str(error).startswith("RESOURCE_EXHAUSTED"):
    raise ValueError(
        f"the compiler of target={target.name!r} failed: {_first_line(error)}"
    ) from error
  return Account(
      **common,
      argument_bytes=sum(common["arguments"].values()),
      output_bytes=0,
      aliased_bytes=0,
      temporary_bytes=0,
      peak_bytes=needed_bytes(str(error)),
      fits=False,
      refusal=_first_line(error),
      flops=0,
      collective_bytes={},
      unknown_loops=0,
      compile_seconds=round(seconds, 1),
  )


def _first_line(error: Exception) -> str:
  """The first line of an error's message."""
  return str(error).splitlines()[0]


def needed_bytes(message: str) -> int | None:
  """Bytes that an out-of-memory message of a TPU compiler asks for.

  Args:
    message: The message, such as "Used 26.60G of 15.75G hbm" or "the total
      memory required for HLO temporaries (256.00G) exceeds available HBM
      (15.75G)".

  Returns:
    The number of bytes; None if the message does not state it in a known form.
  """
  match = re.search(r"(?:Used |\()([\d.]+)([KMGT])(?: of |\) exceeds)", message)
  if not match:
    return None
  return int(float(match[1]) * 1024 ** ("KMGT".index(match[2]) + 1))


def _bytes(tree: chex.ArrayTree) -> int:
  """Bytes on one device of abstract arrays with shardings."""
  return sum(
      math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
      for x in jax.tree.leaves(tree)
  )


def _gradient_bytes(state: TrainState, mesh: Mesh) -> int:
  """Bytes on one device of what `value_and_grad` returns."""
  loss_fn = lambda params: jnp.zeros(())
  _, grads = jax.eval_shape(
      logra_jax.value_and_grad(loss_fn), state.params, state.opt_state
  )
  where = sharding.shardings(grads, state.params, mesh)
  place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
  return _bytes(jax.tree.map(place, grads, where))
