"""A training run: its parts, and the loop over its updates."""

import contextlib
import dataclasses
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
from experiments.learning import batches, compiled_step, train_step
from experiments.learning.batches import BatchSettings
from experiments.learning.train_step import UpdateSettings
from experiments.models import decoder, load, lora
from experiments.parallel import processes, sharding
from experiments.rollouts import engine
from experiments.rollouts import generate as generate_lib
from experiments.runs import (
    check_config,
    checkpoints,
    collect,
    guards,
    progress,
    restore,
)
from experiments.runs import record as record_lib
from experiments.runs import workdir as workdir_lib
from experiments.runs.loop_settings import LoopSettings
import logra_jax

# The metrics that the seconds of an update divide into.
PHASES = ("time/rollout", "time/reward", "time/update")


@dataclasses.dataclass(frozen=True)
class Result:
  """How a call of `train` ended.

  Attributes:
    update: Number of updates done.
    stopped_by: Number of the signal that ended the run early, or None.
    accuracy: Held-out accuracy by update, as measured so far.
    state: Parameters and optimizer state; None if nothing was left to do.
  """

  update: int
  stopped_by: int | None
  accuracy: dict[int, float]
  state: train_step.TrainState | None


def train(
    config: ml_collections.ConfigDict, workdir: str | pathlib.Path
) -> Result:
  """Starts the run that lives in `workdir`, or resumes it.

  Args:
    config: A config like `configs/quickstart.py`.
    workdir: Directory of the run, for its config, metrics and checkpoints.

  Returns:
    How it ended.

  Raises:
    ValueError: If a setting cannot work, the directory cannot be written or
      belongs to another config, a prompt is too long, or a reward is not a
      number.
  """
  check_config.check_config(config)
  mesh = make_mesh(config)
  # The first process alone makes files; the others then find them.
  if not processes.is_first_process():
    processes.wait_for_all("claimed")
  path = workdir_lib.claim(workdir, config)
  if processes.is_first_process():
    processes.wait_for_all("claimed")
  saved = checkpoints.Checkpoints(
      path / "checkpoints", keep=config.checkpoint.keep, background=True
  )
  with workdir_lib.stop_on_signals() as stop:
    state = None
    update = config.updates
    if update not in saved.updates():
      run = Run(config, path, saved, mesh)
      state = run.loop(stop)
      update = run.update
  accuracy = record_lib.column(
      record_lib.read_rows(path / record_lib.FILENAME), "eval/accuracy"
  )
  return Result(update, stop.signal, dict(zip(*accuracy, strict=True)), state)


def make_mesh(config: ml_collections.ConfigDict) -> jax.sharding.Mesh:
  """The mesh of `config.mesh`, checked against the size of the batch."""
  mesh = sharding.make_mesh(config.mesh)
  check_config.check_mesh(config, mesh)
  return mesh


@jax.jit
def _weight_norm(params: optax.Params) -> jax.Array:
  """Frobenius norm of all parameters, adapters merged."""
  wide = jax.tree.map(lambda x: x.astype("float32"), lora.merge(params))
  return optax.tree.norm(wide)


