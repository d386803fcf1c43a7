"""Reads models, with their configuration and tokenizer, from GGUF files."""

from collections.abc import Mapping
import pathlib
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
import numpy as np

from experiments._optional import require
from experiments.models import stacking
from experiments.models import tokenizer as tokenizer_lib
from experiments.models.config import DecoderConfig
from experiments.models.tokenizer import Tokenizer

_FAMILIES = ("llama", "qwen2", "qwen3")

_NAMES = {
    "embed/embedding": "token_embd.weight",
    "norm/scale": "output_norm.weight",
    "lm_head/kernel": "output.weight",
    "layers/attn_norm/scale": "blk.{}.attn_norm.weight",
    "layers/mlp_norm/scale": "blk.{}.ffn_norm.weight",
    "layers/q_norm/scale": "blk.{}.attn_q_norm.weight",
    "layers/k_norm/scale": "blk.{}.attn_k_norm.weight",
    "layers/q_proj/kernel": "blk.{}.attn_q.weight",
    "layers/k_proj/kernel": "blk.{}.attn_k.weight",
    "layers/v_proj/kernel": "blk.{}.attn_v.weight",
    "layers/o_proj/kernel": "blk.{}.attn_output.weight",
    "layers/q_proj/bias": "blk.{}.attn_q.bias",
    "layers/k_proj/bias": "blk.{}.attn_k.bias",
    "layers/v_proj/bias": "blk.{}.attn_v.bias",
    "layers/gate_proj/kernel": "blk.{}.ffn_gate.weight",
    "layers/up_proj/kernel": "blk.{}.ffn_up.weight",
    "layers/down_proj/kernel": "blk.{}.ffn_down.weight",
}


class _Metadata(dict):
  """The metadata of a GGUF file; a missing key is an error that names it."""

  def __missing__(self, key: str) -> Any:
    raise ValueError(f"the GGUF file has no metadata key {key!r}")


def load(
    path: str | pathlib.Path, param_dtype: DTypeLike = "float32"
) -> tuple[DecoderConfig, dict[str, Any], Tokenizer]:
  """Loads a model from a GGUF file.

  Args:
    path: The file, in any quantisation that the `gguf` package can undo.
    param_dtype: Dtype of the parameters.

  Returns:
    Configuration, parameters (see `Decoder`) and tokenizer.

  Raises:
    FileNotFoundError: If there is no such file.
    ValueError: If the file is truncated or corrupt; if its architecture is
      unknown; if it lacks a tensor or has one that the model does not use; or
      if it has tokens without an embedding.
    ImportError: If the `gguf` package is not installed.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise FileNotFoundError(f"no GGUF file at {path}")
  metadata, tensors = read_file(path)
  config = _config(metadata, tensors, param_dtype)
  tokenizer = tokenizer_lib.from_gguf(metadata)
  tokenizer.check_fits(config.vocab_size, path)
  dequantize = require("gguf", "train").dequantize

  def read(param, layer):
    name = _NAMES["/".join(param)].format(layer)
    if name not in tensors:
      raise ValueError(f"{path} has no tensor {name}: incomplete model")
    tensor = tensors.pop(name)
    try:
      value = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
      raise ValueError(
          f"{name} in {path} is stored as {tensor.tensor_type.name}, which "
          "the gguf package cannot read"
      ) from error
    if config.family == "llama" and param[1] in ("q_proj", "k_proj"):
      value = _pair_halves(value, config.head_dim)
    # GGUF stores kernels as [d_out, d_in], in NumPy's order of axes.
    return name, value.T if param[-1] == "kernel" else value

  params = stacking.stack(config, read)
  if tensors:
    raise ValueError(
        f"{path} has tensors that a {config.family} decoder does not use: "
        f"{', '.join(sorted(tensors))}"
    )
  return config, params, tokenizer


def read_file(
    path: str | pathlib.Path,
) -> tuple[Mapping[str, Any], dict[str, Any]]:
  """Reads the metadata of a GGUF file, and its tensors as stored on disk.

  Args:
    path: The file.

  Returns:
    The metadata by key, and the `gguf` package's tensors by name.

  Raises:
    ValueError: If the file is truncated or corrupt.
    ImportError: If the `gguf` package is not installed.
  """
  path = pathlib.Path(path)
  reader_type = require("gguf", "train").GGUFReader
  try:
    reader = reader_type(path)
    metadata = _Metadata(
        {key: field.contents() for key, field in reader.fields.items()}
    )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
  # The error depends on where the file is truncated or corrupt.
  except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
    raise ValueError(
        f"{path} is truncated or is not a GGUF file "
        f"({path.stat().st_size} bytes): fetch it again"
    ) from error
  return metadata, tensors


def _config(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Any],
    param_dtype: DTypeLike,
) -> DecoderConfig:
  """Converts the file's metadata to the decoder's configuration."""
  family = metadata["general.architecture"]
  if family not in _FAMILIES:
    raise ValueError(
        f"unknown architecture {family!r} (known: {', '.join(_FAMILIES)})"
    )
  key = f"{family}.".__add__
  for name in metadata:
    if name.startswith(key("rope.scaling.")) and metadata[name] != "none":
      raise ValueError(
          f"{name}={metadata[name]!r} is not supported in a GGUF file: use "
          "the model's Hugging Face directory"
      )
  if "rope_freqs.weight" in tensors:
    raise ValueError(
        "the GGUF file stretches its rotary frequencies (rope_freqs.weight): "
        "use the model's Hugging Face directory"
    )
  n_heads = int(metadata[key("attention.head_count")])
  d_model = int(metadata[key("embedding_length")])
  has_head_dim = key("attention.key_length") in metadata
  return DecoderConfig(
      # The embedding can have more rows than there are tokens.
      vocab_size=int(tensors["token_embd.weight"].shape[1]),
      d_model=d_model,
      n_layers=int(metadata[key("block_count")]),
      n_heads=n_heads,
      n_kv_heads=int(metadata[key("attention.head_count_kv")]),
      head_dim=int(metadata[key("attention.key_length")])
      if has_head_dim
      else d_model // n_heads,
      d_ff=int(metadata[key("feed_forward_length")]),
      rope_theta=float(metadata[key("rope.freq_base")]),
      norm_eps=_short(metadata[key("attention.layer_norm_rms_epsilon")]),
      qkv_bias="blk.0.attn_q.bias" in tensors,
      qk_norm="blk.0.attn_q_norm.weight" in tensors,
      tied_head="output.weight" not in tensors,
      max_length=int(metadata[key("context_length")]),
      param_dtype=jnp.dtype(param_dtype).name,
      family=family,
  )


def _short(value: float) -> float:
  """Returns the shortest float of a float32: 1e-5 for 9.99999975e-06."""
  return float(np.format_float_scientific(np.float32(value)))


def _pair_halves(value: np.ndarray, head_dim: int) -> np.ndarray:
  """Undoes GGUF's row order of Llama's queries and keys.

  GGUF rotates neighbouring rows (2 i, 2 i + 1) of a head; the decoder rotates
  rows (i, i + head_dim / 2).

  Args:
    value: `[heads * head_dim, d_in]`.
    head_dim: Rows per head.

  Returns:
    The same rows in the decoder's order.
  """
  pairs = value.reshape(-1, head_dim // 2, 2, value.shape[-1])
  return pairs.swapaxes(1, 2).reshape(value.shape)
