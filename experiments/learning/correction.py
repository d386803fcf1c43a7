"""Importance weights for a sampler whose log-probs differ from the trainer's.

With another precision, an int8 cache or another engine, the sampler gives a
token a different probability than the trainer does, although the weights are
the same. Samples from π_sampler estimate expectations under π_trainer if each
has the weight π_trainer / π_sampler. These weights are truncated because their
variance is unbounded.

Axis letters: G rows, K token slots, packed as in `objectives.Tokens`.
"""

import jax
from jax import lax
import jax.numpy as jnp

from experiments.learning.objectives import MAX_LOG_RATIO, response_sums

KINDS = ("none", "token", "sequence")


def check(kind: str, cap: float) -> None:
  """Raises ValueError for an unknown kind or a cap below 1."""
  if kind not in KINDS:
    raise ValueError(
        f"correction must be one of {', '.join(KINDS)}, got {kind!r}"
    )
  if not cap >= 1:
    raise ValueError(
        f"correction_cap must be at least 1, got {cap}: a lower cap would"
        " shrink the weights of tokens on which sampler and trainer agree"
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

  Multiply them into `Tokens.weights`, and let `Tokens.old_log_probs` be those
  of the trainer. See F. Yao et al., "Your Efficient RL Framework Secretly
  Brings You Off-Policy RL Training" (2025). The kinds are:

  | kind | ratio of | |
  |---|---|---|
  | none | | always 1: trusts the sampler's log-probs |
  | token | the token | biased: the sampler chose the earlier tokens too |
  | sequence | the response | unbiased below the cap, with most variance |

  A sampler that leaves out tokens (top-k, top-p) gives the others a higher
  probability than the trainer does: their weights are below 1, and the gap is
  above 0.

  Losses whose objective is that of a response (gspo, rloo) spread it evenly
  over its tokens. With the kind `token` they therefore weigh it by the mean
  over these tokens.

  Args:
    sampler_log_probs: Log-probs under the distribution that was sampled from,
      `[G, K]` float.
    trainer_log_probs: Log-probs under the trainer with the same weights,
      `[G, K]` float.
    mask: True at generated tokens, `[G, K]` bool. Other slots are ignored.
    response: Number of each token's response, `[G, K]` int32, as in
      `objectives.Tokens`.
    kind: One of `KINDS`.
    cap: Largest weight, at least 1; infinity for no truncation. 2 is usual.

  Returns:
    `[G, K]` float32 without gradient, 0 outside the mask.

  Raises:
    ValueError: If `check` refuses the kind or the cap.
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
  """Measures how far sampler and trainer are apart, over a whole batch.

  Args:
    sampler_log_probs: See `weights`.
    trainer_log_probs: See `weights`.
    mask: See `weights`.
    response: See `weights`.
    finished: True at tokens of responses that ended by themselves, `[G, K]`
      bool.
    kind: See `weights`.
    cap: See `weights`.

  Returns:
    float32 scalars, 0 if there are no tokens to average over:

    *   `gap`: mean of log π_sampler - log π_trainer in nats over the tokens of
        finished responses, which `kl_budget` takes as `mismatch`.
    *   `gap_max`: largest magnitude of this difference at any token.
    *   `kl`: the estimate ρ - 1 - log ρ of KL(π_sampler ‖ π_trainer), in nats
        per token.
    *   `truncated`: fraction of tokens whose weight the cap lowered.
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


def _log_ratio(
    sampler_log_probs: jax.Array, trainer_log_probs: jax.Array, mask: jax.Array
) -> jax.Array:
  """log π_trainer - log π_sampler, clamped, 0 outside the mask, no gradient."""
  sampler, trainer = (
      jnp.where(mask, x, 0.0).astype(jnp.float32)
      for x in (sampler_log_probs, trainer_log_probs)
  )
  limit = MAX_LOG_RATIO
  return lax.stop_gradient(jnp.clip(trainer - sampler, -limit, limit))


def _ratio(
    sampler_log_probs: jax.Array,
    trainer_log_probs: jax.Array,
    mask: jax.Array,
    response: jax.Array,
    kind: str,
) -> jax.Array:
  """The weights before truncation, not masked."""
  log_ratio = _log_ratio(sampler_log_probs, trainer_log_probs, mask)
  if kind == "none":
    return jnp.ones_like(log_ratio)
  if kind == "sequence":
    response = jnp.where(mask, response, -1)
    total = response_sums(log_ratio, response)
    log_ratio = jnp.clip(total, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  return jnp.exp(log_ratio)
