"""`kl_budget`: an optax transformation that sizes a step by its KL."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from logra_jax import _finite, _state

_EMA_WEIGHT = 0.3  # of the newest sampler-trainer gap


class KLBudgetState(NamedTuple):
  """State of `kl_budget`; all but `inner` are scalars.

  Attributes:
    count: int32, updates so far, skipped ones included.
    predicted: float32, predicted KL of the proposed update, nats per token.
    budget: float32, the budget it was held against, nats per token.
    alpha: float32, what the update was scaled by; 0 if it was skipped.
    skipped: int32, steps skipped so far.
    mismatch: float32, running mean of the sampler-trainer gap, nats per token.
    inner: state of the wrapped transformation.
  """

  count: jax.Array
  predicted: jax.Array
  budget: jax.Array
  alpha: jax.Array
  skipped: jax.Array
  mismatch: jax.Array
  inner: Any


def _check_positive(name: str, value: Any) -> None:
  if callable(value) or isinstance(value, jax.core.Tracer):
    return
  scalar = isinstance(value, (int, float, np.number, np.ndarray, jax.Array))
  number = scalar and not isinstance(value, bool) and np.ndim(value) == 0
  if not (number and value > 0):
    raise ValueError(f"{name}={value!r} must be a positive number")


def cosine_budget(
    init_value: float, end_value: float, steps: int
) -> optax.Schedule:
  """A KL budget that falls along a half cosine, then stays.

  Args:
    init_value: budget of the first update, nats per token.
    end_value: budget from update `steps` on, nats per token.
    steps: updates between the two.

  Returns:
    A schedule for `kl_budget`. The published setting is (2e-4, 2e-5, 300).

  Raises:
    ValueError: a value or the number of steps is not positive.
  """
  _check_positive("init_value", init_value)
  _check_positive("end_value", end_value)
  if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
    raise ValueError(f"steps={steps!r} must be a positive int")
  return optax.cosine_decay_schedule(
      init_value, steps, alpha=end_value / init_value
  )


def _descend(update: Any) -> Any:
  """Turns a direction that no learning rate has signed into a descent step."""
  if not isinstance(update, _state.Update):
    return update
  return optax.tree.scale(jnp.where(update.scale > 0, -1.0, 1.0), update)


def _mismatch_mean(mean: jax.Array, gap: Any) -> jax.Array:
  """The running mean with a new gap; as it was where that is not finite."""
  gap = jnp.maximum(jnp.asarray(gap, jnp.float32), 0.0)
  new = (1 - _EMA_WEIGHT) * mean + _EMA_WEIGHT * gap
  return jnp.where(jnp.isfinite(new), new, mean)


def _alpha(limit: jax.Array, predicted: jax.Array, alpha_max: Any) -> jax.Array:
  """`min(alpha_max, √(limit / predicted))`; 1 where nothing moves."""
  # A quotient of roots, for that of huge numbers would underflow.
  root = jnp.sqrt(jnp.where(predicted > 0, predicted, 1.0))
  alpha = jnp.minimum(jnp.sqrt(limit) / root, alpha_max)
  return jnp.where(predicted > 0, alpha, 1.0)


def _limit(budget: Any, count: jax.Array, mismatch: jax.Array) -> jax.Array:
  """The budget of an update less the mismatch, but at least half of it."""
  limit = budget(count) if callable(budget) else budget
  limit = jnp.asarray(limit, jnp.float32)
  return jnp.maximum(limit - mismatch, 0.5 * limit)


def kl_budget(
    budget: float | optax.Schedule,
    inner: optax.GradientTransformation | None = None,
    *,
    alpha_max: float = 3.0,
) -> optax.GradientTransformationExtraArgs:
  """Rescales an update so that the policy moves by a given KL divergence.

  The KL of a step grows with its square, so with the KL predicted for the
  proposed update (`logra_jax.kl_probe`) the whole update is scaled by::

    α = min(alpha_max, √(budget / predicted))

  It works on any update tree: after `sketch`, after any optax chain, or around
  one given as `inner`. The form with `inner` also protects that chain's
  moments: its state is only replaced when the step is taken.

  | case | what happens |
  |---|---|
  | predicted KL is 0 | α = 1 |
  | predicted KL NaN, infinite or negative | step skipped |
  | an update, or (with inner) a gradient, not finite | step skipped |
  | a scheduled budget NaN or negative | step skipped |
  | `sketch` with no learning rate after it | its direction is negated |
  | budget infinite | α = alpha_max |

  A skipped step has zero updates and is counted in `skipped`; nothing in the
  state takes part of it but the counters and diagnostics.

  `update` takes `probe` (required), and `mismatch`: the mean log-probability
  gap sampler minus trainer, in nats per token of completed responses. Clipped
  at 0 it enters a running mean m (weight 0.3), and the budget becomes
  `max(budget - m, budget / 2)`. One that is not finite leaves m as it was.

  Args:
    budget: KL per update in nats per generated token, or a schedule of it over
      the update count.
    inner: transformation whose updates are scaled; default none.
    alpha_max: largest factor.

  Returns:
    An optax transformation; its state is a `KLBudgetState`.

  Raises:
    ValueError: at construction if budget or alpha_max is not positive; in
      `update` if probe is missing.

  Examples:
    >>> import logra_jax, optax
    >>> tx = optax.chain(optax.adamw(1e-5), logra_jax.kl_budget(1e-3))
    >>> guarded = logra_jax.kl_budget(1e-3, optax.adamw(1e-5))

  Reference: arXiv 2610.06647.
  """
  _check_positive("budget", budget)
  _check_positive("alpha_max", alpha_max)
  wrapped = optax.with_extra_args_support(inner or optax.identity())

  def init_fn(params):
    # Each field has a buffer of its own, so that the state can be donated.
    return KLBudgetState(
        count=jnp.zeros([], jnp.int32),
        predicted=jnp.zeros([], jnp.float32),
        budget=jnp.zeros([], jnp.float32),
        alpha=jnp.zeros([], jnp.float32),
        skipped=jnp.zeros([], jnp.int32),
        mismatch=jnp.zeros([], jnp.float32),
        inner=wrapped.init(params),
    )

  def update_fn(
      updates, state, params=None, *, probe=None, mismatch=0.0, **extra_args
  ):
    if probe is None:
      raise ValueError(
          "probe=None, but kl_budget needs a prediction; call"
          " tx.update(grads, opt_state, params, probe=logra_jax.kl_probe(...))"
      )
    ok = _finite.all_finite(updates)
    proposed, new_inner = wrapped.update(
        updates, state.inner, params, probe=probe, **extra_args
    )
    proposed = jax.tree.map(_descend, proposed, is_leaf=_state.is_update)
    # Made once: the step is what the probe saw, and the gradients can go.
    proposed = jax.lax.optimization_barrier(proposed)
    predicted = jnp.asarray(probe(proposed), jnp.float32)
    ok &= _finite.all_finite(proposed)
    ok &= _finite.none_lost(new_inner, state.inner)
    ok &= jnp.isfinite(predicted) & (predicted >= 0)
    ema = _mismatch_mean(state.mismatch, mismatch)
    limit = _limit(budget, state.count, ema)
    ok &= limit >= 0  # a schedule may go wrong as well
    alpha = jnp.where(ok, _alpha(limit, predicted, alpha_max), 0.0)
    scaled = optax.tree.scale(alpha, _finite.zero_unless(ok, proposed))
    return scaled, KLBudgetState(
        count=optax.safe_increment(state.count),
        predicted=predicted,
        budget=limit,
        alpha=alpha,
        skipped=jnp.where(
            ok, state.skipped, optax.safe_increment(state.skipped)
        ),
        mismatch=ema,
        inner=_finite.select(ok, new_inner, state.inner),
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
