"""Small parameter trees, and the bases that the library draws for them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from logra_jax import _state

# A stacked target and two other parameters.
LAYER_SHAPES = {
    "layers/q_proj/kernel": (2, 8, 6),
    "layers/norm/scale": (2, 8),
    "embed": (10, 8),
}


def normal(
    seed: int, *shape: int, dtype: jax.typing.DTypeLike = jnp.float32
) -> jax.Array:
  """Draws standard normal numbers, the same on every machine."""
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def tree(
    shapes: dict[str, tuple[int, ...]],
    dtype: jax.typing.DTypeLike = jnp.float32,
    seed: int = 0,
) -> dict[str, Any]:
  """Makes a nested dict of normal arrays from `{'a/b/kernel': shape}`."""
  out: dict[str, Any] = {}
  for i, (path, shape) in enumerate(shapes.items()):
    *parents, name = path.split("/")
    node = out
    for parent in parents:
      node = node.setdefault(parent, {})
    node[name] = normal(seed + 100 * i, *shape, dtype=dtype)
  return out


def get(tree: Any, path: str) -> Any:
  """Returns the subtree or leaf at a path."""
  for part in path.split("/"):
    tree = tree[part]
  return tree


def sketch_state(opt_state: optax.OptState) -> _state.SketchState:
  """Returns the only `SketchState` in an optimizer state."""
  (state,) = _state.find_states(opt_state, _state.SketchState)
  return state


@functools.partial(jax.jit, static_argnums=0)
def _bases(plan, seed, count):
  return {t.path: t.basis(t.key(seed, count)) for t in plan.targets}


def bases(
    opt_state: optax.OptState, count: int | None = None
) -> dict[str, np.ndarray]:
  """Draws `A [*batch, rank, d_in]` of each target at `count`, by path.

  Without a count, the bases are those of the next update.
  """
  state = sketch_state(opt_state)
  count = state.count if count is None else jnp.int32(count)
  if not state.plan.refresh:
    count = jnp.zeros_like(count)
  drawn = _bases(state.plan, state.seed, count)
  return {path: np.asarray(basis) for path, basis in drawn.items()}
