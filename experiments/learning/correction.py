"""Correction for a sampler whose log-probs are not the trainer's.

Another precision, an int8 cache or another engine give a token another
probability than the trainer does with the same weights. Samples of π_sampler
estimate what π_trainer would do once each weighs π_trainer / π_sampler; these
weights are truncated, for their variance has no bound.

Axis letters: G rows, K token slots, packed as in `objectives.Tokens`.
"""

import jax
from jax import lax
import jax.numpy as jnp

from experiments.learning.objectives import MAX_LOG_RATIO, response_sums

KINDS = ("none", "token", "sequence")


def check(kind: str, cap: float) -> None:
  """Raises ValueError for a kind that is none or a cap below 1."""
  if kind not in KINDS:
    raise ValueError(
        f"correction must be one of {', '.join(KINDS)}, got {kind!r}"
    )
  if not cap >= 1:
    raise ValueError(
        f"correction_cap must be at least 1, got {cap}: a lower one would"
        " shrink the weights of tokens on which both agree"
    )


def weights(
    sampler_log_probs: jax.Array,
    trainer_log_probs: jax.Array,
    mask: jax.Array,
    response: jax.Array,
    *,
    kind: str,
    cap: float,
) -> jax.Array:
  """Truncated importance weights of tokens, `min(π_trainer / π_sampler, cap)`.

  Multiplied into `Tokens.weights`, with `Tokens.old_log_probs` the trainer's;
  F. Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
  Training" (2025). Kinds:

  | kind | ratio of | |
  |---|---|---|
  | none | | 1: the sampler's log-probs are taken at their word |
  | token | the token | biased: the state came from the sampler too |
  | sequence | the response | unbiased below the cap; varies most |

  A sampler that leaves tokens out (top-k, top-p) gives the others more than the
  trainer does; their weights are below 1 for it, and the gap is above 0.

  Losses whose objective is that of a response (gspo, rloo) spread it over its
  tokens evenly: with `token` they weigh it by the mean over its tokens.

  Args:
    sampler_log_probs: `[G, K]` float, of the distribution sampled from.
    trainer_log_probs: `[G, K]` float, under the trainer's weights of the same
      time.
    mask: `[G, K]` bool, True at generated tokens. Nothing elsewhere counts.
    response: `[G, K]` int32, as in `objectives.Tokens`.
    kind: of `KINDS`.
    cap: at least 1; infinity for no truncation. 2 is usual.

  Returns:
    `[G, K]` float32 without gradient, 0 outside the mask.

  Raises:
    ValueError: see `check`.
  """
  check(kind, cap)
  ratio = _ratio(sampler_log_probs, trainer_log_probs, mask, response, kind)
  return jnp.where(mask, jnp.minimum(ratio, cap), 0.0)


def gap_metrics(
    sampler_log_probs: jax.Array,
    trainer_log_probs: jax.Array,
    mask: jax.Array,
    response: jax.Array,
    finished: jax.Array,
    *,
    kind: str,
    cap: float,
) -> dict[str, jax.Array]:
  """How far sampler and trainer are apart, over a whole batch.

  Args:
    sampler_log_probs: see `weights`.
    trainer_log_probs: see `weights`.
    mask: see `weights`.
    response: see `weights`.
    finished: `[G, K]` bool, True at tokens of responses that ended by
      themselves.
    kind: see `weights`.
    cap: see `weights`.

  Returns:
    float32 scalars, 0 where there is no such token: `gap`, the mean of
    log π_sampler - log π_trainer over tokens of finished responses in nats,
    which is what `kl_budget` takes as `mismatch`; `gap_max`, the largest
    magnitude of it at any token; `kl`, the estimate ρ - 1 - log ρ of
    KL(π_sampler ‖ π_trainer) in nats per token; `truncated`, the fraction of
    tokens whose weight the cap lowered.
  """
  check(kind, cap)
  log_ratio = _log_ratio(sampler_log_probs, trainer_log_probs, mask)
  ratio = _ratio(sampler_log_probs, trainer_log_probs, mask, response, kind)

  def mean(x, where):
    total = jnp.sum(jnp.where(where, x, 0.0))
    return total / jnp.maximum(jnp.sum(where, dtype=jnp.float32), 1.0)

  return {
      "gap": mean(-log_ratio, mask & finished),
      "gap_max": jnp.max(jnp.abs(log_ratio), initial=0.0),
      "kl": mean(jnp.expm1(log_ratio) - log_ratio, mask),
      "truncated": mean((ratio > cap).astype(jnp.float32), mask),
  }


def _log_ratio(sampler_log_probs, trainer_log_probs, mask):
  """log π_trainer - log π_sampler, clamped, 0 outside the mask, no gradient."""
  sampler, trainer = (
      jnp.where(mask, x, 0.0).astype(jnp.float32)
      for x in (sampler_log_probs, trainer_log_probs)
  )
  limit = MAX_LOG_RATIO
  return lax.stop_gradient(jnp.clip(trainer - sampler, -limit, limit))


def _ratio(sampler_log_probs, trainer_log_probs, mask, response, kind):
  """What the weights are before truncation."""
  log_ratio = _log_ratio(sampler_log_probs, trainer_log_probs, mask)
  if kind == "none":
    return jnp.ones_like(log_ratio)
  if kind == "sequence":
    response = jnp.where(mask, response, -1)
    total = response_sums(log_ratio, response)
    log_ratio = jnp.clip(total, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  return jnp.exp(log_ratio)
