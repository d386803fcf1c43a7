"""What a model's update needs on a target, as the target's compiler says.

The real update is compiled for devices that need not be there; nothing runs.
Peak memory of a device means arguments + outputs - aliased + temporaries.
"""

from collections.abc import Mapping
import dataclasses
import importlib.metadata
import math
import os
import pathlib
import re
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import ml_collections

from experiments.configs import quickstart
from experiments.learning import compiled_step
from experiments.learning.batches import BatchSettings
from experiments.learning.train_step import UpdateSettings
from experiments.models import architectures, load
from experiments.models.config import DecoderConfig
from experiments.models.decoder import Decoder
from experiments.parallel import sharding
from experiments.planning import hlo_cost, targets
import logra_jax

_DEVICES_PER_HOST = 8
# Rows of a product that keep an accelerator busy, and the smallest block.
_ROWS, _MIN_BLOCK = 512, 128
_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin")


@dataclasses.dataclass(frozen=True)
class Request:
  """What to compile.

  Attributes:
    model: of `models.architecture`.
    target: of `devices.parse`.
    optimizer: a name of `optimizers.OPTIMIZERS`.
    rank: of sketches, adapters or projections.
    tokens: length of a sequence, prompt and completion together.
    prompt_tokens: of these, the prompt's; None means an eighth.
    sequences: responses per update and device.
    micro_batch: of these, how many are computed at once; divides `sequences`.
    probe: responses per data shard (device along `data` and `fsdp`) that the
      KL is predicted on; None means 2, as published, or 1 if there is but one.
      0 means no KL budget.
    mesh: devices along each of `sharding.AXES`; missing ones are 1. None means
      `default_mesh`.
    param_dtype: of the stored weights; None means bfloat16, and float32 for
      `dense_adam`.
    others: `'frozen'` or `'adam'`: embeddings, norms, biases, head.
    attention_block: queries scored at once; 0 means all.
    token_block: tokens of a sequence projected at once; 0 means all, None
      `default_token_block`.
    chunk: tokens whose logits are in memory at once, over all devices.
  """

  model: str
  target: str
  optimizer: str = "logra"
  rank: int = 256
  tokens: int = 2048
  prompt_tokens: int | None = None
  sequences: int = 1
  micro_batch: int = 1
  probe: int | None = None
  mesh: Mapping[str, int] | None = None
  param_dtype: str | None = None
  others: str = "frozen"
  attention_block: int = 128
  token_block: int | None = None
  chunk: int = 256


@dataclasses.dataclass(frozen=True)
class Account:
  """What the compiler says; bytes and operations are per device.

  Attributes:
    n_devices: of the target.
    n_params: of the model.
    memory_bytes: memory of a device.
    arguments: bytes of the update's arguments by kind: `weights`, `optimizer`,
      `batch`.
    gradient_bytes: of what the backward pass leaves: sketches for `logra`.
    argument_bytes: of all arguments, with the compiler's padding.
    output_bytes: of all results.
    aliased_bytes: of results that lie where an argument was.
    temporary_bytes: of everything in between.
    peak_bytes: arguments + outputs - aliased + temporaries; if the compiler
      refused, what it said that it would need, or None if it did not say.
    floor_bytes: of the weights alone in bfloat16, spread over the devices.
    fits: whether the peak is at most the memory of a device.
    refusal: the compiler's first line if it ran out of memory, else empty.
    flops: operations of matrix products (see `hlo`).
    collective_bytes: by kind (see `hlo`).
    unknown_loops: loops of unknown length, counted once.
    compile_seconds: time that tracing and compiling took.
    versions: of the packages that compiled.
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
  """What the compiler says of a request.

  Attributes:
    request: what was asked, every None replaced by what it stood for.
  """

  request: Request


def plan(request: Request, dump: str | os.PathLike[str] | None = None) -> Plan:
  """Compiles one update.

  Args:
    request: what to compile.
    dump: folder for the compiler's own files (the program, its buffers and
      when they are alive), or None.

  Returns:
    The compiler's account, also where it ran out of the device's memory.

  Raises:
    ValueError: an unknown model, target or optimizer; a mesh that does not
      multiply to the devices, or cannot split the model; sizes that contradict
      each other.
    ImportError: the target's library is missing; names the extra.
  """
  request = resolved(request)
  target = targets.parse(request.target)
  architecture = architectures.architecture(request.model)
  _check_sizes(request, architecture)
  mesh = _mesh(request, target, architecture)
  request = dataclasses.replace(
      request,
      mesh=dict(mesh.shape),
      token_block=_token_block(request, mesh),
      probe=_probe(request, mesh),
  )
  found = account(architecture, config_of(request, mesh), target, dump)
  return Plan(request=request, **vars(found))


def account(
    architecture: DecoderConfig,
    config: ml_collections.ConfigDict,
    target: targets.Target,
    dump: str | os.PathLike[str] | None = None,
) -> Account:
  """Compiles the update of a training config.

  Args:
    architecture: shapes of the model.
    config: a config like `configs/quickstart.py`.
    target: devices, as many as `config.mesh` has.
    dump: as for `plan`.

  Returns:
    The compiler's account, also where it ran out of the device's memory.

  Raises:
    ValueError: a mesh that does not multiply to the devices, or cannot split
      the model or the batch.
    ImportError: the target's library is missing; names the extra.
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
      "versions": _versions(),
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
    return _measured(common, compiled, _text(folder), seconds)


