"""Settings that no run could start with, told before anything slow is done."""

from jax.sharding import Mesh
import ml_collections

from experiments.learning import correction, losses, optimizers
from experiments.parallel import sharding
from experiments.rewards import overlong
from experiments.rollouts import sampling


def check_config(config: ml_collections.ConfigDict) -> None:
  """Raises ValueError for settings that no run could start with."""
  _check_least(config)
  _check_loss(config)
  _check_rollout(config.rollout)
  optimizers.make_optimizer(config)  # Refuses its own bad values.


def _check_least(c: ml_collections.ConfigDict) -> None:
  """Counts that must be positive."""
  least = {
      "updates": (c.updates, 1),
      "rollout.prompts": (c.rollout.prompts, 1),
      "rollout.responses": (c.rollout.responses, 1),
      "rollout.max_prompt_tokens": (c.rollout.max_prompt_tokens, 1),
      "rollout.slots": (c.rollout.slots, 0),
      "rollout.dynamic_tries": (c.rollout.dynamic_tries, 0),
      "rollout.curriculum": (c.rollout.curriculum, 0),
      "task.workers": (c.task.workers, 0),
      "loss.micro_rows": (c.loss.micro_rows, 1),
      "loss.minibatches": (c.loss.minibatches, 1),
      "loss.epochs": (c.loss.epochs, 1),
      "loss.chunk": (c.loss.chunk, 1),
      "kl.probe_responses": (c.kl.probe_responses, 1),
      "evaluate.every": (c.evaluate.every, 1),
      "evaluate.prompts": (c.evaluate.prompts, 1),
      "checkpoint.every": (c.checkpoint.every, 1),
      "checkpoint.minutes": (c.checkpoint.minutes, 0),
      "checkpoint.keep": (c.checkpoint.keep, 1),
      "max_skipped": (c.max_skipped, 1),
  }
  for name, (value, minimum) in least.items():
    if not value >= minimum:
      raise ValueError(f"config.{name}={value} must be at least {minimum}")


def _check_rollout(c: ml_collections.ConfigDict) -> None:
  """How responses are sampled."""
  if not c.temperature > 0:
    raise ValueError(
        f"config.rollout.temperature={c.temperature} must be positive: greedy"
        " responses to one prompt are all the same"
    )
  if c.curriculum and c.curriculum < c.prompts:
    raise ValueError(
        f"config.rollout.curriculum={c.curriculum} examples must be at least"
        f" rollout.prompts={c.prompts}, or 0 for none"
    )
  if c.cache_dtype not in ("", "int8"):
    raise ValueError(
        f"config.rollout.cache_dtype={c.cache_dtype!r} must be '' or 'int8'"
    )
  checks = (
      lambda: sampling.of_config(c),
      lambda: overlong.check(c.overlong, c.max_new_tokens, c.overlong_buffer),
  )
  for check in checks:
    try:
      check()
    except ValueError as error:
      raise ValueError(f"config.rollout.{error}") from error


def _check_loss(config: ml_collections.ConfigDict) -> None:
  """The loss, and the rows that it is computed in."""
  c, r = config.loss, config.rollout
  checks = (
      lambda: losses.check(
          c.name,
          group_size=r.responses,
          clip_low=c.clip_low,
          clip_high=c.clip_high,
          reference_kl=c.reference_kl,
          reference_estimator=c.reference_estimator,
      ),
      lambda: correction.check(c.correction, c.correction_cap),
  )
  for check in checks:
    try:
      check()
    except ValueError as error:
      raise ValueError(f"config.loss: {error}") from error
  longest = r.max_prompt_tokens + r.max_new_tokens
  if not c.row_tokens or min(c.row_tokens) < longest:
    raise ValueError(
        f"config.loss.row_tokens={tuple(c.row_tokens)} must hold lengths of at"
        f" least {longest}: rollout.max_prompt_tokens + rollout.max_new_tokens"
    )
  if r.prompts % c.minibatches:
    raise ValueError(
        f"config.loss.minibatches={c.minibatches} must divide"
        f" rollout.prompts={r.prompts}"
    )
  batch = r.prompts // c.minibatches * r.responses
  if config.kl.probe_responses > batch:
    raise ValueError(
        f"config.kl.probe_responses={config.kl.probe_responses} is more than"
        f" a step has, {batch}"
    )


def check_mesh(config: ml_collections.ConfigDict, mesh: Mesh) -> None:
  """Raises ValueError where devices cannot have equal shares of the batch."""
  sizes = {
      "config.rollout.prompts": config.rollout.prompts,
      "config.loss.micro_rows": config.loss.micro_rows,
      "config.kl.probe_responses": config.kl.probe_responses,
  }
  for name, size in sizes.items():
    sharding.check_batch(name, size, mesh)