class Run:
  """A run that has updates left: its parts, and its state.

  The whole config ends here: every part gets the settings that it reads.

  Attributes:
    config: The run's config, for the record and for what is printed.
    task: Gives the prompts.
    scorer: Gives the rewards of responses.
    state: Parameters, optimizer state and number of steps done.
    model: The policy.
    tokenizer: The model's tokenizer.
    sampler: The engine that samples responses.
    collector: Collects what an update learns from.
    curriculum: What is known of the prompts, or None.
  """

  def __init__(
      self,
      config: ml_collections.ConfigDict,
      path: pathlib.Path,
      saved: checkpoints.Checkpoints,
      mesh: jax.sharding.Mesh,
  ):
    """Loads the model, and the newest checkpoint if there is one.

    Args:
      config: A config like `configs/quickstart.py`.
      path: The run's directory, which `workdir.claim` has made.
      saved: The run's checkpoints.
      mesh: The mesh to train on.
    """
    self.config = config
    self._settings = LoopSettings.of_config(config)
    self._update_settings = UpdateSettings.of_config(config)
    self._batch_settings = BatchSettings.of_config(config)
    self._engine_settings = engine.EngineSettings.of_config(config.rollout)
    self._path = path
    self._saved = saved
    self._mesh = mesh
    self.task = tasks.make_task(config.task.name, config.task.seed)
    self.scorer = rewards.RewardWorkers(
        self.task,
        config.task.reward,
        workers=config.task.workers,
        timeout=config.task.timeout,
    )
    progress.say(f"loading {config.model}")
    with guards.advise_on_memory("load"):
      loaded = load.for_run(config)
      sharding.check_model(loaded.config, mesh)
      self._init_state(loaded.params)
    restore.describe_model(path, loaded)
    self.tokenizer = loaded.tokenizer
    self.model = decoder.Decoder(loaded.config)
    self.sampler = engine.make_sampler(
        self._engine_settings,
        self.model,
        self.state.params,
        self.tokenizer,
        path,
    )
    self.collector = collect.Collector(
        collect.CollectSettings.of_config(config),
        self.sampler,
        self.tokenizer,
        self.task,
        self.scorer,
    )
    self.curriculum = self.collector.initial_curriculum()
    self._compiled = guards.CompileCounter()
    self._shapes: set[tuple[int, ...]] = set()
    progress.say(self._summary())
    self._restore()
    self._prepare, self._train_step = compiled_step.programs(
        self.model,
        mesh,
        self._update_settings.program_key(),
        self.tokenizer.eos_ids,
    )

  @property
  def update(self) -> int:
    """Number of updates done."""
    return int(self.state.update) // self._settings.steps

  def _init_state(self, params: optax.Params) -> None:
    """The state before the first update, and the reference policy."""
    settings = self._update_settings
    tx = settings.make_optimizer()
    self.state = compiled_step.init_state(
        settings.optimizer, params, tx, self._mesh
    )
    self._reference = None
    if settings.loss.reference_kl:
      # The state is donated: the reference needs weights of its own.
      own = jax.tree.map(jnp.copy, params)
      where = sharding.shardings(own, own, self._mesh)
      self._reference = sharding.put(own, where)

  def _restore(self) -> None:
    """Takes the newest whole checkpoint, if there is one."""
    restored = self._saved.restore(self._checkpoint(), progress.say)
    if restored is None:
      return
    update, arrays = restored
    self.curriculum = arrays.pop("curriculum")
    self.state = train_step.TrainState(**arrays)
    progress.say(f"resuming after update {update} of {self._settings.updates}")
    self.sampler.update_weights(self.state.params, int(self.state.update))

  def _summary(self) -> str:
    """What the run is about to do, and the memory that it holds."""
    rollout = self.config.rollout
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree))
    memory = {
        "parameters": size(self.state.params),
        "optimizer state": size(self.state.opt_state),
    }
    if self._reference is not None:
      memory["reference"] = size(self._reference)
    if not rollout.server:
      memory["KV cache"] = generate_lib.memory_bytes(
          self.model.config,
          prompts=rollout.prompts,
          group_size=rollout.responses,
          prompt_tokens=rollout.max_prompt_tokens,
          max_new_tokens=rollout.max_new_tokens,
          slots=rollout.slots,
          cache_dtype=rollout.cache_dtype or None,
      )
    leaves = jax.tree.leaves(self.state.params)
    return progress.start_summary(
        model=self.config.model,
        parameters=sum(x.size for x in leaves),
        trained=logra_jax.summary(self.state.params, self.state.opt_state),
        memory=memory,
        prompts=rollout.prompts,
        responses=rollout.responses,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_new_tokens=rollout.max_new_tokens,
    )

  def _checkpoint(self) -> dict[str, Any]:
    """What a checkpoint holds."""
    return {**vars(self.state), "curriculum": self.curriculum}

  def loop(self, stop: workdir_lib.Stop) -> train_step.TrainState:
    """Runs the updates that are left; returns the state after the last.

    Args:
      stop: Becomes true when the run should end after the update at hand.
    """
    settings, update = self._settings, self.update
    writer = self._open_record(update)
    timer = checkpoints.SaveTimer(
        every=settings.checkpoint_every,
        minutes=settings.checkpoint_minutes,
        start=time.monotonic(),
    )
    bar = progress.Progress(settings.updates, update)
    watch = _Watch(settings, self._path, bar, self._compiled)
    # A signal may reach one process only: all stop after the same update.
    stopping = lambda: processes.any_process(bool(stop))
    mesh = jax.set_mesh(self._mesh)
    with mesh, writer, bar, self._compiled, self.scorer, self._saved:
      if update == 0:
        with self._compiled.expected():
          self.evaluate(writer, bar, update)
      while update < settings.updates and not stopping():
        with guards.advise_on_memory("rollout"):
          collected = self.collector.collect(update, self.curriculum)
        self.curriculum = collected.curriculum
        with guards.advise_on_memory("update"):
          steps, metrics = self.learn(collected)
        update += 1
        metrics |= collected.metrics | record_lib.memory_peaks()
        metrics["train/compilations"] = self._compiled.count
        row = writer.write(update, metrics)
        bar.show(update, row, sum(row[name] for name in PHASES))
        watch.observe(update, row, steps)
        last, score = update == settings.updates, None
        if last or update % settings.evaluate_every == 0:
          with self._compiled.expected():
            score = self.evaluate(writer, bar, update)
        best = self._saved.best()
        better = score is not None and (best is None or score > best[1])
        due = processes.any_process(timer.due(update, time.monotonic()))
        # A state that may be damaged must not push out a sound one.
        if last or (watch.healthy and (due or better or stopping())):
          self._saved.save(update, self._checkpoint(), score)
    return self.state

  def _open_record(self, update: int) -> record_lib.MetricsWriter:
    """The run's record, from which rows after `update` are removed."""
    log = self.config.log
    return record_lib.MetricsWriter(
        self._path,
        resume_at=update,
        tensorboard=log.tensorboard,
        wandb=log.wandb,
        trackio=log.trackio,
        config=self.config.to_dict(),
    )

  def learn(
      self, collected: collect.Collected
  ) -> tuple[list[train_step.Batch], dict[str, float]]:
    """Takes all optimizer steps on one rollout.

    Args:
      collected: The rollout with its advantages.

    Returns:
      The batch of each step of an epoch, and metrics by name.
    """
    start = time.perf_counter()
    steps, metrics_of_steps = self._batches(collected)
    for _ in range(self._settings.epochs):
      for batch in steps:
        # Each length of rows is compiled once, when it is first needed.
        shape = batch.rows.tokens.shape
        new = shape not in self._shapes
        self._shapes.add(shape)
        with self._compiled.expected() if new else contextlib.nullcontext():
          self.state, metrics = self._train_step(self.state, batch)
        metrics_of_steps.append(metrics)
    self.sampler.update_weights(self.state.params, int(self.state.update))
    numbers = jax.tree.map(float, jax.device_get(metrics_of_steps))
    joined = _join(numbers)
    return steps, joined | {"time/update": time.perf_counter() - start}

  def _batches(
      self, collected: collect.Collected
  ) -> tuple[list[train_step.Batch], list[dict[str, Any]]]:
    """The batch of each step of an epoch, and metrics of making them."""
    responses = np.arange(len(collected.advantages))
    steps, metrics_of_steps = [], []
    for own in np.split(responses, self._settings.minibatches):
      rollout, advantages, keep = jax.tree.map(
          lambda x, own=own: x[own],
          (collected.rollout, collected.advantages, collected.keep),
      )
      batch, packed = batches.make_batch(
          self._batch_settings, rollout, advantages, keep=keep
      )
      finished = packed.gather(np.asarray(rollout.finished))
      batch = batches.put(batch, self._mesh)
      metrics_of_steps.append({"train/padding": packed.padding})
      if self._settings.prepares:
        batch, metrics = self._prepare(
            self.state.params, self._reference, batch, finished
        )
        metrics_of_steps.append(metrics)
      steps.append(batch)
    return steps, metrics_of_steps

  def evaluate(
      self,
      writer: record_lib.MetricsWriter,
      bar: progress.Progress,
      update: int,
  ) -> float:
    """Writes held-out metrics to the record.

    Args:
      writer: The run's record.
      bar: Where the accuracy is shown.
      update: Number of updates done.

    Returns:
      The accuracy.
    """
    start = time.perf_counter()
    with guards.advise_on_memory("evaluate"):
      # These weights, whichever engine samples the rollouts, and no more slots
      # than a rollout has.
      sampler = engine.local_sampler(
          self._engine_settings, self.model, self.state.params, self.tokenizer
      )
      metrics, _ = heldout.evaluate_greedily(
          sampler,
          self.tokenizer,
          self.task,
          max_new_tokens=self._settings.max_new_tokens,
          max_prompts=self._settings.evaluate_prompts,
          workers=self.scorer,
      )
    metrics["weight_norm"] = float(_weight_norm(self.state.params))
    named = {f"eval/{name}": value for name, value in metrics.items()}
    named["time/evaluate"] = time.perf_counter() - start
    writer.write(update, named)
    bar.say(
        f"held-out accuracy after {update} updates: {metrics['accuracy']:.3f}"
    )
    return metrics["accuracy"]


