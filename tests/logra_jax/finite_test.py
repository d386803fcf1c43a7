"""Tests that `sketch` skips a step that is not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import logra_jax
from tests.helpers import sketched

apply = jax.jit(logra_jax.apply_updates)


@pytest.mark.parametrize(
    "where,bad",
    [("a/kernel", np.nan), ("b/kernel", -np.inf), ("b/bias", np.inf)],
)
def test_non_finite_gradient_is_skipped(where, bad):
  tx, params, state = sketched.make(others=optax.adam(1e-2), clip_norm=1.0)
  update = jax.jit(tx.update)
  _, state = update(sketched.gradients(params, state), state, params)
  grads = sketched.gradients(params, state, seed=1)
  block, name = where.split("/")
  grads[block][name] = grads[block][name].at[..., 0].set(bad)
  updates, after = update(grads, state, params)
  for leaf in jax.tree.leaves(updates):
    np.testing.assert_array_equal(leaf, np.zeros_like(leaf))
  same = apply(params, updates, after)
  jax.tree.map(np.testing.assert_array_equal, same, params)
  jax.tree.map(
      np.testing.assert_array_equal,
      (after.inner, after.others),
      (state.inner, state.others),
  )
  assert int(after.skipped) == 1 and int(after.count) == 2
  # The next finite gradient is used, with the moments from before the skip.
  updates, recovered = update(
      sketched.gradients(params, state, 2), after, params
  )
  assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(updates))
  assert int(recovered.skipped) == 1
  assert int(recovered.inner.count) == 2


def test_overflow_inside_the_inner_transformation_is_skipped():
  """1e30 is finite, but its square, which Adam keeps, is not."""
  tx, params, state = sketched.make(
      inner=optax.scale_by_adam(), refresh=False, others=optax.adam(1e-2)
  )
  update = jax.jit(tx.update)
  for huge in ("a", "b"):  # "a" has a target; "b" has a target and a bias
    grads = sketched.gradients(params, state)
    grads[huge] = optax.tree.scale(1e30, grads[huge])
    updates, after = update(grads, state, params)
    assert int(after.skipped) == 1
    jax.tree.map(
        np.testing.assert_array_equal,
        (after.inner, after.others),
        (state.inner, state.others),
    )
    for leaf in jax.tree.leaves(updates):
      np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


def test_overflow_of_the_update_is_skipped():
  tx, params, state = sketched.make(inner=optax.scale(1e30))
  grads = sketched.gradients(params, state, size=1e20)
  updates, after = jax.jit(tx.update)(grads, state, params)
  assert int(after.skipped) == 1
  for leaf in jax.tree.leaves(updates):
    np.testing.assert_array_equal(leaf, np.zeros_like(leaf))
