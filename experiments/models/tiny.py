"""A random model of a few thousand parameters, for tests and first steps."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from experiments import _optional
from experiments.models.config import DecoderConfig
from experiments.models.decoder import Decoder
from experiments.models.pretrained import Pretrained
from experiments.models.tokenizer import Tokenizer

_WORDS = ("<pad>", "<eos>", "<unk>", "+", *"0123456789")
_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"

# The configuration of the tiny model. Other small ones are derived from it.
CONFIG = DecoderConfig(
    vocab_size=len(_WORDS),
    d_model=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    d_ff=64,
    tied_head=True,
    max_length=64,
)


def make_tiny(seed: int) -> Pretrained:
  """Makes a random two-layer decoder that reads digits, `+` and unknown words.

  With so few words, random completions are right often enough for rewards to
  differ within a group, so the model learns from its first update on.

  Args:
    seed: Random seed of the parameters.

  Returns:
    Configuration, parameters and tokenizer.
  """
  init = jax.jit(Decoder(CONFIG).init)
  params = init(jax.random.key(seed), jnp.zeros((1, 1), jnp.int32))["params"]
  return Pretrained(CONFIG, params, make_tokenizer(_WORDS, _TEMPLATE))


def make_tokenizer(words: Sequence[str], template: str) -> Tokenizer:
  """Makes a tokenizer with one token per word and one per digit.

  Args:
    words: The vocabulary; must contain `<pad>`, `<eos>` and `<unk>`.
    template: The chat template.

  Returns:
    The tokenizer. It joins decoded tokens without spaces.
  """
  lib = _optional.require("tokenizers", "train")
  backend = lib.Tokenizer(
      lib.models.WordLevel(
          {word: i for i, word in enumerate(words)}, unk_token="<unk>"
      )
  )
  backend.pre_tokenizer = lib.pre_tokenizers.Sequence(
      [
          lib.pre_tokenizers.WhitespaceSplit(),
          lib.pre_tokenizers.Digits(individual_digits=True),
          lib.pre_tokenizers.Punctuation(),
      ]
  )
  backend.decoder = lib.decoders.Fuse()  # Joins the digits of a number.
  backend.add_special_tokens(["<pad>", "<eos>"])
  settings = {
      "pad_token": "<pad>",
      "eos_token": "<eos>",
      "unk_token": "<unk>",
      "chat_template": template,
  }
  return Tokenizer(backend, settings)
