"""Reads and writes Hugging Face model directories."""

from collections.abc import Callable, Mapping
import json
import os
import pathlib
import tempfile
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
import ml_dtypes  # noqa: F401  (lets NumPy read bfloat16)
import numpy as np

from experiments._optional import require
from experiments.models import stacking
from experiments.models import tokenizer as tokenizer_lib
from experiments.models.config import DecoderConfig, RopeScaling
from experiments.models.tokenizer import Tokenizer

_FAMILIES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

_NAMES = {
    "embed/embedding": "model.embed_tokens.weight",
    "norm/scale": "model.norm.weight",
    "lm_head/kernel": "lm_head.weight",
    "layers/attn_norm/scale": "model.layers.{}.input_layernorm.weight",
    "layers/mlp_norm/scale": "model.layers.{}.post_attention_layernorm.weight",
    "layers/q_norm/scale": "model.layers.{}.self_attn.q_norm.weight",
    "layers/k_norm/scale": "model.layers.{}.self_attn.k_norm.weight",
    "layers/q_proj/kernel": "model.layers.{}.self_attn.q_proj.weight",
    "layers/k_proj/kernel": "model.layers.{}.self_attn.k_proj.weight",
    "layers/v_proj/kernel": "model.layers.{}.self_attn.v_proj.weight",
    "layers/o_proj/kernel": "model.layers.{}.self_attn.o_proj.weight",
    "layers/q_proj/bias": "model.layers.{}.self_attn.q_proj.bias",
    "layers/k_proj/bias": "model.layers.{}.self_attn.k_proj.bias",
    "layers/v_proj/bias": "model.layers.{}.self_attn.v_proj.bias",
    "layers/gate_proj/kernel": "model.layers.{}.mlp.gate_proj.weight",
    "layers/up_proj/kernel": "model.layers.{}.mlp.up_proj.weight",
    "layers/down_proj/kernel": "model.layers.{}.mlp.down_proj.weight",
}

# What `transformers` assumes for fields that config.json lacks.
_DEFAULTS = {
    "architectures": None,
    "attention_bias": False,
    "eos_token_id": None,
    "head_dim": None,
    "hidden_act": "silu",
    "layer_types": None,
    "mlp_bias": False,
    "num_key_value_heads": None,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "rms_norm_eps": 1e-6,
    "rope_parameters": None,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
}

# Options of which the decoder supports one value only.
_REQUIRED = {
    "attention_bias": False,
    "hidden_act": "silu",
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "use_sliding_window": False,
}

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"

# Tokenizer files of other writers that would override the ones written here.
_OVERRIDES = (
    "added_tokens.json",
    "chat_template.jinja",
    "special_tokens_map.json",
)

# Functions that fetch one tensor each, by tensor name.
_Shard = dict[str, Callable[[], np.ndarray]]


class _Json(dict):
  """The content of a JSON file; a missing key is an error that names it."""

  def __init__(self, file: pathlib.Path, defaults: Mapping[str, Any]):
    try:
      content = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
      raise ValueError(
          f"{file.parent} has no {file.name}: not a Hugging Face model"
      ) from None
    except ValueError as error:
      raise ValueError(f"{file} is not valid JSON: {error}") from error
    super().__init__({**defaults, **content})
    self._file = file

  def __missing__(self, key: str) -> Any:
    raise ValueError(f"{self._file} has no {key!r}")


def load(
    directory: str | pathlib.Path, param_dtype: DTypeLike = "float32"
) -> tuple[DecoderConfig, dict[str, Any], Tokenizer]:
  """Loads a model from a Hugging Face directory.

  Args:
    directory: Holds `config.json`, one or more safetensors files, and the
      tokenizer's files.
    param_dtype: Dtype of the parameters, whatever it is in the files.

  Returns:
    Configuration, parameters (see `Decoder`) and tokenizer.

  Raises:
    ValueError: If a file is missing, truncated or corrupt; if the
      architecture or one of its options is not supported; or if a tensor is
      missing, has an unexpected shape, or has no place in the decoder.
    ImportError: If the `safetensors` package is not installed.
  """
  directory = pathlib.Path(directory)
  config, tokenizer = load_description(directory, param_dtype)
  tensors = _open(directory)

  def read(path, layer):
    name = _NAMES["/".join(path)].format(layer)
    if name not in tensors:
      raise ValueError(f"{directory} has no tensor {name}: incomplete model")
    value = tensors.pop(name).get_tensor(name)
    # PyTorch stores kernels as [d_out, d_in].
    return name, value.T if path[-1] == "kernel" else value

  params = stacking.stack(config, read)
  _check_rest(directory, config, params, tensors)
  return config, params, tokenizer


