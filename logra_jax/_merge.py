"""`apply_updates`: merges thin and dense updates into the weights."""

from typing import Any
import zlib

import jax
from jax import lax
import jax.numpy as jnp

from logra_jax import _paths, _state
from logra_jax._targets import Target


def _round_to(x: jax.Array, dtype: Any, key: jax.Array) -> jax.Array:
  """Casts float32 `x`; to bfloat16 stochastically, unbiased.

  bfloat16 is the upper half of a float32: adding 16 random bits below and
  cutting there rounds up with probability equal to the remainder. A number
  that bfloat16 holds is never changed; one near the largest finite number is
  rounded to nearest, so that none becomes infinite by chance.
  """
  if dtype != jnp.bfloat16:
    return x.astype(dtype)
  x = x.astype(jnp.float32)
  bits = lax.bitcast_convert_type(x, jnp.uint32)
  noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
  up = lax.bitcast_convert_type(
      (bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32
  )
  safe = jnp.isfinite(x) & jnp.isfinite(up)
  return jnp.where(safe, up, x).astype(dtype)


def _merge_one(
    kernel, factor, decay, key_data, round_key, target: Target
) -> jax.Array:
  """`W + Aᵀ D + decay · W` of one matrix, in float32, then cast."""
  basis = target.basis(key_data)
  # [d_in, d_out] = [rank, d_in]ᵀ @ [rank, d_out]
  delta = jnp.einsum(
      "ri,ro->io", basis, factor, precision=lax.Precision.HIGHEST
  ).reshape(kernel.shape)
  wide = jnp.promote_types(kernel.dtype, jnp.float32)
  merged = (1 + decay) * kernel.astype(wide) + delta
  return _round_to(merged, kernel.dtype, round_key)


def _merge(
    kernel, factor, decay, key_data, round_key, target: Target
) -> jax.Array:
  """Merges a stack of matrices one after the other, in place.

  A loop that writes into the stack, rather than one that returns a new stack,
  is what lets the compiler reuse the donated weights.
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


def apply_updates(params: Any, updates: Any, opt_state: Any) -> Any:
  """Adds updates to parameters: `W ← W + Aᵀ D` for targets.

  Like `optax.apply_updates`, with thin updates merged. Factors are rounded to
  `factor_dtype` (see `sketch`), the sum is made in float32 and cast to the
  parameter's dtype. A bfloat16 parameter is rounded stochastically, without
  bias: rounded to nearest, steps smaller than half a unit in the last place
  would all be lost. The rounding is a function of (seed, update count, path);
  a chain without any count repeats its noise, so have `sketch` or `kl_budget`
  in it.

  Args:
    params: the parameter tree, in any float dtypes.
    updates: what `tx.update` returned, with `sketch` in `tx` or not.
    opt_state: the state that the same `tx.update` returned.

  Returns:
    The new parameters; structure, shapes and dtypes are those of `params`.

  Raises:
    ValueError: updates is not what `tx.update` returns for such parameters.
  """
  flat, treedef = _paths.flatten(params)
  flat_updates, _ = _paths.flatten(updates, is_leaf=_state.is_update)
  targets: dict[str, Any] = {}
  for state in _state.find_states(opt_state, _state.SketchState):
    last = state.count - 1  # `update` has counted the step being merged
    keys = state.keys(last)
    targets |= {t.path: (t, keys[t.path], state) for t in state.plan.targets}
  rounding = _rounding_key(opt_state)
  merged = []
  for path, leaf in flat.items():
    if path not in flat_updates:
      raise ValueError(
          f"updates has nothing at {path!r}; it must have the same structure as"
          " params: pass what tx.update returned"
      )
    update = flat_updates[path]
    round_key = jax.random.fold_in(rounding, zlib.crc32(path.encode()))
    if path in targets and update is not None:
      target, key, state = targets[path]
      if not isinstance(update, _state.Update):
        raise ValueError(
            f"updates has {type(update).__name__} at the target {path!r}, which"
            " is no logra_jax.Update; pass what tx.update returned"
        )
      factor = update.value.astype(state.plan.factor_dtype)
      factor = factor.astype(jnp.float32)
      decay = state.weight_decay * update.scale
      leaf = _merge(leaf, factor, decay, key, round_key, target)
    elif update is not None:
      value = update.value if isinstance(update, _state.Update) else update
      wide = jnp.promote_types(leaf.dtype, jnp.float32)
      total = leaf.astype(wide) + value.astype(wide)
      leaf = _round_to(total, leaf.dtype, round_key)
    merged.append(leaf)
  return jax.tree.unflatten(treedef, merged)


def _rounding_key(opt_state: Any) -> jax.Array:
  """A key of all seeds and counts in the state: new noise for every update."""
  key = jax.random.key(0, impl="threefry2x32")
  for path, leaf in jax.tree_util.tree_leaves_with_path(opt_state):
    name = _paths.path_string(path).split("/")[-1]
    # A parameter may bear such a name too; its moments are no counters.
    counts = leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jnp.integer)
    if counts and name in ("seed", "count", "gradient_step"):
      key = jax.random.fold_in(key, leaf)
  return key
