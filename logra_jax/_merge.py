"""`apply_updates`: merges thin and dense updates into the weights."""

from typing import Any
import zlib

import jax
from jax import lax
import jax.numpy as jnp
import optax

from logra_jax import _paths, _state
from logra_jax._dense import accumulation_dtype
from logra_jax._targets import Target


def _round_to(
    x: jax.Array, dtype: jax.typing.DTypeLike, key: jax.Array
) -> jax.Array:
  """Casts `x`, with unbiased stochastic rounding to 16 bits.

  A number that the dtype can represent never changes. A number near the largest
  finite one is rounded to nearest, so that it does not become infinite.
  """
  if dtype == jnp.float16:
    return _round_between_neighbours(x, dtype, key)
  if dtype != jnp.bfloat16:
    return x.astype(dtype)
  # bfloat16 is the upper half of float32. Adding 16 random bits to the lower
  # half and then cutting it off rounds up with a probability equal to the
  # remainder.
  x = x.astype(jnp.float32)
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
  up = lax.bitcast_convert_type(
      (bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32
  )
  safe = jnp.isfinite(x) & jnp.isfinite(up)
  return jnp.where(safe, up, x).astype(dtype)


def _round_between_neighbours(
    x: jax.Array, dtype: jax.typing.DTypeLike, key: jax.Array
) -> jax.Array:
  """Rounds to one of the two nearest numbers, the nearer one more often."""
  x = x.astype(jnp.float32)
  near = x.astype(dtype)
  gap = x - near.astype(jnp.float32)
  way = jnp.where(gap > 0, jnp.inf, -jnp.inf).astype(dtype)
  far = jnp.nextafter(near, way)
  spacing = jnp.abs(far.astype(jnp.float32) - near.astype(jnp.float32))
  # The chance of the far one is the share of the spacing that x lies away.
  chance = jnp.abs(gap) / jnp.where(spacing > 0, spacing, 1.0)
  safe = jnp.isfinite(far) & jnp.isfinite(near)
  take_far = jax.random.uniform(key, x.shape, jnp.float32) < chance
  return jnp.where(safe & take_far, far, near)


def _merge_one(
    kernel: jax.Array,
    factor: jax.Array,
    decay: jax.Array,
    key_data: jax.Array,
    round_key: jax.Array,
    target: Target,
) -> jax.Array:
  """Computes `(1 + decay) W + Aᵀ D` of one matrix in float32, then casts."""
  basis = target.basis(key_data)
  # [d_in, d_out] = [rank, d_in]ᵀ @ [rank, d_out]
  delta = jnp.einsum(
      "ri,ro->io", basis, factor, precision=lax.Precision.HIGHEST
  ).reshape(kernel.shape)
  wide = accumulation_dtype(kernel.dtype)
  merged = (1 + decay).astype(wide) * kernel.astype(wide) + delta.astype(wide)
  return _round_to(merged, kernel.dtype, round_key)


def _merge(
    kernel: jax.Array,
    factor: jax.Array,
    decay: jax.Array,
    key_data: jax.Array,
    round_key: jax.Array,
    target: Target,
) -> jax.Array:
  """Merges a stack of matrices one after the other, in place.

  The loop writes into the stack instead of returning a new one, so that the
  compiler can reuse the memory of the donated weights.
  """
  if not target.batch:
    return _merge_one(kernel, factor, decay, key_data, round_key, target)
  n = len(target.batch)
  stack = kernel.reshape(-1, *kernel.shape[n:])
  factor = factor.reshape(-1, *factor.shape[n:])
  key_data = key_data.reshape(-1, 2)

  def body(i, stack):
    key = jax.random.fold_in(round_key, i)
    return stack.at[i].set(
        _merge_one(stack[i], factor[i], decay, key_data[i], key, target)
    )

  return lax.fori_loop(0, stack.shape[0], body, stack).reshape(kernel.shape)


def apply_updates(
    params: optax.Params, updates: optax.Updates, opt_state: optax.OptState
) -> optax.Params:
  """Applies updates to the parameters: `W ← W + Aᵀ D` for targets.

  Like `optax.apply_updates`, but it also merges thin updates. Factors are
  rounded to `factor_dtype` (see `sketch`), and the sum is computed in float32
  and cast to the dtype of the parameter. A 16-bit parameter is rounded
  stochastically, without bias, because rounding to nearest would lose every
  step smaller than half a unit in the last place. The noise is a function of
  (seed, update count, path). A chain without any counter would repeat it, so
  the chain should contain `sketch` or `kl_budget`.

  Args:
    params: The parameter tree, in any float dtypes.
    updates: The updates returned by `tx.update`; `tx` need not contain
      `sketch`.
    opt_state: The state returned by the same `tx.update`.

  Returns:
    The new parameters, with the structure, shapes and dtypes of `params`.

  Raises:
    ValueError: If `updates` does not fit `params` or the targets in
      `opt_state`.

  Examples:
    >>> import jax.numpy as jnp, logra_jax, optax
    >>> params = {'q_proj': {'kernel': jnp.zeros((8, 6))}}
    >>> tx = optax.chain(
    ...     logra_jax.sketch(rank=4), optax.scale_by_learning_rate(1e-3))
    >>> grads = {'q_proj': {'kernel': jnp.ones((4, 6))}}
    >>> updates, opt_state = tx.update(grads, tx.init(params), params)
    >>> updates['q_proj']['kernel'].value.shape
    (4, 6)
    >>> new_params = logra_jax.apply_updates(params, updates, opt_state)
    >>> new_params['q_proj']['kernel'].shape
    (8, 6)
  """
  flat, treedef = _paths.flatten(params)
  flat_updates, _ = _paths.flatten(updates, is_leaf=_state.is_update)
  targets: dict[str, Any] = {}
  for state in _state.find_states(opt_state, _state.SketchState):
    last = state.count - 1  # `update` has already counted this step
    keys = state.keys(last)
    targets |= {t.path: (t, keys[t.path], state) for t in state.plan.targets}
  rounding = _rounding_key(opt_state)
  merged = []
  for path, leaf in flat.items():
    if path not in flat_updates:
      raise ValueError(
          f"updates has no entry at {path!r}; it must have the same structure"
          " as params: pass what tx.update returned"
      )
    update = flat_updates[path]
    round_key = jax.random.fold_in(rounding, zlib.crc32(path.encode()))
    if path in targets and update is not None:
      target, key, state = targets[path]
      if not isinstance(update, _state.Update):
        raise ValueError(
            f"updates has {type(update).__name__} at the target {path!r}, which"
            " is not a logra_jax.Update; pass what tx.update returned"
        )
      factor = update.value.astype(state.plan.factor_dtype)
      factor = factor.astype(jnp.float32)
      decay = state.weight_decay * update.scale
      leaf = _merge(leaf, factor, decay, key, round_key, target)
    elif update is not None:
      value = update.value if isinstance(update, _state.Update) else update
      wide = accumulation_dtype(leaf.dtype)
      total = leaf.astype(wide) + value.astype(wide)
      leaf = _round_to(total, leaf.dtype, round_key)
    merged.append(leaf)
  return jax.tree.unflatten(treedef, merged)


def _rounding_key(opt_state: optax.OptState) -> jax.Array:
  """Derives a key from all seeds and counters: new noise for every update."""
  key = jax.random.key(0, impl="threefry2x32")
  for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
    name = _paths.path_string(path).split("/")[-1]
    # A parameter can have such a name too, but its moments are not counters.
    counts = leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jnp.integer)
    if counts and name in ("seed", "count", "gradient_step"):
      key = jax.random.fold_in(key, leaf)
  return key
