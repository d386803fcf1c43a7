"""RL-trains a language model.

  python -m experiments.train --config=experiments/configs/quickstart.py \
    --workdir=DIR [--config.optimizer.rank=64]

Rerunning the command resumes from the newest checkpoint; Ctrl-C and SIGTERM
save one first. In a notebook: `train(get_config(), workdir)`.

On several hosts every process runs the command with `--distributed`; they
share one `workdir`, and the first process alone writes the record.
"""

from collections.abc import Sequence
import dataclasses
import functools
import json
import pathlib
import signal
import sys
import time
from typing import Any

from absl import app, flags, logging
import jax
import ml_collections
from ml_collections import config_flags
import numpy as np
import optax

from experiments import (
    checkpoints,
    decoder,
    evaluate,
    grpo,
    learner,
    lora,
    optimizers,
    plots,
    pretrained,
    program,
    progress,
    sharding,
    tasks,
    tiny,
)
from experiments import metrics as metrics_lib
from experiments import rollout as rollout_lib
from experiments import tokenizer as tokenizer_lib
from experiments import workdir as workdir_lib
import logra_jax

# What the seconds of an update go into.
_PHASES = ("time/rollout", "time/reward", "time/update")


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
  state: learner.TrainState | None


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
  check_config(config)
  mesh = _make_mesh(config)
  # The first process alone makes files; the others then find them.
  if not sharding.is_first_process():
    sharding.wait_for_all("claimed")
  path = workdir_lib.claim(workdir, config)
  if sharding.is_first_process():
    sharding.wait_for_all("claimed")
  saved = checkpoints.Checkpoints(
      path / "checkpoints", keep=config.checkpoint.keep
  )
  with workdir_lib.stop_on_signals() as stop:
    state = None
    if config.updates not in saved.updates():
      state = _Run(config, path, saved, mesh).loop(stop)
  update = config.updates if state is None else int(state.update)
  accuracy = metrics_lib.column(
      metrics_lib.read_rows(path / metrics_lib.FILENAME), "eval/accuracy"
  )
  return Result(update, stop.signal, dict(zip(*accuracy, strict=True)), state)


