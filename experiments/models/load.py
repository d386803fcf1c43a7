"""Loads a model from a path, or the one that a training config names."""

import dataclasses
import pathlib

from jax.typing import DTypeLike
import ml_collections

from experiments.models import gguf, hf, tiny
from experiments.models.config import DecoderConfig
from experiments.models.pretrained import Pretrained


def from_path(
    path: str | pathlib.Path, param_dtype: DTypeLike = "float32"
) -> Pretrained:
  """Loads a model.

  Args:
    path: A Hugging Face directory, or a `.gguf` file.
    param_dtype: Dtype of the parameters, whatever it is in the file.

  Returns:
    Configuration, parameters and tokenizer. To change how the model runs, use
    `dataclasses.replace(config, dtype="bfloat16", remat=True)`.

  Raises:
    FileNotFoundError: If nothing is at `path`.
    ValueError: If `path` is not a complete model of a known architecture, or
      if its tokenizer has ids without an embedding.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    return Pretrained(*hf.load(path, param_dtype))
  if not path.exists():
    raise FileNotFoundError(
        f"no model at {path}: give a Hugging Face directory or a .gguf file"
    )
  if path.suffix != ".gguf":
    raise ValueError(
        f"{path} is neither a Hugging Face directory nor a .gguf file"
    )
  return Pretrained(*gguf.load(path, param_dtype))


def for_run(config: ml_collections.ConfigDict) -> Pretrained:
  """Loads the model that `config.model` names, with the config's settings.

  Args:
    config: A config like `configs/quickstart.py`. The model `"tiny"` is made
      from `config.seed`; any other name is a path, see `from_path`.

  Returns:
    Configuration (see `configure`), parameters and tokenizer.

  Raises:
    FileNotFoundError: If nothing is at that path.
    ValueError: If the path is not a complete model.
  """
  if config.model == "tiny":
    loaded = tiny.make_tiny(config.seed)
  else:
    loaded = from_path(config.model, config.param_dtype)
  return loaded._replace(config=configure(loaded.config, config))


def configure(
    architecture: DecoderConfig, config: ml_collections.ConfigDict
) -> DecoderConfig:
  """Sets dtypes, recomputation and block sizes of an architecture.

  Args:
    architecture: A decoder's configuration.
    config: A config like `configs/quickstart.py`.

  Returns:
    The architecture with the config's settings.
  """
  return dataclasses.replace(
      architecture,
      dtype=config.dtype,
      param_dtype=config.param_dtype,
      remat=config.remat,
      attention_block=config.attention_block or None,
      token_block=config.token_block or None,
  )
