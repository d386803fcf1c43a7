"""Dense GRPO gradients at points of a training run, for studies of them.

A `GradientSource` trains the run of a config up to a point, samples batches
there and differentiates the learner's own loss with respect to the seven
projections (the targets of sketches), all as in `experiments.train`. It keeps
what it made in a folder, so that several studies use the same gradients and an
interrupted study continues.

Weights, gradients and directions of a step are dicts from the path of a target
to its array, `[n_layers, d_in, d_out]` float32.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import os
import pathlib
import re
import shutil
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from experiments import tasks
from experiments.evaluation import heldout
from experiments.learning import (
    batches,
    compiled_step,
    losses,
    packing,
    train_step,
)
from experiments.learning.batches import BatchSettings
from experiments.learning.train_step import UpdateSettings
from experiments.models import decoder
from experiments.models import load as load_lib
from experiments.parallel import sharding
from experiments.rollouts import engine
from experiments.rollouts.rollout import Rollout
from experiments.runs import check_config, collect, progress, workdir
import logra_jax

# By path of a target, `[n_layers, d_in, d_out]` float32.
TargetArrays = dict[str, np.ndarray]

# Batch 0 of a point has the prompts and the random key of this update of the
# run, which is beyond the last update that the run itself reaches.
_FIRST_BATCH = 1000


def targets_of(params: chex.ArrayTree) -> dict[str, Any]:
  """Returns the seven projections of a parameter tree, by path."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  named = {sharding.path_of(key_path): x for key_path, x in leaves}
  wanted = logra_jax.DEFAULT_TARGETS
  return {path: x for path, x in named.items() if re.fullmatch(wanted, path)}


def with_targets(
    params: chex.ArrayTree, targets: Mapping[str, Any]
) -> chex.ArrayTree:
  """Replaces leaves of a parameter tree by those of `targets`, by path."""

  def replace(key_path, leaf):
    return targets.get(sharding.path_of(key_path), leaf)

  return jax.tree_util.tree_map_with_path(replace, params)


def module_type(path: str) -> str:
  """Returns the name of a module, `q_proj` of `layers/attn/q_proj/kernel`."""
  return path.split("/")[-2]


def inner_product(a: TargetArrays, b: TargetArrays) -> float:
  """Returns the inner product over all targets.

  It is float32 within a target, and float64 from one target to the next.
  """
  return float(sum(np.vdot(a[path], b[path]).astype(np.float64) for path in a))


class SampledBatch(NamedTuple):
  """The responses of a batch and their advantages, as NumPy arrays.

  Attributes:
    rollout: Prompts and responses, `[B, T]` arrays.
    advantages: `[B]` float32.
  """

  rollout: Rollout
  advantages: np.ndarray


class _ModelOfTargets:
  """The model as a function of its targets; all other parameters are fixed.

  Differentiating through a fixed head is cheaper.
  """

  def __init__(self, model: decoder.Decoder, params: chex.ArrayTree):
    self._model, self._params = model, params

  def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
    params = with_targets(self._params, variables["params"])
    return self._model.apply({"params": params}, *args, **kwargs)


def gradient_fn(
    model: decoder.Decoder, config: ml_collections.ConfigDict
) -> Callable[[chex.ArrayTree, train_step.Batch], dict[str, jax.Array]]:
  """Makes the gradient function of the learner's loss.

  Args:
    model: The policy.
    config: Config of the run; its loss is differentiated.

  Returns:
    A jitted function of `(params, batch)`, which returns gradients by path.
  """
  settings = dataclasses.replace(UpdateSettings.of_config(config), budget=None)

  def keep(grads, state, params=None):
    del state, params
    return jax.tree.map(lambda _: None, grads), grads

  # In place of an optimizer: makes the gradients the new state, and no step.
  keeper = optax.with_extra_args_support(
      optax.GradientTransformation(lambda params: (), keep)
  )

  def gradients(params, batch):
    step = train_step.make_train_step(
        _ModelOfTargets(model, params), keeper, settings
    )
    state = train_step.TrainState(
        targets_of(params), (), jnp.zeros((), jnp.int32)
    )
    return step(state, batch)[0].opt_state

  return jax.jit(gradients)


