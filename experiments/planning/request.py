"""A request to the planner, and the training config that it stands for."""

from collections.abc import Mapping
import dataclasses
from typing import Any

from jax.sharding import AbstractMesh, Mesh
import ml_collections

from experiments.configs import quickstart
from experiments.models.config import DecoderConfig
from experiments.parallel import sharding
from experiments.planning import targets

_DEVICES_PER_HOST = 8
# Rows of a product that keep an accelerator busy.
_ROWS = 512
# Fewest tokens of a sequence in a default token block.
_MIN_BLOCK = 128


def _field(help_text: str, **default: Any) -> Any:
  """A field with the help text of its flag in `experiments.plan`."""
  return dataclasses.field(metadata={"help": help_text}, **default)


@dataclasses.dataclass(frozen=True)
class Request:
  """What to plan; `help_of` explains each field."""

  model: str = _field(
      "Name of a published model such as qwen2.5-7b, or a Hugging Face"
      " directory."
  )
  target: str = _field("Devices, such as h100:4, v5p:2x2x1 or cpu:8.")
  optimizer: str = _field(
      "logra, dense_adam, dense_sgd, lora, galore or muon.", default="logra"
  )
  rank: int = _field(
      "Rank of the sketches, adapters or projections.", default=256
  )
  tokens: int = _field(
      "Length of a sequence in tokens, prompt and response together.",
      default=2048,
  )
  prompt_tokens: int | None = _field(
      "Tokens of a sequence that are the prompt; default: an eighth.",
      default=None,
  )
  sequences: int = _field("Responses per update and device.", default=1)
  micro_batch: int = _field(
      "Sequences per device computed at once; divides --sequences.", default=1
  )
  probe: int | None = _field(
      "Responses per data shard that the KL is predicted on; default: 2, or 1"
      " if there is only one; 0 plans without a KL budget.",
      default=None,
  )
  mesh: Mapping[str, int] | None = _field(
      "Devices along each mesh axis, such as fsdp:4,tensor:2; default: as many"
      " on tensor as the model and one host allow.",
      default=None,
  )
  param_dtype: str | None = _field(
      "Dtype of the stored weights; default: bfloat16, and float32 for"
      " dense_adam.",
      default=None,
  )
  others: str = _field(
      "Embeddings, norms, biases and head: frozen, or trained by adam.",
      default="frozen",
  )
  attention_block: int = _field(
      "Queries scored at once; 0 means all.", default=128
  )
  token_block: int | None = _field(
      "Tokens of a sequence projected at once; 0 means all; default: enough to"
      " keep an accelerator busy.",
      default=None,
  )
  chunk: int = _field(
      "Tokens whose logits are in memory at once, over all devices.",
      default=256,
  )


def help_of(name: str) -> str:
  """Returns the explanation of a field of `Request`."""
  fields = {field.name: field for field in dataclasses.fields(Request)}
  return fields[name].metadata["help"]


