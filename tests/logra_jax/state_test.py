"""Tests that the state of `sketch` is thin and keeps its shapes and dtypes."""

import jax
import jax.numpy as jnp
import optax
import pytest

import logra_jax
from tests.helpers import oracles, sketched, toy

F32, BF16 = jnp.float32, jnp.bfloat16


CONFIGS = {
    "default": {},
    "all": {
        "rank": {"a/.*": 3, ".*": 5},
        "others": optax.adamw(1e-3),
        "clip_norm": 1.0,
        "weight_decay": 0.1,
        "distribution": "gaussian",
    },
    "ratio": {
        "inner": logra_jax.scale_by_row_adam(norm_preserving=True),
        "update_ratio": 6e-5,
        "others": {".*bias": optax.sgd(0.1, momentum=0.9)},
    },
    "momentum": {"inner": optax.trace(0.9), "refresh": False},
}


@pytest.mark.parametrize(
    "name,dtype", [*((name, F32) for name in sorted(CONFIGS)), ("all", BF16)]
)
def test_state_is_thin_arrays_of_constant_kind(name, dtype):
  tx, params, state = sketched.make(dtype=dtype, **CONFIGS[name])
  sketched.assert_thin(state, params)
  grads = sketched.gradients(params, state)
  donating = jax.jit(tx.update, donate_argnums=1)
  kept = jax.tree.map(jnp.copy, state)
  updates, new = jax.jit(tx.update)(grads, state, params)
  sketched.assert_same_kind(state, new)
  sketched.assert_same_kind(logra_jax.init(tx, params), state)
  jitted, donated = donating(grads, kept, params)
  jax.tree.map(
      lambda a, b: oracles.assert_close(a, b, 2**-7 if dtype == BF16 else 1e-5),
      (updates, new),
      (jitted, donated),
  )
  for target in new.plan.targets:
    assert toy.get(updates, target.path).value.dtype == F32
