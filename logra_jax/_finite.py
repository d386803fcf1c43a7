"""Guards: no step, and no state, from a number that is not finite."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def all_finite(tree: Any) -> jax.Array:
  """Whether every float of the tree is finite, a bool scalar."""
  leaves = [
      jnp.all(jnp.isfinite(leaf))
      for leaf in jax.tree.leaves(tree)
      if jnp.issubdtype(leaf.dtype, jnp.inexact)
  ]
  return functools.reduce(jnp.logical_and, leaves, jnp.bool_(True))


def none_lost(new: Any, old: Any) -> jax.Array:
  """Whether all that was finite in `old` is so in `new`, a bool scalar.

  Some states hold an infinity from the start, as `reduce_on_plateau` does.
  """
  leaves = [
      jnp.all(jnp.isfinite(n) | ~jnp.isfinite(o))
      for n, o in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
      if jnp.issubdtype(n.dtype, jnp.inexact)
  ]
  return functools.reduce(jnp.logical_and, leaves, jnp.bool_(True))


def select(ok: jax.Array, new: Any, old: Any) -> Any:
  """`new` where `ok`, else `old`; two trees of the same structure.

  On a mesh with explicit axes the result is split as `old` is.
  """

  def one(n, o):
    found, wanted = jax.typeof(n).sharding, jax.typeof(o).sharding
    explicit = jax.sharding.AxisType.Explicit in wanted.mesh.axis_types
    if explicit and found != wanted:
      n = jax.sharding.reshard(n, wanted)
    return jnp.where(ok, n, o)

  return jax.tree.map(one, new, old)


def zero_unless(ok: jax.Array, tree: Any) -> Any:
  """The tree where `ok`, else zeros (never `0 · NaN`)."""
  # The zero is `ok` itself: constant zeros XLA shares with other constants of
  # the shape, and then keeps them as an array.
  return jax.tree.map(lambda x: jnp.where(ok, x, ok.astype(x.dtype)), tree)
