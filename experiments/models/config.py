"""The shapes and settings of a decoder."""

import dataclasses

from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Llama 3's rotary scaling, which stretches long wavelengths.

  A wavelength that fits into the original context `high_freq_factor` times or
  more is kept. One that fits `low_freq_factor` times or fewer is stretched by
  `factor`. Frequencies between the two are interpolated.

  Attributes:
    factor: How much long wavelengths are stretched.
    low_freq_factor: Turns within the original context, at or below which a
      wavelength is fully stretched.
    high_freq_factor: Turns at or above which a wavelength is kept.
    original_max_length: Length in tokens of the original context.
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_length: int


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
  """Shapes and settings of a `Decoder`; hashable.

  Attributes:
    vocab_size: Number of token ids, V.
    d_model: Features of the residual stream, D.
    n_layers: Number of layers.
    n_heads: Number of query heads.
    n_kv_heads: Number of key-value heads; divides `n_heads`.
    head_dim: Features per head, H; even.
    d_ff: Width of the gated feed-forward layer.
    rope_theta: Base of the rotary wavelengths.
    norm_eps: Added to the mean square in every RMS norm.
    qkv_bias: Whether the query, key and value projections have a bias.
    qk_norm: Whether queries and keys are RMS-normalised per head (Qwen3).
    tied_head: Whether the head is the transposed embedding.
    max_length: Longest sequence in tokens, padding included.
    dtype: Dtype of activations and products. Norm statistics, softmax and
      logits are always float32.
    param_dtype: Dtype in which `init` creates parameters.
    remat: Whether each layer is recomputed in the backward pass.
    attention_block: Number of queries whose scores are in memory at once, also
      in the backward pass; None means all of them.
    token_block: Number of tokens of each sequence that pass through a layer's
      projections at once; the backward pass recomputes each block. None means
      all of them.
    family: `'llama'`, `'qwen2'` or `'qwen3'`: the architecture to export as.
    rope_scaling: Llama 3's rotary scaling, or None.
  """

  vocab_size: int
  d_model: int
  n_layers: int
  n_heads: int
  n_kv_heads: int
  head_dim: int
  d_ff: int
  rope_theta: float = 10000.0
  norm_eps: float = 1e-6
  qkv_bias: bool = False
  qk_norm: bool = False
  tied_head: bool = False
  max_length: int = 2048
  dtype: DTypeLike = "float32"
  param_dtype: DTypeLike = "float32"
  remat: bool = False
  attention_block: int | None = None
  token_block: int | None = None
  family: str = "llama"
  rope_scaling: RopeScaling | None = None

  def __post_init__(self) -> None:
    sizes = (
        "vocab_size d_model n_layers n_heads n_kv_heads head_dim d_ff"
        " max_length"
    )
    for name in sizes.split():
      value = vars(self)[name]
      if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a positive int, got {value!r}")
    if self.n_heads % self.n_kv_heads:
      raise ValueError(
          f"n_kv_heads must divide n_heads={self.n_heads}, "
          f"got {self.n_kv_heads}"
      )
    for name in ("attention_block", "token_block"):
      block = vars(self)[name]
      if block is not None and (not isinstance(block, int) or block < 1):
        raise ValueError(
            f"{name} must be a positive int or None, got {block!r}"
        )
    if self.head_dim % 2:
      raise ValueError(f"head_dim must be even, got {self.head_dim}")

  def check_length(self, length: int) -> None:
    """Refuses sequences that are longer than the model supports.

    Args:
      length: Length of the sequences in tokens.

    Raises:
      ValueError: If `length` exceeds `max_length`.
    """
    if length > self.max_length:
      raise ValueError(
          f"sequence of {length} tokens is longer than "
          f"max_length={self.max_length}: shorten it, or load the model with "
          "a larger max_length"
      )
