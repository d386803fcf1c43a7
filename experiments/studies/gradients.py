"""Dense GRPO gradients at points of a training run, for experiments on them.

A `Source` trains the run of a config up to a point, samples batches there and
differentiates the learner's own loss by the seven projections, all as in
`experiments.train`. What it made is kept in a folder, so that several
experiments see the same gradients, and an interrupted one goes on.

Arrays of the projections are a dict by path, `[n_layers, d_in, d_out]` float32:
weights, gradients, and directions of a step.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import os
import pathlib
import re
import shutil
from typing import Any, NamedTuple

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

Arrays = dict[str, np.ndarray]

# Batch 0 of a point has the prompts and the random key of this update of the
# run: none that the run itself has seen.
_FIRST = 1000


def split(params: Any) -> dict[str, Any]:
  """The seven projections' leaves of a parameter tree, by path."""
  leaves = jax.tree_util.tree_leaves_with_path(params)
  named = {sharding.path_of(key_path): x for key_path, x in leaves}
  wanted = logra_jax.DEFAULT_TARGETS
  return {path: x for path, x in named.items() if re.fullmatch(wanted, path)}


def join(params: Any, targets: dict[str, Any]) -> Any:
  """`params` with what `split` gives of it replaced by `targets`."""

  def one(key_path, leaf):
    return targets.get(sharding.path_of(key_path), leaf)

  return jax.tree_util.tree_map_with_path(one, params)


def module_type(path: str) -> str:
  """`q_proj` of `layers/attn/q_proj/kernel`."""
  return path.split("/")[-2]


def inner(a: Arrays, b: Arrays) -> float:
  """The inner product over all projections, summed in blocks of float32."""
  return float(sum(np.vdot(a[path], b[path]).astype(np.float64) for path in a))


class Drawn(NamedTuple):
  """A rollout as NumPy arrays, and the advantages of its responses, `[B]`."""

  rollout: Rollout
  advantages: np.ndarray


class _OfTargets:
  """The model as a function of its projections alone; all else is fixed.

  A frozen head is cheaper to differentiate through.
  """

  def __init__(self, model: decoder.Decoder, params: Any):
    self._model, self._params = model, params

  def apply(self, variables: Any, *args: Any, **kwargs: Any) -> Any:
    params = join(self._params, variables["params"])
    return self._model.apply({"params": params}, *args, **kwargs)


def gradient_fn(
    model: decoder.Decoder, config: ml_collections.ConfigDict
) -> Callable[[Any, train_step.Batch], dict[str, jax.Array]]:
  """`(params, batch) -> gradients by path`, of the learner's loss; jitted."""
  settings = dataclasses.replace(UpdateSettings.of_config(config), budget=None)

  def keep(grads, state, params=None):
    del state, params
    return jax.tree.map(lambda _: None, grads), grads

  # The learner's update, with gradients for its new state and no step.
  keeper = optax.with_extra_args_support(
      optax.GradientTransformation(lambda params: (), keep)
  )

  def gradients(params, batch):
    step = train_step.make_train_step(
        _OfTargets(model, params), keeper, settings
    )
    state = train_step.TrainState(split(params), (), jnp.zeros((), jnp.int32))
    return step(state, batch)[0].opt_state

  return jax.jit(gradients)


