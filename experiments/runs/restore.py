"""What a run keeps of its model, and a model from anything that holds one."""

import os
import pathlib
import shutil
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from experiments.learning import optimizers
from experiments.learning.train_step import UpdateSettings
from experiments.models import hf, load, lora
from experiments.models.config import DecoderConfig
from experiments.models.decoder import Decoder
from experiments.models.pretrained import Pretrained
from experiments.parallel import processes, sharding
from experiments.runs import checkpoints, progress
from experiments.runs import workdir as workdir_lib


class Restored(NamedTuple):
  """The model of a run.

  Attributes:
    update: Number of updates that it has seen.
    model: Configuration, parameters (adapters merged) and tokenizer.
  """

  update: int
  model: Pretrained


def describe_model(path: pathlib.Path, loaded: Pretrained) -> None:
  """Keeps a run's model in its directory, but for the weights.

  With the weights of a checkpoint the run can then be exported, evaluated and
  served where its base model is not. The first process alone writes.

  Args:
    path: The run's directory.
    loaded: The model that the run begins with.
  """
  final = path / workdir_lib.MODEL
  if not processes.is_first_process() or final.exists():
    return
  temporary = path / f".{workdir_lib.MODEL}"
  shutil.rmtree(temporary, ignore_errors=True)  # Left by a killed start.
  hf.save_description(
      temporary, loaded.config, loaded.tokenizer, loaded.config.param_dtype
  )
  os.replace(temporary, final)


def load_any(
    path: str | pathlib.Path, param_dtype: DTypeLike = "float32"
) -> Pretrained:
  """Loads a model for sampling.

  Args:
    path: A Hugging Face directory, a `.gguf` file, or the `--workdir` of a
      training run, whose newest undamaged checkpoint is taken.
    param_dtype: Dtype of the parameters; a run keeps its own.

  Returns:
    Configuration, parameters and tokenizer.

  Raises:
    FileNotFoundError: If there is nothing at `path`.
    ValueError: If it is not a complete model, or a run without checkpoints.
  """
  if (pathlib.Path(path) / "checkpoints").is_dir():
    return load_run(path).model
  return load.from_path(path, param_dtype)


def load_run(workdir: str | pathlib.Path, best: bool = False) -> Restored:
  """Loads the model of a run from a checkpoint.

  Args:
    workdir: Directory of the run.
    best: Whether to take the checkpoint with the highest score instead of the
      newest undamaged one.

  Returns:
    The model, and the number of updates that it has seen.

  Raises:
    ValueError: If there is no run or no such checkpoint in `workdir`.
    checkpoints.CheckpointError: If the checkpoint is damaged.
  """
  config = workdir_lib.load_config(workdir)
  folder = pathlib.Path(workdir) / "checkpoints"
  saved = checkpoints.Checkpoints(folder)
  if not saved.updates():
    raise ValueError(
        f"{folder} holds no checkpoint yet; train until the first one"
        f" (config.checkpoint.every={config.checkpoint.every} updates)"
    )
  architecture, tokenizer = hf.load_description(
      pathlib.Path(workdir) / workdir_lib.MODEL
  )
  architecture = load.configure(architecture, config)
  update, arrays = _arrays(saved, folder, best)
  params = jax.tree_util.tree_map_with_path(
      lambda path, leaf: jnp.asarray(
          arrays[f"params/{sharding.path_of(path)}"], leaf.dtype
      ),
      _abstract_params(architecture, UpdateSettings.of_config(config)),
  )
  return Restored(
      update, Pretrained(architecture, lora.merge(params), tokenizer)
  )


def _abstract_params(
    architecture: DecoderConfig, settings: UpdateSettings
) -> chex.ArrayTree:
  """Shapes and dtypes of the parameters that the run trains."""

  def make():
    tokens = jnp.zeros((1, 1), jnp.int32)
    params = Decoder(architecture).init(jax.random.key(0), tokens)["params"]
    return optimizers.init_params(settings.optimizer, params)

  return jax.eval_shape(make)


def _arrays(saved, folder, best):
  """Update and arrays of the best or the newest undamaged checkpoint."""
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
