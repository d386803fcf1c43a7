"""A model from anything that holds one, a training run included."""

import pathlib
from typing import NamedTuple

import jax
from jax.typing import DTypeLike

from experiments import (
    checkpoints,
    learner,
    lora,
    optimizers,
    pretrained,
    train,
)
from experiments import workdir as workdir_lib


class Restored(NamedTuple):
  """A run's model.

  Attributes:
    update: updates that it has seen.
    model: configuration, parameters (adapters merged) and tokenizer.
  """

  update: int
  model: pretrained.Pretrained


def load_any(
    path: str | pathlib.Path, param_dtype: DTypeLike = "float32"
) -> pretrained.Pretrained:
  """Loads a model for sampling.

  Args:
    path: a Hugging Face directory, a `.gguf` file, or the `--workdir` of a
      training run, of which the newest whole checkpoint is taken.
    param_dtype: dtype of the parameters; a run keeps its own.

  Returns:
    Configuration, parameters and tokenizer.

  Raises:
    FileNotFoundError: if nothing is at `path`.
    ValueError: if what is there is not a complete model, or a run without
      checkpoints.
  """
  if (pathlib.Path(path) / "checkpoints").is_dir():
    return load_run(path).model
  return pretrained.load(path, param_dtype)


def load_run(workdir: str | pathlib.Path) -> Restored:
  """Loads the model of a run's newest whole checkpoint.

  Args:
    workdir: directory of a run.

  Returns:
    The model, and how many updates it has seen.

  Raises:
    ValueError: there is no run or no checkpoint in `workdir`.
  """
  config = workdir_lib.load_config(workdir)
  folder = pathlib.Path(workdir) / "checkpoints"
  saved = checkpoints.Checkpoints(folder)
  if not saved.updates():
    raise ValueError(
        f"{folder} holds no checkpoint yet; train until the first one"
        f" (config.checkpoint.every={config.checkpoint.every} updates)"
    )
  loaded = train.load_model(config)
  tx = optimizers.make_optimizer(config)

  def make_state(params):
    return learner.init_state(optimizers.init_params(config, params), tx)

  template = jax.eval_shape(make_state, loaded.params)
  restored = saved.restore(template)
  assert restored is not None  # There are checkpoints.
  update, state = restored
  return Restored(update, loaded._replace(params=lora.merge(state.params)))
