"""A loaded model: configuration, parameters and tokenizer."""

from typing import Any, NamedTuple

from experiments.models.config import DecoderConfig
from experiments.models.tokenizer import Tokenizer


class Pretrained(NamedTuple):
  """A loaded model.

  Attributes:
    config: The decoder's configuration.
    params: Parameters of `Decoder(config)`, a nested dict of JAX arrays.
    tokenizer: The model's tokenizer, with its chat template.
  """

  config: DecoderConfig
  params: dict[str, Any]
  tokenizer: Tokenizer