def load_description(
    directory: str | pathlib.Path, param_dtype: DTypeLike = "float32"
) -> tuple[DecoderConfig, Tokenizer]:
  """Loads everything of a Hugging Face directory except the weights.

  Args:
    directory: Holds `config.json` and the tokenizer's files.
    param_dtype: Dtype of the parameters.

  Returns:
    The decoder's configuration, and the tokenizer with its chat template.

  Raises:
    ValueError: If a file is missing or corrupt, if the architecture or one of
      its options is not supported, or if the tokenizer has ids without an
      embedding.
  """
  directory = pathlib.Path(directory)
  raw = _Json(directory / "config.json", _DEFAULTS)
  config = _read_config(raw, jnp.dtype(param_dtype).name)
  tokenizer = tokenizer_lib.from_directory(directory, _eos_ids(directory, raw))
  tokenizer.check_fits(config.vocab_size, directory)
  return config, tokenizer


def read_config(
    directory: str | pathlib.Path, param_dtype: DTypeLike = "float32"
) -> DecoderConfig:
  """Reads only the `config.json` of a Hugging Face directory.

  Args:
    directory: Holds `config.json`; needs neither weights nor tokenizer.
    param_dtype: Dtype of the parameters.

  Returns:
    The decoder's configuration.

  Raises:
    ValueError: If the file is missing or corrupt, or if the architecture or
      one of its options is not supported.
  """
  raw = _Json(pathlib.Path(directory) / "config.json", _DEFAULTS)
  return _read_config(raw, jnp.dtype(param_dtype).name)


def _read_config(raw: Mapping[str, Any], param_dtype: str) -> DecoderConfig:
  """Converts the content of config.json to the decoder's configuration."""
  family = _family(raw)
  for key, value in _REQUIRED.items():
    if raw[key] != value:
      raise ValueError(
          f"{key}={raw[key]!r} in config.json is not supported: only {value!r}"
      )
  unknown = set(raw["layer_types"] or ()) - {"full_attention"}
  if unknown:
    raise ValueError(
        f"layer_types {sorted(unknown)} in config.json are not supported: only "
        "'full_attention'"
    )
  theta, scaling = _read_rope(raw)
  n_heads, n_kv_heads = raw["num_attention_heads"], raw["num_key_value_heads"]
  # Qwen3's heads have 128 features unless config.json says otherwise.
  head_dim = 128 if family == "qwen3" else raw["hidden_size"] // n_heads
  return DecoderConfig(
      vocab_size=raw["vocab_size"],
      d_model=raw["hidden_size"],
      n_layers=raw["num_hidden_layers"],
      n_heads=n_heads,
      n_kv_heads=n_heads if n_kv_heads is None else n_kv_heads,
      head_dim=head_dim if raw["head_dim"] is None else raw["head_dim"],
      d_ff=raw["intermediate_size"],
      rope_theta=float(theta),
      norm_eps=float(raw["rms_norm_eps"]),
      qkv_bias=family == "qwen2",
      qk_norm=family == "qwen3",
      tied_head=raw["tie_word_embeddings"],
      max_length=raw["max_position_embeddings"],
      param_dtype=param_dtype,
      family=family,
      rope_scaling=scaling,
  )


def _family(raw: Mapping[str, Any]) -> str:
  """Returns the family of the architecture that config.json names."""
  names = raw["architectures"]
  if names is None:
    # Old exports lack the field and name only the family.
    known = {f: f for f in _FAMILIES.values()}
    name = raw["model_type"]
  else:
    known, name = _FAMILIES, ", ".join(names)
  if name not in known:
    raise ValueError(
        f"unknown architecture {name!r} in config.json (known: "
        f"{', '.join(known)})"
    )
  return known[name]


def _read_rope(raw: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
  """Reads base and scaling, from transformers 5's field or the older two."""
  rope = raw["rope_parameters"] or raw["rope_scaling"] or {}
  defaults = {"rope_theta": raw["rope_theta"], "rope_type": "default"}
  if "type" in rope:
    defaults["rope_type"] = rope["type"]
  rope = {**defaults, **rope}
  if rope["rope_type"] == "default":
    return rope["rope_theta"], None
  if rope["rope_type"] != "llama3":
    raise ValueError(
        f"rope scaling of type {rope['rope_type']!r} in config.json is not "
        "supported: only 'llama3' and 'default'"
    )
  try:
    scaling = RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_length=rope["original_max_position_embeddings"],
    )
  except KeyError as error:
    raise ValueError(f"rope scaling in config.json lacks {error}") from error
  return rope["rope_theta"], scaling