def kl_fn(
    model: decoder.Decoder, config: ml_collections.ConfigDict
) -> Callable[[chex.ArrayTree, Rollout, int, TargetArrays], jax.Array]:
  """Makes a function that predicts the KL of a step by `logra_jax.kl_probe`.

  Args:
    model: The policy.
    config: Config of the run.

  Returns:
    A function of `(params, rollout, k, direction)`. Every k adjacent responses
    of the rollout have one prompt. The result is the KL of the step
    `direction`, which is not rescaled, in nats per generated token.
  """

  @jax.jit
  def predict(params, rows, direction):
    fixed = _ModelOfTargets(model, params)
    probe = logra_jax.kl_probe(
        lambda targets, x: packing.features(fixed, targets, x["rows"]),
        targets_of(params),
        (),  # There are no sketches, because the whole update is dense.
        {"rows": rows, "completion_mask": rows.target_mask},
        head_fn=lambda targets, hidden: fixed.apply(
            {"params": targets}, hidden, method="head"
        ),
        temperature=config.rollout.temperature,
        chunk_size=config.loss.chunk,
    )
    return probe(direction)

  def of_rollout(params, rollout, k, direction):
    rows = packing.all_rows(rollout, k, config.rollout.max_new_tokens)
    return predict(params, rows, direction)

  return of_rollout


def draw_bases(
    targets: Mapping[str, Any],
    rank: int,
    distribution: str,
    seed: int,
    count: int = 0,
) -> dict[str, np.ndarray]:
  """Draws the bases that the library uses in an update.

  Args:
    targets: The targets, or arrays of the same shapes, by path.
    rank: Number of rows of a basis; at most `d_in` are drawn.
    distribution: Distribution of the entries, see `logra_jax.sketch`.
    seed: Random seed, see `logra_jax.sketch`.
    count: Number of updates before this one.

  Returns:
    Bases `[n_layers, rank, d_in]` by path.
  """
  tx = logra_jax.sketch(rank, distribution=distribution, seed=seed)
  state = tx.init(dict(targets))
  keys = state.keys(jnp.int32(count))
  return {t.path: np.asarray(t.basis(keys[t.path])) for t in state.plan.targets}


def first_responses(
    batch: SampledBatch, group_size: int, prompts: int, responses: int
) -> Rollout:
  """Returns the first responses to the first prompts of a batch.

  Args:
    batch: The batch.
    group_size: Number of responses to each prompt in the batch.
    prompts: Number of prompts to take.
    responses: Number of responses to take of each prompt.

  Returns:
    A rollout of `prompts * responses` responses; those to a prompt are
    adjacent.
  """
  rows = np.arange(prompts * group_size).reshape(prompts, group_size)
  rows = rows[:, :responses]
  return jax.tree.map(lambda x: x[rows.reshape(-1)], batch.rollout)