def check_config(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError for settings that no run could start with."""
  c = config
  least = {
      "updates": (c.updates, 1),
      "rollout.prompts": (c.rollout.prompts, 1),
      # A response is compared with the others to its prompt.
      "rollout.responses": (c.rollout.responses, 2),
      "rollout.max_prompt_tokens": (c.rollout.max_prompt_tokens, 1),
      "rollout.max_new_tokens": (c.rollout.max_new_tokens, 1),
      "loss.micro_batch": (c.loss.micro_batch, 1),
      "loss.pack": (c.loss.pack, 1),
      "loss.chunk": (c.loss.chunk, 1),
      "kl.probe_responses": (c.kl.probe_responses, 1),
      "evaluate.every": (c.evaluate.every, 1),
      "evaluate.prompts": (c.evaluate.prompts, 1),
      "checkpoint.every": (c.checkpoint.every, 1),
      "checkpoint.keep": (c.checkpoint.keep, 1),
  }
  for name, (value, minimum) in least.items():
    if value < minimum:
      raise ValueError(f"config.{name}={value} must be at least {minimum}")
  if not 0 <= c.loss.clip_low <= 1 or not c.loss.clip_high >= 0:
    raise ValueError(
        f"config.loss.clip_low={c.loss.clip_low} must be in [0, 1] and"
        f" clip_high={c.loss.clip_high} at least 0"
    )
  if not c.rollout.temperature > 0:
    raise ValueError(
        f"config.rollout.temperature={c.rollout.temperature} must be positive:"
        " greedy responses to one prompt are all the same"
    )
  batch = c.rollout.prompts * c.rollout.responses
  if batch % c.loss.micro_batch:
    raise ValueError(
        f"config.loss.micro_batch={c.loss.micro_batch} must divide the batch,"
        f" rollout.prompts * rollout.responses = {batch}"
    )
  if c.rollout.responses % c.loss.pack or c.loss.micro_batch % c.loss.pack:
    raise ValueError(
        f"config.loss.pack={c.loss.pack} must divide"
        f" rollout.responses={c.rollout.responses} and"
        f" loss.micro_batch={c.loss.micro_batch}"
    )
  if c.kl.probe_responses > batch:
    raise ValueError(
        f"config.kl.probe_responses={c.kl.probe_responses} is more than the"
        f" batch has, {batch}"
    )
  optimizers.make_optimizer(c)  # Refuses its own bad values.


def load_model(config: ml_collections.ConfigDict) -> pretrained.Pretrained:
  """The model that `config.model` names, in the config's dtypes.

  Raises:
    FileNotFoundError: there is nothing at that path.
    ValueError: what is there is not a complete model.
  """
  if config.model == "tiny":
    loaded = tiny.make_tiny(config.seed)
  else:
    loaded = pretrained.load(config.model, config.param_dtype)
  return loaded._replace(config=program.configure(loaded.config, config))


def _make_mesh(config: ml_collections.ConfigDict) -> jax.sharding.Mesh:
  """The mesh of the config, checked against the batch."""
  mesh = sharding.make_mesh(config.mesh)
  rows = config.loss.micro_batch // config.loss.pack
  sizes = {
      "config.rollout.prompts": config.rollout.prompts,
      "config.loss.micro_batch": config.loss.micro_batch,
      "config.loss.micro_batch / config.loss.pack": rows,
      "config.kl.probe_responses": config.kl.probe_responses,
  }
  for name, size in sizes.items():
    sharding.check_batch(name, size, mesh)
  return mesh


def _settings(config: ml_collections.ConfigDict) -> str:
  """What the compiled update depends on, as JSON."""
  settings = config.copy_and_resolve_references().unlock()
  settings.optimizer.seed = 0  # In the state, and so is the learning rate.
  settings.optimizer.learning_rate = float(config.optimizer.learning_rate > 0)
  for name in ("seed", "model", "updates", "task", "evaluate", "checkpoint"):
    del settings[name]
  return settings.to_json(sort_keys=True)


@functools.lru_cache(maxsize=64)
def _train_step(
    model: decoder.Decoder, mesh: jax.sharding.Mesh, settings: str
) -> Any:
  """The jitted update; runs of one process that only differ in seeds share it.

  The state is donated: new parameters take the place of the old ones.
  """
  config = ml_collections.ConfigDict(json.loads(settings))
  tx = optimizers.make_optimizer(config)
  state, _ = program.abstract_arguments(model.config, config, mesh)
  return program.jit_update(model, tx, config, state, mesh)


@jax.jit
def _weight_norm(params: Any) -> jax.Array:
  """Frobenius norm of all parameters, adapters merged."""
  wide = jax.tree.map(lambda x: x.astype("float32"), lora.merge(params))
  return optax.tree.norm(wide)


def sample(
    config: ml_collections.ConfigDict,
    model: decoder.Decoder,
    params: Any,
    tokenizer: tokenizer_lib.Tokenizer,
    examples: Sequence[tasks.Example],
    update: int,
) -> rollout_lib.Rollout:
  """The groups of responses that a run draws in an update.

  Args:
    config: of the run.
    model: the policy.
    params: its parameters.
    tokenizer: the model's.
    examples: whose prompts are answered, `config.rollout.responses` times each.
    update: number of updates done before.
  """
  c = config.rollout
  return evaluate.respond(
      model,
      params,
      tokenizer,
      examples,
      jax.random.fold_in(jax.random.key(config.seed), update),
      max_prompt_tokens=c.max_prompt_tokens,
      max_new_tokens=c.max_new_tokens,
      temperature=c.temperature,
      group_size=c.responses,
  )


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
    self.task = tasks.make_task(config.task.name, config.task.seed)
    progress.say(f"loading {config.model}")
    loaded = load_model(config)
    self.model = decoder.Decoder(loaded.config)
    self.tokenizer = loaded.tokenizer
    self.mesh = mesh
    sharding.check_model(loaded.config, mesh)
    tx = optimizers.make_optimizer(config)
    self.state = program.init_state(config, loaded.params, tx, self.mesh)
    progress.say(logra_jax.summary(self.state.params, self.state.opt_state))
    restored = saved.restore(self.state, progress.say)
    if restored is not None:
      self.state = restored[1]
      progress.say(f"resuming after update {restored[0]} of {config.updates}")
    self.train_step = _train_step(self.model, mesh, _settings(config))

  def loop(self, stop: workdir_lib.Stop) -> learner.TrainState:
    """The algorithm; returns the state it ended with."""
    config = self.config
    update = int(self.state.update)
    writer = metrics_lib.MetricsWriter(
        self.path, resume_at=update, tensorboard=config.tensorboard
    )
    mesh = jax.set_mesh(self.mesh)
    with mesh, writer, progress.Progress(config.updates, update) as bar:
      if update == 0:
        self.evaluate(writer, bar, update)
      pending = _Pending(writer, bar)
      # A signal may reach one process only: all stop after the same update.
      stopping = lambda: sharding.any_process(bool(stop))
      while update < config.updates and not stopping():
        # JAX only dispatches here: the last update may still be running.
        start = time.perf_counter()
        examples = self.examples(update)
        rollout = self.sample(examples, update)
        start = max(start, pending.flush())
        batch, seen = self.score(examples, rollout, start)
        start = time.perf_counter()
        self.state, metrics = self.train_step(self.state, batch)
        update += 1
        pending.set(update, start, {**seen, **metrics})
        last = update == config.updates
        if last or update % config.evaluate.every == 0:
          pending.flush()
          self.evaluate(writer, bar, update)
        if last or update % config.checkpoint.every == 0 or stopping():
          pending.flush()
          self.saved.save(update, self.state)
    return self.state

  def examples(self, update: int) -> list[tasks.Example]:
    """The training examples of an update, each once."""
    n = self.config.rollout.prompts
    return [self.task.train(update * n + i) for i in range(n)]

  def sample(
      self, examples: list[tasks.Example], update: int
  ) -> rollout_lib.Rollout:
    """A group of responses to each example's prompt."""
    return sample(
        self.config,
        self.model,
        self.state.params,
        self.tokenizer,
        examples,
        update,
    )

  def score(
      self,
      examples: list[tasks.Example],
      rollout: rollout_lib.Rollout,
      start: float,
  ) -> tuple[learner.Batch, dict[str, float]]:
    """Rewards and advantages; waits for the rollout, begun at `start`."""
    rollout = sharding.fetch(rollout)
    mask = rollout.completion_mask
    sampled = time.perf_counter()
    if not mask[learner.probe_rows(self.config)].any():
      raise ValueError(
          "the rollout has no generated token in its first"
          f" {self.config.kl.probe_responses} responses, so that no KL can be"
          " predicted; raise config.kl.probe_responses"
      )
    n = self.config.rollout.responses
    _, rewards = evaluate.score(self.task, self.tokenizer, examples, rollout)
    advantages = grpo.group_advantages(rewards, n)
    groups = rewards.reshape(-1, n)
    batch = learner.Batch(rollout, advantages)
    return sharding.put(batch, sharding.batch_shardings(batch, self.mesh)), {
        "train/reward": rewards.mean(),
        "train/reward_std": rewards.std(),
        "train/equal_groups": np.mean(np.ptp(groups, axis=1) == 0),
        "rollout/length": mask.sum(axis=1).mean(),
        "rollout/finished": rollout.finished.mean(),
        "rollout/tokens_per_second": mask.sum() / (sampled - start),
        "time/rollout": sampled - start,
        "time/reward": time.perf_counter() - sampled,
    }

  def evaluate(
      self,
      writer: metrics_lib.MetricsWriter,
      bar: progress.Progress,
      update: int,
  ) -> None:
    """Writes held-out metrics to the record."""
    found, _ = evaluate.evaluate(
        self.model,
        self.state.params,
        self.tokenizer,
        self.task,
        max_prompt_tokens=self.config.rollout.max_prompt_tokens,
        max_new_tokens=self.config.rollout.max_new_tokens,
        max_prompts=self.config.evaluate.prompts,
    )
    found["weight_norm"] = float(_weight_norm(self.state.params))
    writer.write(update, {f"eval/{name}": found[name] for name in found})
    bar.say(
        f"held-out accuracy after {update} updates: {found['accuracy']:.3f}"
    )


class _Pending:
  """Metrics of an update that may still be running."""

  def __init__(self, writer: metrics_lib.MetricsWriter, bar: progress.Progress):
    self._writer = writer
    self._bar = bar
    self._waiting: tuple[int, float, dict[str, Any]] | None = None

  def set(self, update: int, start: float, values: dict[str, Any]) -> None:
    """Keeps the metrics of an update that began at `start` until `flush`."""
    self._waiting = (update, start, values)

  def flush(self) -> float:
    """Waits for the metrics, if there are any, and writes them.

    Returns:
      When they were there, by `time.perf_counter`; 0 if there are none.
    """
    if self._waiting is None:
      return 0.0
    update, start, values = self._waiting
    self._waiting = None
    jax.block_until_ready(values)
    end = time.perf_counter()
    values["time/update"] = end - start
    seconds = sum(values[name] for name in values if name in _PHASES)
    self._bar.show(update, self._writer.write(update, values), seconds)
    return end


def _report(
    path: pathlib.Path, update: int, updates: int, stopped_by: int | None
) -> None:
  """Says how the run stands and where its things are; draws its picture."""
  rows = metrics_lib.read_rows(path / metrics_lib.FILENAME)
  accuracy = metrics_lib.column(rows, "eval/accuracy")
  if len(accuracy[0]) > 1:
    progress.say(
        f"held-out accuracy: {accuracy[1][0]:.3f} before,"
        f" {accuracy[1][-1]:.3f} after {accuracy[0][-1]} updates"
    )
  if metrics_lib.column(rows, "train/reward")[0]:
    seconds = sum(sum(metrics_lib.column(rows, name)[1]) for name in _PHASES)
    progress.say(f"training:   {seconds / 60:.1f} minutes in all")
    progress.say(f"picture:    {plots.draw_run(path)}")
  progress.say(f"metrics:    {path / metrics_lib.FILENAME}")
  progress.say(f"checkpoint: {path / 'checkpoints'}")
  progress.say(
      f"export:     python -m experiments.export --workdir={path} --out=DIR"
  )
  if stopped_by is not None:
    progress.say(
        f"stopped by {signal.Signals(stopped_by).name} after update {update} of"
        f" {updates}; the same command resumes"
    )


def main(config: ml_collections.ConfigDict, workdir: str) -> None:
  logging.set_verbosity(logging.WARNING)  # Orbax tells every step it takes.
  if flags.FLAGS.distributed:
    jax.distributed.initialize()
  try:
    result = train(config, workdir)
  except (ValueError, FileNotFoundError, ImportError) as error:
    if flags.FLAGS.traceback:
      raise
    sys.exit(f"error: {error}")
  if sharding.is_first_process():
    path = pathlib.Path(workdir).absolute()
    _report(path, result.update, config.updates, result.stopped_by)
  sharding.wait_for_all("reported")
  if result.stopped_by is not None:
    sys.exit(128 + result.stopped_by)


if __name__ == "__main__":
  config_flags.DEFINE_config_file(
      "config", None, "Path of a config.", lock_config=True
  )
  flags.DEFINE_string("workdir", None, "Directory of the run.")
  flags.DEFINE_bool(
      "distributed",
      False,
      "This is one of several processes that share the workdir; see"
      " jax.distributed.initialize.",
  )
  flags.DEFINE_bool("traceback", False, "Show where an error comes from.")
  flags.mark_flags_as_required(["config", "workdir"])
  app.run(lambda argv: main(flags.FLAGS.config, flags.FLAGS.workdir))