def _eos_ids(directory: pathlib.Path, raw: Mapping[str, Any]) -> list[int]:
  """Returns ids that end a turn by config.json or generation_config.json."""
  fields = [raw["eos_token_id"]]
  generation = directory / "generation_config.json"
  if generation.is_file():
    fields.append(_Json(generation, {"eos_token_id": None})["eos_token_id"])
  ids: list[int | None] = []
  for value in fields:
    ids.extend(value if isinstance(value, list) else [value])
  return [i for i in ids if i is not None]


def _open(directory: pathlib.Path) -> dict[str, Any]:
  """Returns the open safetensors file of each tensor, by tensor name."""
  index, single = directory / _INDEX, directory / _WEIGHTS
  if index.is_file():
    files = _Json(index, {})["weight_map"]
  elif single.is_file():
    files = {None: single.name}
  else:
    raise ValueError(
        f"{directory} has no weights: neither {_WEIGHTS} nor {_INDEX}"
    )
  opened = {}
  for name in dict.fromkeys(files.values()):
    opened[name] = _open_one(directory / name)
  if index.is_file():
    for name, file in files.items():
      if name not in opened[file].keys():
        raise ValueError(f"{directory / file} has no tensor {name}")
  return {name: file for file in opened.values() for name in file.keys()}


def _open_one(file: pathlib.Path) -> Any:
  """Opens a safetensors file, which checks its header against its length."""
  safetensors = require("safetensors", "train")
  if not file.is_file():
    raise ValueError(f"{file} is missing though {_INDEX} lists it")
  try:
    return safetensors.safe_open(file, framework="np")
  except safetensors.SafetensorError as error:
    raise ValueError(
        f"{file} is truncated or corrupt ({file.stat().st_size} bytes; "
        f"{error}): fetch it again"
    ) from error


def _check_rest(
    directory: pathlib.Path,
    config: DecoderConfig,
    params: dict[str, Any],
    tensors: Mapping[str, Any],
) -> None:
  """Refuses tensors that were not read, except copies of others."""
  rest = set(tensors)
  # Old exports store these buffers, which follow from rope_theta.
  rest -= {name for name in rest if name.endswith(".rotary_emb.inv_freq")}
  head = _NAMES["lm_head/kernel"]
  if config.tied_head and head in rest:
    value = tensors[head].get_tensor(head).astype(config.param_dtype)
    if not np.array_equal(value, params["embed"]["embedding"]):
      raise ValueError(
          f"{head} in {directory} differs from the embedding although "
          "config.json says tie_word_embeddings: set it to false to use both"
      )
    rest.remove(head)
  if rest:
    raise ValueError(
        f"{directory} has tensors that a {config.family} decoder does not "
        f"use: {', '.join(sorted(rest))}"
    )


def save_description(
    directory: str | pathlib.Path,
    config: DecoderConfig,
    tokenizer: Tokenizer,
    dtype: DTypeLike,
) -> None:
  """Writes everything of a model except its weights.

  Replaces an earlier description in the directory. Each file appears under its
  name only when complete, `config.json` last.

  Args:
    directory: Created if it does not exist.
    config: The decoder's configuration.
    tokenizer: The model's tokenizer, with its chat template.
    dtype: Dtype of the weights that the description belongs to.

  Raises:
    ValueError: If the family is unknown, or cannot have the configuration.
    OSError: If the directory cannot be written.
  """
  fields = _config_fields(config, tokenizer, dtype)
  eos_ids = list(tokenizer.eos_ids)
  generation = {"eos_token_id": eos_ids, "pad_token_id": tokenizer.pad_id}
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  # Written next to the destination: a rename is atomic only within one disk.
  with tempfile.TemporaryDirectory(prefix=".new-", dir=directory) as folder:
    new = pathlib.Path(folder)
    tokenizer.save(new)
    _dump(new / "generation_config.json", generation)
    _dump(new / "config.json", fields)
    for name in _OVERRIDES:
      (directory / name).unlink(missing_ok=True)
    names = [file.name for file in new.iterdir()]
    for name in sorted(names, key="config.json".__eq__):
      os.replace(new / name, directory / name)