class GradientSource:
  """Batches and dense gradients at points of one run.

  Attributes:
    config: Config of the run.
    folder: Directory that keeps what was made.
    model: The policy.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      folder: str | os.PathLike[str],
      points: Sequence[int],
      prompts: int,
  ):
    """Loads the model, and trains the run unless the folder has all points.

    Args:
      config: A config like `configs/quickstart.py`, for one device.
      folder: Directory that keeps points, batches and gradients. Each config
        needs its own.
      points: Numbers of updates after which batches are sampled, ascending.
      prompts: Number of prompts of a batch, at most that of an update. Each has
        `config.rollout.responses` responses.

    Raises:
      ValueError: If a setting cannot work, or the folder belongs to another
        config.
      FileNotFoundError: If there is no model.
    """
    check_config.check_config(config)
    if not 1 <= prompts <= config.rollout.prompts:
      raise ValueError(
          f"prompts={prompts} must be between 1 and"
          f" config.rollout.prompts={config.rollout.prompts}"
      )
    self.config = config
    self.folder = workdir.claim(folder, config)
    loaded = load_lib.for_run(config)
    self.model = decoder.Decoder(loaded.config)
    self._prompts = prompts
    self._initial = loaded.params
    self._tokenizer = loaded.tokenizer
    self._task = tasks.make_task(config.task.name, config.task.seed)
    self._gradient = gradient_fn(self.model, config)
    if not all((self._point(point) / "params").exists() for point in points):
      self._train(points)

  def params(self, update: int) -> chex.ArrayTree:
    """Returns the parameters after `update` updates, which is one of points."""
    targets = load_arrays(self._point(update) / "params")
    arrays = {path: jnp.asarray(x) for path, x in targets.items()}
    return with_targets(self._initial, arrays)

  def batch(
      self, params: chex.ArrayTree, update: int, index: int
  ) -> SampledBatch:
    """Samples or reads a batch of prompts that the run has not seen.

    Args:
      params: The parameters at the point.
      update: Number of updates before the point.
      index: Index of the batch from 0, which decides its prompts. They are the
        same at every point.
    """
    folder = self._point(update) / f"batch-{index:02d}"
    names = ("tokens", "valid", "completion_mask", "log_probs", "finished")
    if not folder.exists():
      sampled = self._sample(params, _FIRST_BATCH + index, self._prompts)
      arrays = {name: vars(sampled.rollout)[name] for name in names}
      save_arrays(folder, {**arrays, "advantages": sampled.advantages})
    arrays = load_arrays(folder)
    rollout = Rollout(**{name: arrays[name] for name in names})
    return SampledBatch(rollout, arrays["advantages"])

  def gradient(
      self, params: chex.ArrayTree, update: int, index: int
  ) -> TargetArrays:
    """Computes or reads the dense gradient of the loss of one batch.

    Args:
      params: The parameters at the point.
      update: Number of updates before the point.
      index: Index of the batch, as in `batch`.
    """
    folder = self._point(update) / f"gradient-{index:02d}"
    if not folder.exists():
      batch = self.learner_batch(self.batch(params, update, index))
      save_arrays(folder, self._gradient(params, batch))
    return load_arrays(folder)

  def gradients_of(
      self, params: chex.ArrayTree, update: int, batches: int, path: str
  ) -> list[np.ndarray]:
    """Returns the gradients of one target for the first batches at a point.

    Args:
      params: The parameters at the point.
      update: Number of updates before the point.
      batches: Number of batches.
      path: Path of the target.

    Returns:
      One array `[n_layers, d_in, d_out]` per batch.
    """
    arrays = []
    for index in range(batches):
      folder = self._point(update) / f"gradient-{index:02d}"
      if not folder.exists():
        self.gradient(params, update, index)
      arrays.append(np.load(folder / _file(path)))
    return arrays

  def learner_batch(self, batch: SampledBatch) -> train_step.Batch:
    """Packs a batch of any number of prompts into what the learner reads."""
    settings = BatchSettings.of_config(self.config)
    responses = len(batch.advantages)
    settings = dataclasses.replace(
        settings,
        prompts=responses // settings.responses,
        probe_responses=min(settings.probe_responses, responses),
    )
    packed, _ = batches.make_batch(settings, *batch)
    return packed

  def _point(self, update: int) -> pathlib.Path:
    return self.folder / f"point-{update:02d}"

  def _train(self, points: Sequence[int]) -> None:
    """Trains up to the last point, and writes the weights at each point."""
    config = self.config
    settings = UpdateSettings.of_config(config)
    tx = settings.make_optimizer()
    mesh = sharding.make_mesh(config.mesh)
    # The state is donated, but the loaded parameters are needed later.
    params = jax.tree.map(jnp.copy, self._initial)
    state = compiled_step.init_state(settings.optimizer, params, tx, mesh)
    step = compiled_step.jit_update(self.model, tx, settings, state, mesh)
    for update in range(points[-1] + 1):
      if update in points:
        folder = self._point(update) / "params"
        save_arrays(folder, targets_of(state.params))
      if update < points[-1]:
        batch = self._sample(state.params, update, config.rollout.prompts)
        with jax.set_mesh(mesh):
          state, _ = step(state, self.learner_batch(batch))

  def _sample(
      self, params: chex.ArrayTree, update: int, prompts: int
  ) -> SampledBatch:
    """Samples responses to the first prompts of an update of the run."""
    config, rollout_config = self.config, self.config.rollout
    first = update * rollout_config.prompts
    examples = [self._task.train(first + i) for i in range(prompts)]
    sampler = engine.make_sampler(
        engine.EngineSettings.of_config(rollout_config),
        self.model,
        params,
        self._tokenizer,
        self.folder,
    )
    settings = collect.CollectSettings.of_config(config)
    rollout = collect.sample(
        settings, sampler, self._tokenizer, examples, update
    )
    _, rewards = heldout.score(self._task, self._tokenizer, examples, rollout)
    progress.say(f"batch of update {update}: reward {np.mean(rewards):.3f}")
    advantages_of = losses.LOSSES[config.loss.name].advantages
    advantages = advantages_of(rewards, rollout_config.responses)
    return SampledBatch(rollout, np.asarray(advantages))


def save_arrays(folder: pathlib.Path, arrays: Mapping[str, Any]) -> None:
  """Writes arrays by name to a folder, which appears only when complete."""
  temporary = folder.with_name(f".{folder.name}")
  shutil.rmtree(temporary, ignore_errors=True)
  temporary.mkdir(parents=True)
  for name, x in arrays.items():
    np.save(temporary / _file(name), np.asarray(x))
  os.replace(temporary, folder)


def load_arrays(folder: pathlib.Path) -> dict[str, np.ndarray]:
  """Reads the arrays that `save_arrays` wrote, by name."""
  files = sorted(folder.glob("*.npy"))
  return {file.stem.replace(".", "/"): np.load(file) for file in files}


def _file(name: str) -> str:
  return f"{name.replace('/', '.')}.npy"