def resolved(request: Request) -> Request:
  """Replaces every None of a request by the default that it stands for.

  Raises:
    ValueError: If a number is out of range.
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


def check_sizes(request: Request, architecture: DecoderConfig) -> None:
  """Raises ValueError for sizes that the model cannot have."""
  limits = {"tokens": "max_length", "rank": "d_model"}
  for name, limit_name in limits.items():
    value, limit = vars(request)[name], vars(architecture)[limit_name]
    if value > limit:
      raise ValueError(
          f"{name}={value} must be at most {limit}, the {limit_name} of"
          f" {request.model}"
      )


def _or(value: Any, default: Any) -> Any:
  """The value, or the default if it is None."""
  return default if value is None else value


def full_rows_config(
    *,
    optimizer: str,
    rank: int,
    responses: int,
    tokens: int,
    prompt_tokens: int,
    micro_rows: int,
    chunk: int,
    probe_responses: int,
) -> ml_collections.ConfigDict:
  """Makes the quickstart's config at another size, with LoGRA as published.

  Every prompt has one response, so each row of a batch is full.

  Args:
    optimizer: Name of the optimizer, a key of `optimizers.OPTIMIZERS`.
    rank: Rank of its sketches, adapters or projections.
    responses: Responses per update, over all devices.
    tokens: Length of a row in tokens, prompt and response together.
    prompt_tokens: Tokens of a row that are the prompt.
    micro_rows: Rows computed at once, over all devices.
    chunk: Tokens whose logits are in memory at once.
    probe_responses: Responses that the KL is predicted on.
  """
  config = quickstart.get_config()
  config.rollout.prompts, config.rollout.responses = responses, 1
  config.rollout.max_prompt_tokens = prompt_tokens
  config.rollout.max_new_tokens = tokens - prompt_tokens
  config.loss.row_tokens = (tokens,)
  config.loss.micro_rows = micro_rows
  config.loss.chunk = chunk
  config.optimizer.name = optimizer
  config.optimizer.rank = rank
  if optimizer == "logra":
    # As published: a new basis for each update, so no momentum.
    config.optimizer.momentum = 0.0
    config.optimizer.refresh = True
  config.kl.probe_responses = probe_responses
  config.kl.measure = False
  return config


def training_config(
    request: Request, mesh: Mesh | AbstractMesh
) -> ml_collections.ConfigDict:
  """Makes the training config of a request on a mesh."""
  request = resolved(request)
  assert request.prompt_tokens
  probe = probe_responses(request, mesh)
  config = full_rows_config(
      optimizer=request.optimizer,
      rank=request.rank,
      responses=request.sequences * mesh.size,
      tokens=request.tokens,
      prompt_tokens=request.prompt_tokens,
      micro_rows=request.micro_batch * mesh.size,
      chunk=request.chunk,
      probe_responses=max(1, probe) * sharding.data_shards(mesh),
  )
  config.dtype = "bfloat16"
  config.param_dtype = request.param_dtype
  config.remat = True
  config.attention_block = request.attention_block
  config.token_block = token_block(request, mesh)
  config.mesh.update(dict(mesh.shape))
  config.optimizer.others = request.others
  config.kl.enabled = probe > 0
  return config


def probe_responses(request: Request, mesh: Mesh | AbstractMesh) -> int:
  """Number of responses per data shard that the KL is predicted on.

  Raises:
    ValueError: If a shard has fewer responses.
  """
  share = request.sequences * mesh.shape["tensor"]
  probe = _or(request.probe, min(2, share))
  if probe > share:
    raise ValueError(f"probe={probe} must be at most {share}, a shard's share")
  return probe


def default_mesh(architecture: DecoderConfig, n_devices: int) -> dict[str, int]:
  """Puts as many devices on `tensor` as the model and one host allow.

  All others are on `fsdp`. With one or two sequences per device, a layer's
  weights are larger than its activations, so it is better to send the
  activations.
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
  """Returns a block with enough tokens to keep an accelerator busy.

  With `fsdp` it is 0, which means all tokens, because every block would gather
  the weights again.
  """
  if mesh["fsdp"] > 1:
    return 0
  sequences = request.micro_batch * mesh["tensor"]
  return min(request.tokens, max(_MIN_BLOCK, _ROWS // sequences))


def token_block(request: Request, mesh: Mesh | AbstractMesh) -> int:
  """Number of tokens of a sequence that are projected at once; 0 means all."""
  return _or(request.token_block, default_token_block(request, mesh.shape))


def make_mesh(
    request: Request, target: targets.Target, architecture: DecoderConfig
) -> Mesh:
  """Makes the mesh of a request from the devices of its target.

  Raises:
    ValueError: If the mesh has an unknown axis, or another number of devices.
  """
  devices = target.devices()
  sizes = request.mesh
  if sizes is None:
    sizes = default_mesh(architecture, len(devices))
  unknown = set(sizes) - set(sharding.AXES)
  if unknown:
    raise ValueError(
        f"mesh has the axes {sorted(unknown)}; there are"
        f" {', '.join(sharding.AXES)}"
    )
  return sharding.make_mesh(
      {axis: sizes.get(axis, 1) for axis in sharding.AXES}, devices
  )
