"""A model of a few thousand random parameters, for tests and first steps."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from experiments import _optional
from experiments.models import decoder, tokenizer
from experiments.models.pretrained import Pretrained


def make_tiny(seed: int) -> Pretrained:
  """A random two-layer decoder that reads digits, `+` and unknown words.

  With so few words, random completions are right often enough for rewards to
  differ within a group, so that it learns from its first update on.

  Args:
    seed: of the parameters.

  Returns:
    Configuration, parameters and tokenizer.
  """
  words = ["<pad>", "<eos>", "<unk>", "+", *"0123456789"]
  config = decoder.DecoderConfig(
      vocab_size=len(words),
      d_model=32,
      n_layers=2,
      n_heads=4,
      n_kv_heads=2,
      head_dim=8,
      d_ff=64,
      tied_head=True,
      max_length=64,
  )
  init = jax.jit(decoder.Decoder(config).init)
  tokens = jnp.zeros((1, 1), jnp.int32)
  template = "{% for message in messages %}{{ message.content }}{% endfor %}"
  params = init(jax.random.key(seed), tokens)["params"]
  return Pretrained(config, params, make_tokenizer(words, template))


def make_tokenizer(words: Sequence[str], template: str) -> tokenizer.Tokenizer:
  """One token a word, one a digit.

  Args:
    words: the vocabulary; has `<pad>`, `<eos>` and `<unk>`.
    template: of chats.
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
  backend.decoder = lib.decoders.Fuse()  # Digits are written together.
  backend.add_special_tokens(["<pad>", "<eos>"])
  settings = {
      "pad_token": "<pad>",
      "eos_token": "<eos>",
      "unk_token": "<unk>",
      "chat_template": template,
  }
  return tokenizer.Tokenizer(backend, settings)
