"""A training run: its parts, and the loop over its updates."""

import contextlib
import dataclasses
import functools
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from experiments import rewards, tasks
from experiments.evaluation import heldout
from experiments.learning import batches, compiled_step, optimizers, train_step
from experiments.models import decoder, load, lora
from experiments.parallel import sharding
from experiments.rollouts import engine
from experiments.rollouts import generate as generate_lib
from experiments.runs import (
    check_config,
    checkpoints,
    collect,
    guards,
    progress,
)
from experiments.runs import record as record_lib
from experiments.runs import workdir as workdir_lib
import logra_jax

# What the seconds of an update go into.
PHASES = ("time/rollout", "time/reward", "time/update")


@dataclasses.dataclass(frozen=True)
class Result:
  """How a call of `train` ended.

  Attributes:
    update: updates done.
    stopped_by: number of the signal that ended the run early, or None.
    accuracy: held-out accuracy by update, as measured so far.
    state: parameters and optimizer state; None if nothing was left to do.
  """

  update: int
  stopped_by: int | None
  accuracy: dict[int, float]
  state: train_step.TrainState | None


def train(
    config: ml_collections.ConfigDict, workdir: str | pathlib.Path
) -> Result:
  """Trains, or goes on training, the run that lives in `workdir`.

  Args:
    config: a config like `configs/quickstart.py`.
    workdir: directory of the run: config, metrics, checkpoints.

  Returns:
    How it ended.

  Raises:
    ValueError: a setting that cannot work, a directory that cannot be written
      or belongs to another config, a prompt that does not fit, a reward that
      is no number.
  """
  check_config.check_config(config)
  mesh = _make_mesh(config)
  # The first process alone makes files; the others then find them.
  if not sharding.is_first_process():
    sharding.wait_for_all("claimed")
  path = workdir_lib.claim(workdir, config)
  if sharding.is_first_process():
    sharding.wait_for_all("claimed")
  saved = checkpoints.Checkpoints(
      path / "checkpoints", keep=config.checkpoint.keep, background=True
  )
  with workdir_lib.stop_on_signals() as stop:
    state = None
    if config.updates not in saved.updates():
      state = _Run(config, path, saved, mesh).loop(stop)
  update = config.updates if state is None else _updates(config, state)
  accuracy = record_lib.column(
      record_lib.read_rows(path / record_lib.FILENAME), "eval/accuracy"
  )
  return Result(update, stop.signal, dict(zip(*accuracy, strict=True)), state)


def _make_mesh(config: ml_collections.ConfigDict) -> jax.sharding.Mesh:
  """The mesh of the config, checked against the batch."""
  mesh = sharding.make_mesh(config.mesh)
  check_config.check_mesh(config, mesh)
  return mesh


def _settings(config: ml_collections.ConfigDict) -> str:
  """What the compiled update depends on, as JSON."""
  settings = config.copy_and_resolve_references().unlock()
  settings.optimizer.seed = 0  # In the state, and so is the learning rate.
  settings.optimizer.learning_rate = float(config.optimizer.learning_rate > 0)
  unread = ("seed", "model", "updates", "task", "evaluate", "checkpoint", "log")
  for name in unread:
    del settings[name]
  return settings.to_json(sort_keys=True)


@functools.lru_cache(maxsize=64)
def _programs(
    model: decoder.Decoder,
    mesh: jax.sharding.Mesh,
    settings: str,
    eos_ids: tuple[int, ...],
) -> tuple[Any, Any]:
  """The jitted `prepare` and update; runs that differ in seeds share them.

  The update donates its state: new parameters take the place of the old ones.
  """
  config = ml_collections.ConfigDict(json.loads(settings))
  tx = optimizers.make_optimizer(config)
  state, _ = compiled_step.abstract_arguments(model.config, config, mesh)
  step = compiled_step.jit_update(model, tx, config, state, mesh, eos_ids)
  return jax.jit(train_step.make_prepare(model, config, eos_ids)), step


@jax.jit
def _weight_norm(params: Any) -> jax.Array:
  """Frobenius norm of all parameters, adapters merged."""
  wide = jax.tree.map(lambda x: x.astype("float32"), lora.merge(params))
  return optax.tree.norm(wide)


