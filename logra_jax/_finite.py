"""Guards that keep non-finite numbers out of updates and states."""

import functools

import chex
import jax
import jax.numpy as jnp


def all_finite(tree: chex.ArrayTree) -> jax.Array:
  """Returns a bool scalar: whether every float in the tree is finite."""
  leaves = [
      jnp.all(jnp.isfinite(leaf))
      for leaf in jax.tree.leaves(tree)
      if jnp.issubdtype(leaf.dtype, jnp.inexact)
  ]
  return functools.reduce(jnp.logical_and, leaves, jnp.bool_(True))


def none_lost(new: chex.ArrayTree, old: chex.ArrayTree) -> jax.Array:
  """Returns a bool scalar: whether `new` is finite wherever `old` is.

  An infinity that was there before is allowed: the state of
  `optax.contrib.reduce_on_plateau` starts with one.
  """
  leaves = [
      jnp.all(jnp.isfinite(n) | ~jnp.isfinite(o))
      for n, o in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True)
      if jnp.issubdtype(n.dtype, jnp.inexact)
  ]
  return functools.reduce(jnp.logical_and, leaves, jnp.bool_(True))


def select(
    ok: jax.Array, new: chex.ArrayTree, old: chex.ArrayTree
) -> chex.ArrayTree:
  """Returns `new` if `ok`, else `old`; both have the same structure.

  On a mesh with explicit axes the result is sharded like `old`.
  """

  def one(n, o):
    new_sharding, old_sharding = jax.typeof(n).sharding, jax.typeof(o).sharding
    explicit = jax.sharding.AxisType.Explicit in old_sharding.mesh.axis_types
    if explicit and new_sharding != old_sharding:
      n = jax.sharding.reshard(n, old_sharding)
    return jnp.where(ok, n, o)

  return jax.tree.map(one, new, old)


def zero_unless(ok: jax.Array, tree: chex.ArrayTree) -> chex.ArrayTree:
  """Returns the tree if `ok`, else zeros; `where` avoids `0 · NaN`."""
  # The zeros are made from `ok`: XLA would merge a constant zero with other
  # constants of the same shape and then keep them in memory as an array.
  return jax.tree.map(lambda x: jnp.where(ok, x, ok.astype(x.dtype)), tree)
