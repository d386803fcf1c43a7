"""Estimates of the KL divergence to a reference policy, from sampled tokens."""

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp

from experiments.learning.objectives import MAX_LOG_RATIO

# Estimates of KL(π ‖ reference) from one token, by d = log π - log π_ref.


def _k1(d):
  """d, with the gradient that k1 has as a part of the reward."""
  fixed = lax.stop_gradient(d)
  return fixed + fixed * (d - fixed)


def _k2(d):
  """d² / 2."""
  return 0.5 * jnp.square(d)


def _k3(d):
  """exp(-d) - 1 + d, never negative."""
  return jnp.expm1(-d) + d


ESTIMATORS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
}


def estimate(d: jax.Array, estimator: str) -> jax.Array:
  """An estimate of KL(π ‖ π_ref) from tokens of π.

  Values are those of J. Schulman, "Approximating KL Divergence" (2020); what a
  penalty does is decided by gradients. With tokens of π, states taken as given:

  | name | value | gradient, times ∇log π | descends |
  |---|---|---|---|
  | k1 | d, unbiased, may be negative | d | KL(π ‖ π_ref), unbiased |
  | k2 | d²/2, biased, ≥ 0 | d | KL(π ‖ π_ref), unbiased |
  | k3 | e^-d - 1 + d, unbiased, ≥ 0 | 1 - e^-d | KL(π_ref ‖ π) |

  The derivative of d itself is ∇log π, of mean 0: as a plain term of the loss
  k1 would be noise and no penalty. It has the gradient here that it has as a
  part of the reward. k3's gradient is that of k2 to first order in d, and
  GRPO's. Tokens of an older policy make all three biased by its ratio.

  Args:
    d: float32, log π - log π_ref at the tokens; clamped to ±20.
    estimator: k1, k2 or k3.

  Returns:
    Nats per token, of d's shape.

  Raises:
    ValueError: for another estimator.
  """
  check_estimator(estimator)
  return ESTIMATORS[estimator](jnp.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def check_estimator(name):
  """Refuses an estimator that there is not."""
  if name not in ESTIMATORS:
    raise ValueError(
        f"reference_estimator must be one of {', '.join(ESTIMATORS)}, got"
        f" {name!r}"
    )
