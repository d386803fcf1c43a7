"""What a model needs to run: configuration, parameters and tokenizer."""

from typing import NamedTuple

from experiments.models.config import DecoderConfig
from experiments.models.tokenizer import Tokenizer


class Pretrained(NamedTuple):
  """What a model needs to run.

  Attributes:
    config: the decoder's configuration.
    params: parameters of `Decoder(config)`, a nested dict of jax arrays.
    tokenizer: the model's tokenizer and chat template.
  """

  config: DecoderConfig
  params: dict
  tokenizer: Tokenizer
