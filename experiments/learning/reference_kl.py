"""Estimates of the KL divergence to a reference policy, from sampled tokens."""

from collections.abc import Callable

import jax
from jax import lax
import jax.numpy as jnp

from experiments.learning.objectives import MAX_LOG_RATIO

# Estimates of KL(π ‖ π_ref) from one token, as functions of
# d = log π - log π_ref.


def _k1(d: jax.Array) -> jax.Array:
  """d, with the gradient that k1 has as a part of the reward."""
  fixed = lax.stop_gradient(d)
  return fixed + fixed * (d - fixed)


def _k2(d: jax.Array) -> jax.Array:
  """d² / 2."""
  return 0.5 * jnp.square(d)


def _k3(d: jax.Array) -> jax.Array:
  """exp(-d) - 1 + d, never negative."""
  return jnp.expm1(-d) + d


ESTIMATORS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
}


def estimate(d: jax.Array, estimator: str) -> jax.Array:
  """Estimates KL(π ‖ π_ref) from tokens sampled from π.

  The values are those of J. Schulman, "Approximating KL Divergence" (2020), but
  what a penalty does depends on the gradients. For tokens sampled from π, with
  the states taken as given:

  | name | value | gradient, times ∇log π | descends |
  |---|---|---|---|
  | k1 | d, unbiased, may be negative | d | KL(π ‖ π_ref), unbiased |
  | k2 | d²/2, biased, ≥ 0 | d | KL(π ‖ π_ref), unbiased |
  | k3 | e^-d - 1 + d, unbiased, ≥ 0 | 1 - e^-d | KL(π_ref ‖ π) |

  The derivative of d itself is ∇log π, whose mean is 0: k1 as a plain term of
  the loss would add noise and no penalty. Here it has the gradient that it has
  as a part of the reward. The gradient of k3 is that of GRPO, and equals that
  of k2 to first order in d. With tokens of an older policy all three are
  biased, because its ratio to π is left out.

  Args:
    d: log π - log π_ref at the tokens, float32; clamped to ±20.
    estimator: A name in `ESTIMATORS`: k1, k2 or k3.

  Returns:
    Nats per token, in the shape of `d`.

  Raises:
    ValueError: If the estimator is unknown.
  """
  check_estimator(estimator)
  return ESTIMATORS[estimator](jnp.clip(d, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def check_estimator(name: str) -> None:
  """Raises ValueError for an unknown estimator."""
  if name not in ESTIMATORS:
    raise ValueError(
        f"reference_estimator must be one of {', '.join(ESTIMATORS)}, got"
        f" {name!r}"
    )
