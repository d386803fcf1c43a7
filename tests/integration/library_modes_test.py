"""The library under JAX's strict modes, and its states under serializers."""

import pickle

from flax import serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import logra_jax
from tests.helpers import linear_policy as lp
from tests.helpers import sketched, toy

MODES = {
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "nans": lambda: jax.debug_nans(True),
    "leaks": jax.checking_leaks,
}


def step(tx, jit):
  """One whole step of a policy that is a single target."""
  params, batch = lp.make_params(), lp.make_batch()

  def run(params, opt_state):
    _, grads = logra_jax.value_and_grad(lp.loss_fn)(params, opt_state, batch)
    probe = logra_jax.kl_probe(lp.logits_fn, params, opt_state, batch)
    updates, opt_state = tx.update(grads, opt_state, params, probe=probe)
    return logra_jax.apply_updates(params, updates, opt_state), opt_state

  run = jax.jit(run) if jit else run
  return run(params, tx.init(params))


@pytest.mark.parametrize(
    ("mode", "jit"),
    [
        *((mode, True) for mode in MODES),
        # Only an eager step looks at each number on the way.
        pytest.param("nans", False, marks=pytest.mark.slow),
    ],
)
def test_a_step_runs_in_strict_modes(mode, jit):
  tx = optax.chain(logra_jax.sketch(3), logra_jax.kl_budget(1e-3))
  with MODES[mode]():
    params, _ = step(tx, jit)
  for old, new in zip(
      jax.tree.leaves(step(tx, True)[0]), jax.tree.leaves(params), strict=True
  ):
    np.testing.assert_allclose(old, new, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("norm_preserving", [True, False])
def test_a_zero_sketch_is_no_nan(norm_preserving):
  inner = logra_jax.scale_by_row_adam(norm_preserving=norm_preserving)
  with jax.debug_nans(True):
    out, _ = inner.update(jnp.zeros((3, 5)), inner.init(jnp.zeros((3, 5))))
  assert not np.any(out)


def test_a_bfloat16_model_runs_with_strict_promotion():
  params = toy.tree({"q_proj/kernel": (8, 6)}, dtype=jnp.bfloat16)
  tx = optax.chain(logra_jax.sketch(3), logra_jax.kl_budget(1e-3))
  batch = {
      "x": toy.normal(1, 4, 8, dtype=jnp.bfloat16),
      "completion_mask": jnp.ones(4, bool),
  }
  logits_fn = lambda p, b: logra_jax.dense(b["x"], p["q_proj"]["kernel"])
  loss_fn = lambda p, b: jnp.mean(jnp.square(logits_fn(p, b)))
  with jax.numpy_dtype_promotion("strict"):
    state = tx.init(params)
    _, grads = logra_jax.value_and_grad(loss_fn)(params, state, batch)
    probe = logra_jax.kl_probe(logits_fn, params, state, batch)
    updates, state = tx.update(grads, state, params, probe=probe)
    new = logra_jax.apply_updates(params, updates, state)
  assert np.isfinite(np.asarray(jax.tree.leaves(new)[0], np.float64)).all()


@pytest.mark.parametrize("how", ["flax", "flax dict", "pickle"])
def test_a_state_is_saved_and_comes_back(how):
  tx, params, state = sketched.make()
  grads = sketched.gradients(params, state)
  _, state = tx.update(grads, state, params)
  if how == "flax":
    again = serialization.from_bytes(
        tx.init(params), serialization.to_bytes(state)
    )
  elif how == "flax dict":
    again = serialization.from_state_dict(
        tx.init(params), serialization.to_state_dict(state)
    )
  else:
    again = pickle.loads(pickle.dumps(state))
  assert jax.tree.structure(again) == jax.tree.structure(state)
  for old, new in zip(
      jax.tree.leaves(state), jax.tree.leaves(again), strict=True
  ):
    np.testing.assert_array_equal(old, new)