def _text(folder: pathlib.Path) -> str:
  """The compiled program, as the compiler dumped it.

  Not `Compiled.as_text`: that reads the program again, and a `libtpu` that is
  newer than `jaxlib` makes programs that it cannot read.
  """
  files = list(folder.glob("*after_optimizations.txt"))
  newest = max(files, key=lambda file: file.stat().st_mtime_ns)
  return newest.read_text("utf-8")


def _measured(
    common: Mapping[str, Any],
    compiled: jax.stages.Compiled,
    text: str,
    seconds: float,
) -> Account:
  """The account of a program that was compiled."""
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
  """The account of a program that the compiler has no room for."""
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
  return str(error).splitlines()[0]


def needed_bytes(message: str) -> int | None:
  """Bytes that an out-of-memory message of a TPU compiler asks for.

  Args:
    message: such as "Used 26.60G of 15.75G hbm" or "the total memory required
      for HLO temporaries (256.00G) exceeds available HBM (15.75G)".

  Returns:
    The number; None if there is none in a known form.
  """
  match = re.search(r"(?:Used |\()([\d.]+)([KMGT])(?: of |\) exceeds)", message)
  if not match:
    return None
  return int(float(match[1]) * 1024 ** ("KMGT".index(match[2]) + 1))


def resolved(request: Request) -> Request:
  """The request with every None replaced by what it stands for.

  Raises:
    ValueError: a number that cannot be.
  """
  for name in ("rank", "tokens", "sequences", "micro_batch", "chunk"):
    value = vars(request)[name]
    if value < 1:
      raise ValueError(f"{name}={value} must be at least 1")
  for name in ("attention_block", "token_block"):
    value = _or(vars(request)[name], 0)
    if value < 0:
      raise ValueError(f"{name}={value} must be 0 or more")
  if request.sequences % request.micro_batch:
    raise ValueError(
        f"micro_batch={request.micro_batch} must divide"
        f" sequences={request.sequences}"
    )
  tokens = request.tokens
  prompt_tokens = _or(request.prompt_tokens, max(1, tokens // 8))
  if not 0 < prompt_tokens < tokens:
    raise ValueError(
        f"prompt_tokens={prompt_tokens} must be at least 1 and leave some of"
        f" tokens={tokens} for the completion"
    )
  if request.probe is not None and request.probe < 0:
    raise ValueError(f"probe={request.probe} must be 0 or more")
  dtype = "float32" if request.optimizer == "dense_adam" else "bfloat16"
  if _or(request.param_dtype, dtype) not in ("bfloat16", "float32"):
    raise ValueError(
        f"param_dtype={request.param_dtype!r} must be 'bfloat16' or 'float32'"
    )
  return dataclasses.replace(
      request,
      prompt_tokens=prompt_tokens,
      param_dtype=_or(request.param_dtype, dtype),
  )


def _check_sizes(request: Request, architecture: DecoderConfig) -> None:
  """Raises ValueError for what this model cannot have."""
  limits = {"tokens": "max_length", "rank": "d_model"}
  for name, of in limits.items():
    value, limit = vars(request)[name], vars(architecture)[of]
    if value > limit:
      raise ValueError(
          f"{name}={value} must be at most {limit}, the {of} of"
          f" {request.model}"
      )


def _or(value: Any, default: Any) -> Any:
  return default if value is None else value


def config_of(request: Request, mesh: Mesh) -> ml_collections.ConfigDict:
  """The training config of a request: the quickstart's, at this size."""
  request = resolved(request)
  assert request.prompt_tokens
  c = quickstart.get_config()
  c.dtype = "bfloat16"
  c.param_dtype = request.param_dtype
  c.remat = True
  c.attention_block = request.attention_block
  c.token_block = _token_block(request, mesh)
  c.mesh.update(dict(mesh.shape))
  # One response to a prompt and to a row: each row has all its tokens.
  c.rollout.prompts = request.sequences * mesh.size
  c.rollout.responses = 1
  c.rollout.max_prompt_tokens = request.prompt_tokens
  c.rollout.max_new_tokens = request.tokens - request.prompt_tokens
  c.loss.row_tokens = (request.tokens,)
  c.loss.micro_rows = request.micro_batch * mesh.size
  c.loss.chunk = request.chunk
  c.optimizer.name = request.optimizer
  c.optimizer.rank = request.rank
  c.optimizer.others = request.others
  if request.optimizer == "logra":
    # As published: a new basis for each update, so no momentum.
    c.optimizer.momentum = 0.0
    c.optimizer.refresh = True
  probe = _probe(request, mesh)
  c.kl.enabled = probe > 0
  c.kl.probe_responses = max(1, probe) * sharding.data_shards(mesh)
  c.kl.measure = False
  return c


def _probe(request: Request, mesh: Mesh) -> int:
  """Probe responses of a data shard."""
  there = request.sequences * mesh.shape["tensor"]
  probe = _or(request.probe, min(2, there))
  if probe > there:
    raise ValueError(f"probe={probe} must be at most {there}, a shard's share")
  return probe


def default_mesh(architecture: DecoderConfig, n_devices: int) -> dict[str, int]:
  """As many devices on `tensor` as the model and one host allow, then `fsdp`.

  With a sequence or two per device the weights of a layer are larger than its
  activations, so it is the activations that should travel.
  """
  tensor = max(
      n
      for n in range(1, min(n_devices, _DEVICES_PER_HOST) + 1)
      if not (
          n_devices % n or architecture.n_heads % n or architecture.d_ff % n
      )
  )
  return {"data": 1, "fsdp": n_devices // tensor, "tensor": tensor}


def default_token_block(request: Request, mesh: Mapping[str, int]) -> int:
  """Enough tokens for products of `_ROWS` rows; all where weights are gathered.

  Every block gathers the weights that are split over `fsdp` anew.
  """
  if mesh["fsdp"] > 1:
    return 0
  sequences = request.micro_batch * mesh["tensor"]
  return min(request.tokens, max(_MIN_BLOCK, _ROWS // sequences))


def _token_block(request: Request, mesh: Mesh) -> int:
  """Tokens of a sequence projected at once."""
  return _or(request.token_block, default_token_block(request, mesh.shape))


def _mesh(
    request: Request, target: targets.Target, architecture: DecoderConfig
) -> Mesh:
  found = target.devices()
  sizes = request.mesh
  if sizes is None:
    sizes = default_mesh(architecture, len(found))
  unknown = set(sizes) - set(sharding.AXES)
  if unknown:
    raise ValueError(
        f"mesh has the axes {sorted(unknown)}; there are"
        f" {', '.join(sharding.AXES)}"
    )
  return sharding.make_mesh({a: sizes.get(a, 1) for a in sharding.AXES}, found)


def _bytes(tree: Any) -> int:
  """Bytes on one device of abstract arrays with shardings."""
  return sum(
      math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
      for x in jax.tree.leaves(tree)
  )


def _gradient_bytes(state: Any, mesh: Mesh) -> int:
  """Bytes on one device of what `value_and_grad` returns."""
  nothing = lambda params: jnp.zeros(())
  _, grads = jax.eval_shape(
      logra_jax.value_and_grad(nothing), state.params, state.opt_state
  )
  where = sharding.shardings(grads, state.params, mesh)
  place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
  return _bytes(jax.tree.map(place, grads, where))


def _versions() -> dict[str, str]:
  found = {d.metadata["Name"] for d in importlib.metadata.distributions()}
  names = [name for name in _PACKAGES if name in found]
  return {name: importlib.metadata.version(name) for name in names}
