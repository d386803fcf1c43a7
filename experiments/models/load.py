"""A pretrained model from a path: the one way in."""

import pathlib
from typing import NamedTuple

from jax.typing import DTypeLike

from experiments.models.decoder import DecoderConfig
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


def load(
    path: str | pathlib.Path, param_dtype: DTypeLike = "float32"
) -> Pretrained:
  """Loads a model.

  Args:
    path: a Hugging Face directory, or a `.gguf` file.
    param_dtype: dtype of the parameters, whatever the file's own.

  Returns:
    Configuration, parameters and tokenizer. To change how the model runs,
    `dataclasses.replace(config, dtype="bfloat16", remat=True)`.

  Raises:
    FileNotFoundError: if nothing is at `path`.
    ValueError: if what is there is not a complete model of a known
      architecture, or its tokenizer has ids without an embedding; names what
      is wrong.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    # Imported here, since each needs a package that the other does not.
    from experiments.models import hf

    return Pretrained(*hf.load(path, param_dtype))
  if not path.exists():
    raise FileNotFoundError(
        f"no model at {path}: give a Hugging Face directory or a .gguf file"
    )
  if path.suffix != ".gguf":
    raise ValueError(
        f"{path} is neither a Hugging Face directory nor a .gguf file"
    )
  from experiments.models import gguf

  return Pretrained(*gguf.load(path, param_dtype))
