"""Compiled updates on random data, and timing several of them in turn.

An update is the whole train step: the loss forward and backward over all
micro-batches, the KL probe, the optimizer and the merge. There is no rollout:
a fixed random batch replaces it, and the model's weights are random too.
"""

from collections.abc import Sequence
import dataclasses
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from experiments.learning import batches, compiled_step, optimizers, train_step
from experiments.learning.batches import BatchSettings
from experiments.learning.train_step import UpdateSettings
from experiments.models import load, tiny
from experiments.models.config import DecoderConfig
from experiments.models.decoder import Decoder
from experiments.parallel import sharding
from experiments.planning.request import full_rows_config
from experiments.rollouts.rollout import Rollout

# The optimizer that all others are compared with.
BASELINE = "dense_adam"
_WITHOUT_RANK = (BASELINE, "dense_sgd", "muon")

# A decoder for tests: takes seconds, nearly all of them compilation.
SMALL = dataclasses.replace(tiny.CONFIG, vocab_size=64, max_length=2048)


@dataclasses.dataclass(frozen=True)
class UpdateSize:
  """Sizes of an update.

  Attributes:
    sequences: Responses per update.
    tokens: Tokens of a sequence, prompt and completion together.
    micro_batch: Responses computed at once; divides `sequences`.
    prompt_tokens: Tokens of a sequence's prompt.
    probe: Responses that the KL is predicted on.
    chunk: Tokens whose logits are in memory at once.
  """

  sequences: int = 16
  tokens: int = 64
  micro_batch: int = 8
  prompt_tokens: int = 16
  probe: int = 2
  chunk: int = 128


@dataclasses.dataclass(frozen=True)
class OptimizerSetting:
  """An optimizer and its rank.

  Attributes:
    optimizer: A name of `optimizers.OPTIMIZERS`.
    rank: Rank of its sketches, adapters or projections; None if it has none.
  """

  optimizer: str
  rank: int | None

  @property
  def label(self) -> str:
    """The setting's name in tables and figures, such as `logra, rank 16`."""
    return self.optimizer + ("" if self.rank is None else f", rank {self.rank}")


def parse_settings(
    names: Sequence[str], ranks: Sequence[int]
) -> list[OptimizerSetting]:
  """Lists the optimizers to time; the baseline comes first.

  Args:
    names: Names of optimizers. Each is timed at every rank, or at one rank if
      it is named like `'galore:64'`.
    ranks: Ranks of the optimizers that have one.

  Raises:
    ValueError: An unknown optimizer, or an invalid rank.
  """
  settings = [OptimizerSetting(BASELINE, None)]
  for text in names:
    name, _, rank = text.partition(":")
    if name not in optimizers.OPTIMIZERS:
      raise ValueError(
          f"optimizers={text!r} must be one of {sorted(optimizers.OPTIMIZERS)},"
          " or one of them with a rank, as 'galore:64'"
      )
    own_ranks = parse_ints("optimizers", [rank]) if rank else ranks
    if name in _WITHOUT_RANK:
      if name != BASELINE:
        settings.append(OptimizerSetting(name, None))
      continue
    for own_rank in own_ranks:
      if own_rank < 1:
        raise ValueError(f"ranks={own_rank} must be at least 1")
      settings.append(OptimizerSetting(name, own_rank))
  return settings


def parse_ints(name: str, values: Sequence[str]) -> list[int]:
  """Converts the values of the flag `name` to integers.

  Raises:
    ValueError: A value that is not an integer.
  """
  try:
    return [int(value) for value in values]
  except ValueError as error:
    raise ValueError(f"{name}={','.join(values)!r}: {error}") from error


def training_config(
    setting: OptimizerSetting, size: UpdateSize
) -> ml_collections.ConfigDict:
  """The quickstart's config at this size, with LoGRA as published.

  Raises:
    ValueError: Sizes that contradict each other.
  """
  if size.sequences % size.micro_batch:
    raise ValueError(
        f"micro_batch={size.micro_batch} must divide"
        f" sequences={size.sequences}"
    )
  if not 0 < size.prompt_tokens < size.tokens:
    raise ValueError(
        f"prompt_tokens={size.prompt_tokens} must be at least 1 and leave some"
        f" of tokens={size.tokens} for the completion"
    )
  if not 0 < size.probe <= size.sequences:
    raise ValueError(
        f"probe={size.probe} must be at least 1 and at most"
        f" sequences={size.sequences}"
    )
  return full_rows_config(
      optimizer=setting.optimizer,
      rank=setting.rank or 1,
      responses=size.sequences,
      tokens=size.tokens,
      prompt_tokens=size.prompt_tokens,
      micro_rows=size.micro_batch,
      chunk=size.chunk,
      probe_responses=size.probe,
  )


