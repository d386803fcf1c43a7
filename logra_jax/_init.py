"""`init`: thin optimizer states for any chain around `sketch`."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from logra_jax import _paths, _state
from logra_jax._targets import Target


def _has_sketch(state: optax.OptState) -> bool:
  return bool(_state.find_states(state, _state.SketchState))


def _owners(
    params: optax.Params, plans: list[_state.Plan]
) -> dict[str, Target | str]:
  """Maps a path to its Target, to 'dense' or 'frozen', or to '' (no plan)."""
  paths = _paths.flatten(params)[0]
  owners: dict[str, Target | str] = dict.fromkeys(paths, "")
  for plan in plans:
    owners |= {target.path: target for target in plan.targets}
    owners |= dict.fromkeys(plan.dense, "dense")
    owners |= dict.fromkeys(plan.frozen, "frozen")
  return owners


def _thin_leaves(
    state: optax.OptState, owners: dict[str, Target | str], after: bool
) -> optax.OptState:
  """Gives the arrays that belong to parameters the shapes of their updates."""
  leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
  out = []
  for key_path, leaf in leaves:
    path = _paths.owner(owners, _paths.path_string(key_path))
    owner = "" if path is None else owners[path]
    if owner == "frozen":
      leaf = None
    elif owner:
      if isinstance(owner, Target) and leaf.shape == owner.shape:
        leaf = jnp.zeros(owner.thin, jnp.float32)
      if after:
        leaf = _state.Update(leaf, jnp.zeros([], jnp.float32))
    out.append(leaf)
  return jax.tree.unflatten(treedef, out)


def _thin(
    state: Any, owners: dict[str, Target | str], after: bool = False
) -> Any:
  """Makes the states outside `sketch` thin; `after` means downstream of it."""
  if isinstance(state, _state.SketchState):
    return state
  if not _has_sketch(state):
    return _thin_leaves(state, owners, after)
  if isinstance(state, optax.PartitionState):
    # The transformations of a partition do not feed into each other.
    inner = {k: _thin(v, owners, after) for k, v in state.inner_states.items()}
    return state._replace(inner_states=inner)
  if isinstance(state, dict) or type(state) is tuple:
    # In a chain, the links after `sketch` receive what `sketch` emits.
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


def init(
    tx: optax.GradientTransformation, params: optax.Params
) -> optax.OptState:
  """Like `tx.init(params)`, but with thin arrays for the targets.

  At `init`, optax passes the full parameters to every transformation. One that
  keeps an array of the parameters' shape (`optax.trace`,
  `optax.scale_by_adam`, `optax.MultiSteps`) would therefore keep a dense array
  for each target. This function makes the same state with the shapes that the
  updates will have: thin for targets, and nothing for frozen parameters. If no
  such transformation is used outside `sketch(inner=...)`, the result equals
  `tx.init(params)`.

  Args:
    tx: A transformation, or any object with an `init` method.
    params: The parameter tree.

  Returns:
    The optimizer state. No dense array for a target is ever allocated.

  Examples:
    >>> import jax.numpy as jnp, logra_jax, optax
    >>> params = {'q_proj': {'kernel': jnp.ones((8, 6))}}
    >>> tx = optax.chain(
    ...     logra_jax.sketch(rank=4, refresh=False), optax.trace(decay=0.9))
    >>> opt_state = logra_jax.init(tx, params)
    >>> opt_state[1].trace['q_proj']['kernel'].value.shape
    (4, 6)
  """

  def make(params):
    state = tx.init(params)
    plans = [s.plan for s in _state.find_states(state, _state.SketchState)]
    return _thin(state, _owners(params, plans))

  return jax.jit(make)(params)