class _Run:
  """A run that has updates left: its parts, and where it stands."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      path: pathlib.Path,
      saved: checkpoints.Checkpoints,
      mesh: jax.sharding.Mesh,
  ):
    self.config = config
    self.path = path
    self.saved = saved
    self.mesh = mesh
    self.task = tasks.make_task(config.task.name, config.task.seed)
    self.scorer = rewards.RewardWorkers(
        self.task,
        config.task.reward,
        workers=config.task.workers,
        timeout=config.task.timeout,
    )
    progress.say(f"loading {config.model}")
    loaded = load.for_run(config)
    self.tokenizer = loaded.tokenizer
    self.model = decoder.Decoder(loaded.config)
    sharding.check_model(loaded.config, mesh)
    tx = optimizers.make_optimizer(config)
    self.state = compiled_step.init_state(config, loaded.params, tx, mesh)
    # The state is donated: the reference needs weights of its own.
    self.reference = None
    if config.loss.reference_kl:
      own = jax.tree.map(jnp.copy, loaded.params)
      self.reference = sharding.put(own, sharding.shardings(own, own, mesh))
    self.sampler = engine.make_sampler(
        config, self.model, self.state.params, self.tokenizer, path
    )
    self.collector = collect.Collector(
        config, self.sampler, self.tokenizer, self.task, self.scorer
    )
    self.curriculum = self.collector.initial_curriculum()
    self.compiled = guards.CompileCounter()
    self.shapes: set[tuple[int, ...]] = set()
    progress.say(self._summary())
    restored = saved.restore(self._saved(), progress.say)
    if restored is not None:
      self.curriculum = restored[1].pop("curriculum")
      self.state = train_step.TrainState(**restored[1])
      progress.say(f"resuming after update {restored[0]} of {config.updates}")
      self.sampler.update_weights(self.state.params, int(self.state.update))
    compiled = (self.model, mesh, _settings(config), self.tokenizer.eos_ids)
    self.prepare, self.train_step = _programs(*compiled)

  def _summary(self) -> str:
    """What the run is about to do and to hold."""
    config, c = self.config, self.config.rollout
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    memory = {
        "parameters": size(self.state.params),
        "optimizer state": size(self.state.opt_state),
    }
    if self.reference is not None:
      memory["reference"] = size(self.reference)
    if not c.server:
      memory["KV cache"] = generate_lib.memory_bytes(
          self.model.config,
          prompts=c.prompts,
          group_size=c.responses,
          prompt_tokens=c.max_prompt_tokens,
          max_new_tokens=c.max_new_tokens,
          slots=c.slots,
          cache_dtype=c.cache_dtype or None,
      )
    leaves = jax.tree.leaves(self.state.params)
    return progress.start_summary(
        model=config.model,
        parameters=sum(x.size for x in leaves),
        trained=logra_jax.summary(self.state.params, self.state.opt_state),
        memory=memory,
        prompts=c.prompts,
        responses=c.responses,
        max_prompt_tokens=c.max_prompt_tokens,
        max_new_tokens=c.max_new_tokens,
    )

  def _saved(self) -> dict[str, Any]:
    """What a checkpoint holds."""
    return {**vars(self.state), "curriculum": self.curriculum}

  def loop(self, stop: workdir_lib.Stop) -> train_step.TrainState:
    """The algorithm; returns the state it ended with."""
    config = self.config
    update = _updates(config, self.state)
    writer = record_lib.MetricsWriter(
        self.path,
        resume_at=update,
        tensorboard=config.log.tensorboard,
        wandb=config.log.wandb,
        trackio=config.log.trackio,
        config=config.to_dict(),
    )
    timer = checkpoints.SaveTimer(
        every=config.checkpoint.every,
        minutes=config.checkpoint.minutes,
        start=time.monotonic(),
    )
    bar = progress.Progress(config.updates, update)
    watch = _Watch(config, self.path, bar, self.compiled)
    # A signal may reach one process only: all stop after the same update.
    stopping = lambda: sharding.any_process(bool(stop))
    mesh = jax.set_mesh(self.mesh)
    with mesh, writer, bar, self.compiled, self.scorer, self.saved:
      if update == 0:
        with self.compiled.expected():
          self.evaluate(writer, bar, update)
      while update < config.updates and not stopping():
        with guards.advise_on_memory("rollout"):
          collected = self.collector.collect(update, self.curriculum)
        self.curriculum = collected.curriculum
        with guards.advise_on_memory("update"):
          steps, metrics = self.learn(collected)
        update += 1
        metrics |= collected.metrics | record_lib.memory_peaks()
        metrics["train/compilations"] = self.compiled.count
        row = writer.write(update, metrics)
        bar.show(update, row, sum(row[name] for name in PHASES))
        watch.observe(update, row, steps)
        last, score = update == config.updates, None
        if last or update % config.evaluate.every == 0:
          with self.compiled.expected():
            score = self.evaluate(writer, bar, update)
        best = self.saved.best()
        better = score is not None and (best is None or score > best[1])
        due = sharding.any_process(timer.due(update, time.monotonic()))
        # What may be damaged does not push out what is not.
        if last or (watch.healthy and (due or better or stopping())):
          self.saved.save(update, self._saved(), score)
    return self.state

  def learn(
      self, collected: collect.Collected
  ) -> tuple[list[train_step.Batch], dict[str, float]]:
    """The steps on one rollout: their batches, and their metrics."""
    start = time.perf_counter()
    steps, found = self._steps(collected)
    for _ in range(self.config.loss.epochs):
      for batch in steps:
        # Each length of rows is compiled once, whenever it is first needed.
        shape = batch.rows.tokens.shape
        new = shape not in self.shapes
        self.shapes.add(shape)
        with self.compiled.expected() if new else contextlib.nullcontext():
          self.state, metrics = self.train_step(self.state, batch)
        found.append(metrics)
    self.sampler.update_weights(self.state.params, int(self.state.update))
    found = jax.tree.map(float, jax.device_get(found))
    names = {name for metrics in found for name in metrics}
    joined = {
        name: _JOIN.get(name, np.mean)([m[name] for m in found if name in m])
        for name in sorted(names)
    }
    return steps, joined | {"time/update": time.perf_counter() - start}

  def _steps(
      self, collected: collect.Collected
  ) -> tuple[list[train_step.Batch], list[dict[str, Any]]]:
    """The batch of each step of an epoch, and metrics of making them."""
    config = self.config
    rows = np.arange(len(collected.advantages))
    steps, found = [], []
    for own in np.split(rows, config.loss.minibatches):
      part = jax.tree.map(lambda x, own=own: x[own], collected[:3])
      rollout, advantages, keep = part
      batch, packed = batches.make_batch(config, rollout, advantages, keep=keep)
      finished = packed.gather(np.asarray(rollout.finished))
      batch = batches.put(batch, self.mesh)
      found.append({"train/padding": packed.padding})
      if _prepares(config):
        batch, metrics = self.prepare(
            self.state.params, self.reference, batch, finished
        )
        found.append(metrics)
      steps.append(batch)
    return steps, found

  def evaluate(
      self,
      writer: record_lib.MetricsWriter,
      bar: progress.Progress,
      update: int,
  ) -> float:
    """Writes held-out metrics to the record; returns the accuracy."""
    start = time.perf_counter()
    with guards.advise_on_memory("evaluate"):
      # These weights, whoever else may sample; no more rows than a rollout has.
      sampler = engine.local_sampler(
          self.config, self.model, self.state.params, self.tokenizer
      )
      found, _ = heldout.evaluate(
          sampler,
          self.tokenizer,
          self.task,
          max_new_tokens=self.config.rollout.max_new_tokens,
          max_prompts=self.config.evaluate.prompts,
          workers=self.scorer,
      )
    found["weight_norm"] = float(_weight_norm(self.state.params))
    named = {f"eval/{name}": value for name, value in found.items()}
    named["time/evaluate"] = time.perf_counter() - start
    writer.write(update, named)
    bar.say(
        f"held-out accuracy after {update} updates: {found['accuracy']:.3f}"
    )
    return found["accuracy"]


class _Watch:
  """What looks at each update, and says what is wrong."""

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      path: pathlib.Path,
      bar: progress.Progress,
      compiled: guards.CompileCounter,
  ):
    rows = record_lib.read_rows(path / record_lib.FILENAME)
    self._compiled = compiled
    self._skips = guards.SkipGuard(path, limit=config.max_skipped, rows=rows)
    self._watch = guards.Watch(
        max_new_tokens=config.rollout.max_new_tokens, rows=rows
    )
    self._bar = bar

  @property
  def healthy(self) -> bool:
    """Whether the last update was finite."""
    return self._skips.in_a_row == 0

  def observe(
      self, update: int, row: dict[str, Any], steps: list[train_step.Batch]
  ) -> None:
    """Warns; raises where a run is lost."""
    warnings = self._watch.observe(row)
    late = self._compiled.observe()
    for warning in [*warnings, *([late] if late else [])]:
      self._bar.say(f"warning: {warning}")
    self._skips.observe(update, row, steps)


# How a metric of several steps becomes one; the mean where nothing is said.
_JOIN = {
    "train/ratio_max": max,
    "train/skipped": max,
    "kl/skipped": max,
    "train/off_policy_gap_max": max,
}


def _steps(config: ml_collections.ConfigDict) -> int:
  """Optimizer steps of an update."""
  return config.loss.epochs * config.loss.minibatches


def _updates(
    config: ml_collections.ConfigDict, state: train_step.TrainState
) -> int:
  """Updates that a state has seen."""
  return int(state.update) // _steps(config)


def _prepares(config: ml_collections.ConfigDict) -> bool:
  """Whether the trainer's own log-probs are needed before the first step."""
  c = config.loss
  return (
      _steps(config) > 1
      or c.correction != "none"
      or c.reference_kl > 0
      or config.kl.mismatch
  )
