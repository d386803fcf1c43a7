"""`kl_budget`: an optax transformation that sizes a step by its KL."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from logra_jax import _finite, _state

_EMA_WEIGHT = 0.3  # weight of the newest sampler-trainer gap


class KLBudgetState(NamedTuple):
  """State of `kl_budget`. All fields but `inner` are scalars.

  Attributes:
    count: Number of updates so far, including skipped ones, int32.
    predicted: KL predicted for the last proposed update, in nats per token,
      float32.
    budget: Budget that `predicted` was compared with, in nats per token,
      float32.
    alpha: Factor that scaled the last update, 0 if it was skipped, float32.
    skipped: Number of skipped steps so far, int32.
    mismatch: Running mean of the sampler-trainer gap, in nats per token,
      float32.
    inner: State of the wrapped transformation.
  """

  count: jax.Array
  predicted: jax.Array
  budget: jax.Array
  alpha: jax.Array
  skipped: jax.Array
  mismatch: jax.Array
  inner: optax.OptState


def _check_positive(name: str, value: Any) -> None:
  """Raises ValueError unless `value` is a positive scalar, if it is known."""
  if callable(value) or isinstance(value, jax.core.Tracer):
    return
  scalar = isinstance(value, (int, float, np.number, np.ndarray, jax.Array))
  number = scalar and not isinstance(value, bool) and np.ndim(value) == 0
  if not (number and value > 0):
    raise ValueError(f"{name}={value!r} must be a positive number")


def cosine_budget(
    init_value: float, end_value: float, steps: int
) -> optax.Schedule:
  """A KL budget that decays along a half cosine and then stays constant.

  Args:
    init_value: Budget of the first update, in nats per token.
    end_value: Budget from update `steps` on, in nats per token.
    steps: Number of updates over which the budget decays.

  Returns:
    A schedule for `kl_budget`. The published setting is (2e-4, 2e-5, 300).

  Raises:
    ValueError: If a value or the number of steps is not positive.

  Examples:
    >>> import logra_jax
    >>> schedule = logra_jax.cosine_budget(2e-4, 2e-5, 300)
    >>> [f'{float(schedule(count)):.1e}' for count in (0, 150, 300, 1000)]
    ['2.0e-04', '1.1e-04', '2.0e-05', '2.0e-05']
  """
  _check_positive("init_value", init_value)
  _check_positive("end_value", end_value)
  whole = isinstance(steps, (int, np.integer)) and not isinstance(steps, bool)
  if not whole or steps < 1:
    raise ValueError(f"steps={steps!r} must be a positive int")
  return optax.cosine_decay_schedule(
      init_value, steps, alpha=end_value / init_value
  )


def _descend(update: Any) -> Any:
  """Negates a direction to which no learning rate has been applied."""
  if not isinstance(update, _state.Update):
    return update
  return optax.tree.scale(jnp.where(update.scale > 0, -1.0, 1.0), update)


def _moves(updates: optax.Updates) -> jax.Array:
  """Returns a bool scalar: whether any update is not zero."""
  values = [
      update.value if isinstance(update, _state.Update) else update
      for update in jax.tree.leaves(updates, is_leaf=_state.is_update)
  ]
  moved = [jnp.any(x != 0) for x in values if x is not None]
  return functools.reduce(jnp.logical_or, moved, jnp.bool_(False))


def _mismatch_mean(mean: jax.Array, gap: jax.typing.ArrayLike) -> jax.Array:
  """Updates the running mean with a gap, unless the result is not finite."""
  gap = jnp.maximum(jnp.asarray(gap, jnp.float32), 0.0)
  new = (1 - _EMA_WEIGHT) * mean + _EMA_WEIGHT * gap
  return jnp.where(jnp.isfinite(new), new, mean)


def _alpha(
    limit: jax.Array, predicted: jax.Array, alpha_max: jax.typing.ArrayLike
) -> jax.Array:
  """Returns `min(alpha_max, √(limit / predicted))`, and 1 for a KL of 0."""
  # Divide the roots: limit / predicted underflows for a huge prediction.
  root = jnp.sqrt(jnp.where(predicted > 0, predicted, 1.0))
  alpha = jnp.minimum(jnp.sqrt(limit) / root, alpha_max)
  return jnp.where(predicted > 0, alpha, 1.0)


def _scheduled(
    value: jax.typing.ArrayLike | optax.Schedule, count: jax.Array
) -> jax.Array:
  """Returns a constant, or the value of a schedule at `count`, in float32."""
  return jnp.asarray(value(count) if callable(value) else value, jnp.float32)


def _initial_state(inner: optax.OptState) -> KLBudgetState:
  """Returns the state before the first update."""
  # Every field gets its own buffer, so that the state can be donated.
  return KLBudgetState(
      count=jnp.zeros([], jnp.int32),
      predicted=jnp.zeros([], jnp.float32),
      budget=jnp.zeros([], jnp.float32),
      alpha=jnp.zeros([], jnp.float32),
      skipped=jnp.zeros([], jnp.int32),
      mismatch=jnp.zeros([], jnp.float32),
      inner=inner,
  )


def _limit(
    budget: jax.typing.ArrayLike | optax.Schedule,
    count: jax.Array,
    mismatch: jax.Array,
) -> jax.Array:
  """Returns the budget less the mismatch, but at least half the budget."""
  limit = _scheduled(budget, count)
  return jnp.maximum(limit - mismatch, 0.5 * limit)


def kl_budget(
    budget: jax.typing.ArrayLike | optax.Schedule,
    inner: optax.GradientTransformation | None = None,
    *,
    alpha_max: jax.typing.ArrayLike | optax.Schedule = 3.0,
) -> optax.GradientTransformationExtraArgs:
  """Rescales an update so that the policy moves by a given KL divergence.

  The KL of a step grows with the square of the step. Given the KL predicted for
  the proposed update (see `logra_jax.kl_probe`), the whole update is therefore
  scaled by::

    α = min(alpha_max, √(budget / predicted))

  It works on any tree of updates: after `sketch`, after any optax chain, or
  around a chain given as `inner`. The form with `inner` also protects the
  moments of that chain, whose state is only replaced if the step is taken.

  | case | result |
  |---|---|
  | the update is zero | α = 1 |
  | the predicted KL of a non-zero update is 0 | the step is skipped |
  | the predicted KL is NaN, infinite or negative | the step is skipped |
  | an update or, with `inner`, a gradient is not finite | the step is skipped |
  | a scheduled budget or `alpha_max` is NaN or negative | the step is skipped |
  | a scheduled budget is 0 | the step is zero |
  | `sketch` without a learning rate after it | its direction is negated |
  | the budget is infinite | α = alpha_max |

  A prediction of exactly 0 for a step that moves parameters means that the
  probe's functions do not depend on the parameters that they are given, as when
  `logits_fn` closes over other ones.

  A skipped step has zero updates and is counted in `skipped`. Apart from
  counters and diagnostics it leaves the state unchanged.

  The `update` function takes two extra arguments by keyword. `probe` is
  required: a function from updates to their predicted KL. `mismatch` is
  optional: the mean log-probability gap, sampler minus trainer, in nats per
  token of completed responses. It is clipped at 0 and enters a running mean m
  with weight 0.3, and the budget becomes `max(budget - m, budget / 2)`. A gap
  that is not finite leaves m unchanged.

  Args:
    budget: KL per update, in nats per generated token, or a schedule of it
      over the update count.
    inner: Transformation whose updates are scaled. None scales the updates
      that are passed in.
    alpha_max: Upper bound of α, or a schedule of it over the update count.

  Returns:
    An optax transformation whose state is a `KLBudgetState`.

  Raises:
    ValueError: If `budget` or `alpha_max` is not positive, or, from `update`,
      if `probe` is missing.

  Examples:
    >>> import jax.numpy as jnp, logra_jax, optax
    >>> tx = optax.chain(optax.sgd(1.0), logra_jax.kl_budget(1e-3))
    >>> params = {'w': jnp.array([2.0])}
    >>> updates, opt_state = tx.update(
    ...     params, tx.init(params), params, probe=lambda updates: 4e-3)
    >>> print(updates['w'], opt_state[-1].alpha)
    [-1.] 0.5

    To protect the moments of the optimizer as well, pass it as `inner`:

    >>> tx = logra_jax.kl_budget(1e-3, optax.adamw(1e-5))

  References:
    LoGRA, arXiv 2610.06647.
  """
  _check_positive("budget", budget)
  _check_positive("alpha_max", alpha_max)
  wrapped = optax.with_extra_args_support(inner or optax.identity())

  def init_fn(params):
    return _initial_state(wrapped.init(params))

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
    # Without the barrier XLA would compute the update twice, for the probe and
    # for the step, and keep the gradients in memory in between.
    proposed = jax.lax.optimization_barrier(proposed)
    predicted = jnp.asarray(probe(proposed), jnp.float32)
    ok &= _finite.all_finite(proposed)
    ok &= _finite.none_lost(new_inner, state.inner)
    ok &= jnp.isfinite(predicted) & (predicted >= 0)
    ema = _mismatch_mean(state.mismatch, mismatch)
    limit = _limit(budget, state.count, ema)
    bound = _scheduled(alpha_max, state.count)
    ok &= (limit >= 0) & (bound >= 0)  # False for schedules that return NaN
    # A step that moves parameters moves the policy. If the probe does not see
    # it, its functions ignore their parameters, and nothing bounds the step.
    ok &= (predicted > 0) | ~_moves(proposed)
    alpha = jnp.where(ok, _alpha(limit, predicted, bound), 0.0)
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
