"""Published architectures by name, without their weights.

Shapes are those of each model's config.json. Rotary and norm settings are those
of the Instruct checkpoints; base models can differ from them in `max_length`
and `norm_eps`, but not in a shape.
"""

import difflib
import os
import pathlib

from experiments.models import hf
from experiments.models.config import DecoderConfig, RopeScaling


def _qwen2(
    d_model: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    d_ff: int,
    *,
    tied_head: bool = False,
) -> DecoderConfig:
  """Qwen2.5: projections with biases; small models have a tied head."""
  return DecoderConfig(
      vocab_size=151936 if tied_head else 152064,
      d_model=d_model,
      n_layers=n_layers,
      n_heads=n_heads,
      n_kv_heads=n_kv_heads,
      head_dim=d_model // n_heads,
      d_ff=d_ff,
      rope_theta=1e6,
      norm_eps=1e-6,
      qkv_bias=True,
      tied_head=tied_head,
      max_length=32768,
      family="qwen2",
  )


def _qwen3(
    d_model: int,
    n_layers: int,
    n_heads: int,
    d_ff: int,
    *,
    tied_head: bool = False,
) -> DecoderConfig:
  """Qwen3 (dense): heads of 128 features, normalised queries and keys."""
  return DecoderConfig(
      vocab_size=151936,
      d_model=d_model,
      n_layers=n_layers,
      n_heads=n_heads,
      n_kv_heads=8,
      head_dim=128,
      d_ff=d_ff,
      rope_theta=1e6,
      norm_eps=1e-6,
      qk_norm=True,
      tied_head=tied_head,
      max_length=40960,
      family="qwen3",
  )


MODELS: dict[str, DecoderConfig] = {
    "smollm2-135m": DecoderConfig(
        vocab_size=49152,
        d_model=576,
        n_layers=30,
        n_heads=9,
        n_kv_heads=3,
        head_dim=64,
        d_ff=1536,
        rope_theta=1e5,
        norm_eps=1e-5,
        tied_head=True,
        max_length=8192,
        family="llama",
    ),
    "qwen2.5-0.5b": _qwen2(896, 24, 14, 2, 4864, tied_head=True),
    "qwen2.5-1.5b": _qwen2(1536, 28, 12, 2, 8960, tied_head=True),
    "qwen2.5-3b": _qwen2(2048, 36, 16, 2, 11008, tied_head=True),
    "qwen2.5-7b": _qwen2(3584, 28, 28, 4, 18944),
    "qwen2.5-14b": _qwen2(5120, 48, 40, 8, 13824),
    "qwen2.5-32b": _qwen2(5120, 64, 40, 8, 27648),
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied_head=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tied_head=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied_head=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288),
    "qwen3-14b": _qwen3(5120, 40, 40, 17408),
    "qwen3-32b": _qwen3(5120, 64, 64, 25600),
    "llama-3.1-8b": DecoderConfig(
        vocab_size=128256,
        d_model=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        d_ff=14336,
        rope_theta=5e5,
        norm_eps=1e-5,
        max_length=131072,
        family="llama",
        rope_scaling=RopeScaling(
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_length=8192,
        ),
    ),
}


def architecture(name: str | os.PathLike[str]) -> DecoderConfig:
  """Returns the architecture of a known model, or of one in a directory.

  Args:
    name: A key of `MODELS`, in upper or lower case, or a Hugging Face
      directory. Only `config.json` of the directory is read.

  Returns:
    The configuration, with the default dtypes of `DecoderConfig`.

  Raises:
    ValueError: If the name is unknown (similar ones are listed), or if the
      directory's `config.json` is missing or not supported.
  """
  text = os.fspath(name)
  if text.lower() in MODELS:
    return MODELS[text.lower()]
  if pathlib.Path(text).is_dir():
    return hf.read_config(text)
  near = difflib.get_close_matches(text.lower(), MODELS, n=3, cutoff=0.5)
  hint = f"did you mean {' or '.join(near)}? " if near else ""
  raise ValueError(
      f"model={text!r} is neither a directory nor a known model: {hint}Known:"
      f" {', '.join(MODELS)}"
  )


def n_params(config: DecoderConfig) -> int:
  """Returns the number of parameters; a tied head is counted once."""
  d_model, head_dim = config.d_model, config.head_dim
  q, kv = config.n_heads * head_dim, config.n_kv_heads * head_dim
  attention = 2 * d_model * q + 2 * d_model * kv
  biases = (q + 2 * kv) * config.qkv_bias
  norms = 2 * d_model + 2 * head_dim * config.qk_norm
  layer = attention + biases + norms + 3 * d_model * config.d_ff
  embeddings = (1 if config.tied_head else 2) * config.vocab_size * d_model
  return config.n_layers * layer + embeddings + d_model
