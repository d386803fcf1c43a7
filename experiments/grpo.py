"""Names that have moved to `advantages`, `likelihood` and `losses`."""

import jax
import jax.numpy as jnp

from experiments import losses
from experiments.advantages import group_advantages
from experiments.likelihood import token_statistics
from experiments.losses import merge_metrics

__all__ = [
    "group_advantages",
    "grpo_loss",
    "merge_metrics",
    "token_statistics",
]


def grpo_loss(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    completion_mask: jax.Array,
    clip_low: float,
    clip_high: float,
    normalizer: float | jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """`losses.policy_loss("dapo", ...)` of one response a row."""
  shape = completion_mask.shape
  if advantages.shape != shape[:1]:
    raise ValueError(
        f"advantages must have shape {shape[:1]}, got {advantages.shape}"
    )
  tokens = losses.Tokens(
      mask=completion_mask,
      response=jnp.zeros(shape, jnp.int32),
      old_log_probs=old_log_probs,
      advantages=jnp.broadcast_to(advantages[:, None], shape),
      weights=jnp.broadcast_to(jnp.float32(1) / normalizer, shape),
  )
  return losses.policy_loss(
      "dapo", log_probs, tokens, clip_low=clip_low, clip_high=clip_high
  )
