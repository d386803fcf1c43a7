"""`init`: a state for chains that keep one number for each coordinate."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from logra_jax import _paths, _state


def _has_sketch(state: Any) -> bool:
  return bool(_state.find_states(state, _state.SketchState))


def _thin_leaves(state: Any, plans: list[_state.Plan], after: bool) -> Any:
  """Replaces the arrays that stand for parameters by what updates have."""
  targets = {t.path: t for plan in plans for t in plan.targets}
  dense = {path for plan in plans for path in plan.dense}
  frozen = {path for plan in plans for path in plan.frozen}
  leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
  out = []
  for key_path, leaf in leaves:
    where = "/" + _paths.path_string(key_path)
    owner = next(
        (p for p in (*targets, *dense, *frozen) if where.endswith("/" + p)),
        None,
    )
    if owner in frozen:
      leaf = None
    elif owner is not None:
      if owner in targets and leaf.shape == targets[owner].shape:
        leaf = jnp.full(targets[owner].thin, 0, jnp.float32)
      if after:
        leaf = _state.Update(leaf, jnp.zeros([], jnp.float32))
    out.append(leaf)
  return jax.tree.unflatten(treedef, out)


def _thin(state: Any, plans: list[_state.Plan], after: bool = False) -> Any:
  if isinstance(state, _state.SketchState):
    return state
  if not _has_sketch(state):
    return _thin_leaves(state, plans, after)
  if isinstance(state, dict) or type(state) is tuple:
    # A chain: what comes after `sketch` sees what `sketch` emits.
    items = state.items() if isinstance(state, dict) else enumerate(state)
    out = {}
    for name, child in items:
      out[name] = _thin(child, plans, after)
      after = after or _has_sketch(child)
    return out if isinstance(state, dict) else tuple(out.values())
  is_child = lambda x: x is not state
  children, treedef = jax.tree.flatten(state, is_leaf=is_child)
  return jax.tree.unflatten(treedef, [_thin(c, plans, after) for c in children])


def init(tx: optax.GradientTransformation, params: Any) -> Any:
  """`tx.init(params)` for any chain around `sketch`, with thin arrays.

  optax hands every transformation the whole parameters at `init`, so one that
  keeps an array for each coordinate (`optax.trace`, `optax.scale_by_adam`,
  `optax.MultiSteps`) would keep a dense one for a target. This makes the same
  state with the shapes that updates will have: thin for targets, nothing for
  frozen parameters. Where no such transformation stands outside
  `sketch(inner=...)` it equals `tx.init(params)`.

  Args:
    tx: a transformation, or anything with `init`.
    params: the parameter tree.

  Returns:
    The optimizer state; no dense array for a target is ever allocated.
  """

  def make(params):
    state = tx.init(params)
    plans = [s.plan for s in _state.find_states(state, _state.SketchState)]
    return _thin(state, plans)

  return jax.jit(make)(params)