# How a metric of several steps becomes one; the mean where nothing is said.
_JOIN = {
    "train/ratio_max": max,
    "train/skipped": max,
    "kl/skipped": max,
    "train/off_policy_gap_max": max,
}


def _join(metrics_of_steps: list[dict[str, float]]) -> dict[str, float]:
  """One value of each metric for all the steps that have it."""
  names = {name for metrics in metrics_of_steps for name in metrics}
  return {
      name: float(
          _JOIN.get(name, np.mean)(
              [metrics[name] for metrics in metrics_of_steps if name in metrics]
          )
      )
      for name in sorted(names)
  }


class _Watch:
  """Looks at each update, warns, and ends a run that is lost."""

  def __init__(
      self,
      settings: LoopSettings,
      path: pathlib.Path,
      bar: progress.Progress,
      compiled: guards.CompileCounter,
  ):
    rows = record_lib.read_rows(path / record_lib.FILENAME)
    self._compiled = compiled
    self._skips = guards.SkipGuard(path, limit=settings.max_skipped, rows=rows)
    self._watch = guards.Watch(
        max_new_tokens=settings.max_new_tokens, rows=rows
    )
    self._bar = bar

  @property
  def healthy(self) -> bool:
    """Whether the last update was finite."""
    return self._skips.in_a_row == 0

  def observe(
      self, update: int, row: dict[str, Any], steps: list[train_step.Batch]
  ) -> None:
    """Warns; raises if the run is lost."""
    warnings = self._watch.observe(row)
    late = self._compiled.observe()
    for warning in [*warnings, *([late] if late else [])]:
      self._bar.say(f"warning: {warning}")
    self._skips.observe(update, row, steps)
