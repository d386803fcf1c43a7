"""A model from anything that holds one, a training run included."""

import functools
import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from experiments.learning import optimizers
from experiments.models import load, lora
from experiments.models.pretrained import Pretrained
from experiments.parallel import sharding
from experiments.runs import checkpoints, progress
from experiments.runs import workdir as workdir_lib


class Restored(NamedTuple):
  """A run's model.

  Attributes:
    update: updates that it has seen.
    model: configuration, parameters (adapters merged) and tokenizer.
  """

  update: int
  model: Pretrained


def load_any(
    path: str | pathlib.Path, param_dtype: DTypeLike = "float32"
) -> Pretrained:
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
  return load.from_path(path, param_dtype)


def load_run(workdir: str | pathlib.Path, best: bool = False) -> Restored:
  """Loads the model of a checkpoint of a run.

  Args:
    workdir: directory of a run.
    best: whether to take the checkpoint with the highest score, and not the
      newest whole one.

  Returns:
    The model, and how many updates it has seen.

  Raises:
    ValueError: there is no run or no such checkpoint in `workdir`.
    checkpoints.CheckpointError: what is there is damaged.
  """
  config = workdir_lib.load_config(workdir)
  folder = pathlib.Path(workdir) / "checkpoints"
  saved = checkpoints.Checkpoints(folder)
  if not saved.updates():
    raise ValueError(
        f"{folder} holds no checkpoint yet; train until the first one"
        f" (config.checkpoint.every={config.checkpoint.every} updates)"
    )
  update, arrays = _arrays(saved, folder, best)
  loaded = load.for_run(config)
  template = jax.eval_shape(
      functools.partial(optimizers.init_params, config), loaded.params
  )
  params = jax.tree_util.tree_map_with_path(
      lambda path, leaf: jnp.asarray(
          arrays[f"params/{sharding.path_of(path)}"], leaf.dtype
      ),
      template,
  )
  return Restored(update, loaded._replace(params=lora.merge(params)))


def _arrays(saved, folder, best):
  """Update and arrays of the best, or of the newest whole checkpoint."""
  if best:
    found = saved.best()
    if found is None:
      raise ValueError(f"no checkpoint in {folder} has a score")
    return found[0], saved.load(found[0])
  *older, newest = saved.updates()
  for update in reversed(older):
    try:
      return newest, saved.load(newest)
    except checkpoints.CheckpointError as error:
      progress.say(f"{error}; falling back to the one before")
      newest = update
  return newest, saved.load(newest)