def save(
    directory: str | pathlib.Path,
    config: DecoderConfig,
    params: dict[str, Any],
    tokenizer: Tokenizer,
    *,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
  """Saves a model as a directory that `transformers` and `load` can read.

  Replaces an earlier model in the directory.

  Args:
    directory: Created if it does not exist.
    config: The decoder's configuration.
    params: Parameters of `Decoder(config)`.
    tokenizer: The model's tokenizer.
    dtype: Dtype of the weights in the files, for example `"bfloat16"`; None
      keeps that of the parameters.
    max_shard_bytes: Weights larger than this are split over several files.

  Raises:
    ValueError: If `params` are not those of `Decoder(config)`, or if the family
      is unknown or cannot have the configuration.
    OSError: If the directory cannot be written.
  """
  stored = dtype or params["embed"]["embedding"].dtype
  # Refuses an unknown family before anything is changed.
  _config_fields(config, tokenizer, stored)
  shards, total = _plan(config, params, dtype, max_shard_bytes)
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  for old in (*directory.glob("model*.safetensors"), directory / _INDEX):
    old.unlink(missing_ok=True)
  save_description(directory, config, tokenizer, stored)
  save_file = require("safetensors.numpy", "train").save_file
  weight_map = {}
  for number, shard in enumerate(shards, 1):
    file = _WEIGHTS
    if len(shards) > 1:
      file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
    arrays = {name: value() for name, value in shard.items()}
    save_file(arrays, directory / file, metadata={"format": "pt"})
    # The package makes its files readable by their owner only.
    (directory / file).chmod((directory / "config.json").stat().st_mode)
    weight_map.update(dict.fromkeys(shard, file))
  if len(shards) > 1:
    metadata = {"total_size": total}
    index = {"metadata": metadata, "weight_map": weight_map}
    _dump(directory / _INDEX, index)


def _plan(
    config: DecoderConfig,
    params: dict[str, Any],
    dtype: DTypeLike | None,
    max_shard_bytes: int,
) -> tuple[list[_Shard], int]:
  """Divides the tensors into shards; also returns their total bytes."""

  def fetch(path, layer, value):
    def run():
      array = np.asarray(value if layer is None else value[layer])
      array = array.astype(dtype or value.dtype)
      return np.ascontiguousarray(array.T if path[-1] == "kernel" else array)

    return run

  shards: list[_Shard] = [{}]
  size = total = 0
  for path, layer, value in stacking.unstack(config, params):
    n_items = value.size if layer is None else value.size // config.n_layers
    n_bytes = n_items * jnp.dtype(dtype or value.dtype).itemsize
    if shards[-1] and size + n_bytes > max_shard_bytes:
      shards.append({})
      size = 0
    name = _NAMES["/".join(path)].format(layer)
    shards[-1][name] = fetch(path, layer, value)
    size, total = size + n_bytes, total + n_bytes
  return shards, total


def _config_fields(
    config: DecoderConfig, tokenizer: Tokenizer, dtype: DTypeLike
) -> dict[str, Any]:
  """Returns the content of config.json, in fields that all releases read."""
  architectures = {family: name for name, family in _FAMILIES.items()}
  if config.family not in architectures:
    raise ValueError(
        f"family must be one of {', '.join(architectures)}, got "
        f"{config.family!r}"
    )
  traits = (config.qkv_bias, config.qk_norm)
  if traits != (config.family == "qwen2", config.family == "qwen3"):
    raise ValueError(
        f"family {config.family!r} cannot be written with "
        f"qkv_bias={config.qkv_bias} and qk_norm={config.qk_norm}"
    )
  fields: dict[str, Any] = {
      "architectures": [architectures[config.family]],
      "attention_bias": False,
      "eos_token_id": tokenizer.eos_ids[0],
      "head_dim": config.head_dim,
      "hidden_act": "silu",
      "hidden_size": config.d_model,
      "intermediate_size": config.d_ff,
      "max_position_embeddings": config.max_length,
      "model_type": config.family,
      "num_attention_heads": config.n_heads,
      "num_hidden_layers": config.n_layers,
      "num_key_value_heads": config.n_kv_heads,
      "pad_token_id": tokenizer.pad_id,
      "rms_norm_eps": config.norm_eps,
      "rope_scaling": None,
      "rope_theta": config.rope_theta,
      "tie_word_embeddings": config.tied_head,
      "torch_dtype": jnp.dtype(dtype).name,
      "use_sliding_window": False,
      "vocab_size": config.vocab_size,
  }
  scaling = config.rope_scaling
  if scaling is not None:
    fields["rope_scaling"] = {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_length,
    }
  if config.family == "qwen2":
    del fields["attention_bias"]  # Always biased; the field does not exist.
  return fields


def _dump(file: pathlib.Path, content: Mapping[str, Any]) -> None:
  """Writes a JSON file."""
  file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