def kl_fn(
    model: decoder.Decoder, config: ml_collections.ConfigDict
) -> Callable[[Any, Rollout, int, Arrays], jax.Array]:
  """`(params, rollout, k, direction) -> KL` by `logra_jax.kl_probe`.

  The KL is that of a step of the direction's own size, in nats per generated
  token of the rollout, whose every k adjacent responses have one prompt.
  """

  @jax.jit
  def predict(params, rows, direction):
    fixed = _OfTargets(model, params)
    probe = logra_jax.kl_probe(
        lambda targets, x: packing.features(fixed, targets, x["rows"]),
        split(params),
        (),  # No sketches: the whole update is dense.
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


def bases(
    shapes: Mapping[str, Any],
    rank: int,
    distribution: str,
    seed: int,
    count: int = 0,
) -> Arrays:
  """The library's bases of an update, `[n_layers, rank, d_in]` by path.

  Args:
    shapes: the projections, or arrays like them.
    rank: at most `d_in` rows are drawn.
    distribution: as for `logra_jax.sketch`.
    seed: likewise.
    count: which update's.
  """
  tx = logra_jax.sketch(rank, distribution=distribution, seed=seed)
  state = tx.init(dict(shapes))
  keys = state.keys(jnp.int32(count))
  return {t.path: np.asarray(t.basis(keys[t.path])) for t in state.plan.targets}


def some_responses(
    batch: Drawn, group: int, prompts: int, responses: int
) -> Rollout:
  """The first responses to the first prompts of a batch with such groups."""
  rows = np.arange(prompts * group).reshape(prompts, group)[:, :responses]
  return jax.tree.map(lambda x: x[rows.reshape(-1)], batch.rollout)


class Source:
  """Batches and dense gradients at points of the run of one config."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      folder: str | os.PathLike[str],
      points: Sequence[int],
      prompts: int,
  ):
    """Loads the model; trains the run, unless its points are there.

    Args:
      config: a config like `configs/quickstart.py`, of one device.
      folder: where points, batches and gradients are kept; one config's own.
      points: numbers of updates after which there will be batches, ascending.
      prompts: of a batch at a point, at most those of an update; each has
        `config.rollout.responses`.

    Raises:
      ValueError: a setting that cannot work, or the folder is another
        config's.
      FileNotFoundError: the model is not there.
    """
    check_config.check_config(config)
    if not 1 <= prompts <= config.rollout.prompts:
      raise ValueError(
          f"prompts={prompts} must be between 1 and those of an update,"
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

  def params(self, update: int) -> Any:
    """The parameters after `update` updates of the run, one of the points."""
    targets = load(self._point(update) / "params")
    return join(self._initial, {k: jnp.asarray(x) for k, x in targets.items()})

  def batch(self, params: Any, update: int, index: int) -> Drawn:
    """Batch `index` at the point after `update` updates: new prompts, sampled.

    Args:
      params: the parameters at that point.
      update: names the point.
      index: of the batch, from 0; the prompts are the same at every point.
    """
    path = self._point(update) / f"batch-{index:02d}"
    names = ("tokens", "valid", "completion_mask", "log_probs", "finished")
    if not path.exists():
      made = self._sample(params, _FIRST + index, self._prompts)
      arrays = {name: vars(made.rollout)[name] for name in names}
      save(path, {**arrays, "advantages": made.advantages})
    arrays = load(path)
    rollout = Rollout(**{name: arrays[name] for name in names})
    return Drawn(rollout, arrays["advantages"])

  def gradient(self, params: Any, update: int, index: int) -> Arrays:
    """The dense gradient of that batch's loss; arguments as for `batch`."""
    path = self._point(update) / f"gradient-{index:02d}"
    if not path.exists():
      drawn = self.batch(params, update, index)
      save(path, self._gradient(params, self._packed(drawn)))
    return load(path)

  def gradients_of(
      self, params: Any, update: int, batches: int, path: str
  ) -> list[np.ndarray]:
    """One projection's gradient of each of the first batches at a point."""
    found = []
    for index in range(batches):
      folder = self._point(update) / f"gradient-{index:02d}"
      if not folder.exists():
        self.gradient(params, update, index)
      found.append(np.load(folder / _file(path)))
    return found

  def _point(self, update: int) -> pathlib.Path:
    return self.folder / f"point-{update:02d}"

  def _train(self, points: Sequence[int]) -> None:
    """The run up to the last point; writes the weights at each."""
    config = self.config
    settings = UpdateSettings.of_config(config)
    tx = settings.make_optimizer()
    mesh = sharding.make_mesh(config.mesh)
    # The state is donated; the loaded parameters are needed again.
    params = jax.tree.map(jnp.copy, self._initial)
    state = compiled_step.init_state(settings.optimizer, params, tx, mesh)
    step = compiled_step.jit_update(self.model, tx, settings, state, mesh)
    for update in range(points[-1] + 1):
      if update in points:
        save(self._point(update) / "params", split(state.params))
      if update < points[-1]:
        drawn = self._sample(state.params, update, config.rollout.prompts)
        with jax.set_mesh(mesh):
          state, _ = step(state, self._packed(drawn))

  def _packed(self, drawn: Drawn) -> train_step.Batch:
    """What the learner reads of a batch, of so many prompts as it has."""
    settings = BatchSettings.of_config(self.config)
    responses = len(drawn.advantages)
    settings = dataclasses.replace(
        settings,
        prompts=responses // settings.responses,
        probe_responses=min(settings.probe_responses, responses),
    )
    batch, _ = batches.make_batch(settings, *drawn)
    return batch

  def _sample(self, params: Any, update: int, prompts: int) -> Drawn:
    """The first prompts of an update of the run, with such weights."""
    config, c = self.config, self.config.rollout
    first = update * c.prompts
    examples = [self._task.train(first + i) for i in range(prompts)]
    sampler = engine.make_sampler(
        engine.EngineSettings.of_config(c),
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
    of_rewards = losses.LOSSES[config.loss.name].advantages
    return Drawn(rollout, np.asarray(of_rewards(rewards, c.responses)))


def save(path: pathlib.Path, arrays: dict[str, Any]) -> None:
  """Writes a dict of arrays as a folder that appears only when complete."""
  temporary = path.with_name(f".{path.name}")
  shutil.rmtree(temporary, ignore_errors=True)
  temporary.mkdir(parents=True)
  for name, x in arrays.items():
    np.save(temporary / _file(name), np.asarray(x))
  os.replace(temporary, path)


def load(path: pathlib.Path) -> Arrays:
  """What `save` wrote."""
  files = sorted(path.glob("*.npy"))
  return {file.stem.replace(".", "/"): np.load(file) for file in files}


def _file(name: str) -> str:
  return f"{name.replace('/', '.')}.npy"