def random_batch(
    config: ml_collections.ConfigDict, vocab_size: int, seed: int
) -> train_step.Batch:
  """Makes a batch of random tokens without padding and random advantages.

  Args:
    config: A training config; gives the sizes.
    vocab_size: Tokens are drawn uniformly from `[0, vocab_size)`.
    seed: Random seed.
  """
  rng = np.random.default_rng(seed)
  n = config.rollout.prompts * config.rollout.responses
  n_prompt = config.rollout.max_prompt_tokens
  length = n_prompt + config.rollout.max_new_tokens
  completion = np.broadcast_to(np.arange(length) >= n_prompt, (n, length))
  # Uniform log-probs are close to a random model's, so nothing is clipped.
  log_probs = np.where(completion, -np.log(vocab_size), 0.0)
  rollout = Rollout(
      tokens=rng.integers(vocab_size, size=(n, length), dtype=np.int32),
      valid=np.ones((n, length), bool),
      completion_mask=completion,
      log_probs=log_probs.astype(np.float32),
      finished=np.ones((n,), bool),
  )
  batch, _ = batches.make_batch(
      BatchSettings.of_config(config), rollout, rng.standard_normal(n)
  )
  return dataclasses.replace(batch, count=None)  # All rows are full.


class CompiledUpdate:
  """A compiled update together with its state and batch.

  Attributes:
    setting: The optimizer and its rank.
    compile_seconds: Time that tracing and compiling took.
  """

  def __init__(
      self,
      setting: OptimizerSetting,
      size: UpdateSize,
      architecture: DecoderConfig,
      seed: int,
  ):
    """Compiles the update and draws weights and batch from `seed`."""
    self.setting = setting
    config = training_config(setting, size)
    self._mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    model = Decoder(load.configure(architecture, config))
    settings = UpdateSettings.of_config(config)
    tx = settings.make_optimizer()
    init = jax.jit(lambda key: model.init(key, jnp.zeros((1, 1), jnp.int32)))
    params = init(jax.random.key(seed))["params"]
    self._state = compiled_step.init_state(
        settings.optimizer, params, tx, self._mesh
    )
    self._batch = random_batch(config, architecture.vocab_size, seed)
    step = compiled_step.jit_update(
        model, tx, settings, self._state, self._mesh
    )
    started = time.perf_counter()
    with jax.set_mesh(self._mesh):
      self._step = step.lower(self._state, self._batch).compile()
    self.compile_seconds = time.perf_counter() - started

  def run(self) -> tuple[float, float]:
    """Runs one update.

    Returns:
      Elapsed seconds, and processor seconds summed over all threads.

    Raises:
      FloatingPointError: The update was skipped.
    """
    started, cpu_started = time.perf_counter(), time.process_time()
    with jax.set_mesh(self._mesh):
      self._state, metrics = self._step(self._state, self._batch)
      jax.block_until_ready((self._state, metrics))
    seconds = time.perf_counter() - started
    cpu_seconds = time.process_time() - cpu_started
    if metrics["kl/skipped"] or not np.isfinite(metrics["train/loss"]):
      raise FloatingPointError(f"{self.setting.label}: the update was skipped")
    return seconds, cpu_seconds

  def memory(self) -> dict[str, int]:
    """Bytes of arguments and temporaries, as the compiler reports them."""
    sizes = compiled_step.sizes(self._step)
    return {key: sizes[key] for key in ("argument_bytes", "temporary_bytes")}


def time_updates(
    settings: Sequence[OptimizerSetting],
    size: UpdateSize,
    architecture: DecoderConfig,
    *,
    repeats: int,
    seed: int,
) -> list[dict[str, Any]]:
  """Times updates, one of each optimizer in turn.

  Args:
    settings: The optimizers to time.
    size: Sizes of the update.
    architecture: Shapes of the model; its weights are random.
    repeats: Timed updates per optimizer. The first update is not one of them:
      its time is kept apart, since GaLore decomposes all gradients in it.
    seed: Random seed of weights and batch.

  Returns:
    One dict of plain data per optimizer, in the order of `settings`.
  """
  updates, results = [], []
  for setting in settings:
    update = CompiledUpdate(setting, size, architecture, seed)
    first_seconds, _ = update.run()
    updates.append(update)
    results.append(
        {
            **dataclasses.asdict(setting),
            "compile_seconds": round(update.compile_seconds, 3),
            "first_seconds": round(first_seconds, 4),
            **update.memory(),
            "seconds": [],
            "cpu_seconds": [],
        }
    )
    _log(
        f"{setting.label}: compiled {update.compile_seconds:.0f} s,"
        f" first update {first_seconds:.2f} s"
    )
  for repeat in range(repeats):
    # Forwards, then backwards, so that no optimizer always follows the same
    # one.
    order = range(len(settings))
    for i in order if repeat % 2 == 0 else reversed(order):
      seconds, cpu_seconds = updates[i].run()
      results[i]["seconds"].append(round(seconds, 4))
      results[i]["cpu_seconds"].append(round(cpu_seconds, 4))
    _log(
        f"{repeat + 1} of {repeats}: "
        + " ".join(f"{result['seconds'][-1]:.2f}" for result in results)
    )
  return results


def _log(text: str) -> None:
  print(text, file=sys.stderr, flush=True)
