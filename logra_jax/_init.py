"""`init`: a state for chains that keep one number for each coordinate."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from logra_jax import _paths, _state


def _has_sketch(state: Any) -> bool:
  return bool(_state.find_states(state, _state.SketchState))


def _owners(params: Any, plans: list[_state.Plan]) -> dict[str, Any]:
  """What each parameter is: its Target, 'dense', 'frozen', or '' (no plan)."""
  owners: dict[str, Any] = dict.fromkeys(_paths.flatten(params)[0], "")
  for plan in plans:
    owners |= {target.path: target for target in plan.targets}
    owners |= dict.fromkeys(plan.dense, "dense")
    owners |= dict.fromkeys(plan.frozen, "frozen")
  return owners


def _thin_leaves(state: Any, owners: dict[str, Any], after: bool) -> Any:
  """Replaces the arrays that stand for parameters by what updates have."""
  leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
  out = []
  for key_path, leaf in leaves:
    path = _paths.owner(owners, _paths.path_string(key_path))
    owner: Any = "" if path is None else owners[path]
    if owner == "frozen":
      leaf = None
    elif owner:
      if owner != "dense" and leaf.shape == owner.shape:
        leaf = jnp.zeros(owner.thin, jnp.float32)
      if after:
        leaf = _state.Update(leaf, jnp.zeros([], jnp.float32))
    out.append(leaf)
  return jax.tree.unflatten(treedef, out)


def _thin(state: Any, owners: dict[str, Any], after: bool = False) -> Any:
  if isinstance(state, _state.SketchState):
    return state
  if not _has_sketch(state):
    return _thin_leaves(state, owners, after)
  if isinstance(state, optax.PartitionState):
    # Its transformations stand side by side, not one after the other.
    inner = {k: _thin(v, owners, after) for k, v in state.inner_states.items()}
    return state._replace(inner_states=inner)
  if isinstance(state, dict) or type(state) is tuple:
    # A chain: what comes after `sketch` sees what `sketch` emits.
    items = state.items() if isinstance(state, dict) else enumerate(state)
    out = {}
    for name, child in items:
      out[name] = _thin(child, owners, after)
      after = after or _has_sketch(child)
    return out if isinstance(state, dict) else tuple(out.values())
  is_child = lambda x: x is not state
  children, treedef = jax.tree.flatten(state, is_leaf=is_child)
  return jax.tree.unflatten(
      treedef, [_thin(c, owners, after) for c in children]
  )


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
    return _thin(state, _owners(params, plans))

  return jax.jit(make)(params)
