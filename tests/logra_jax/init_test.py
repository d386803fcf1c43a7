"""Tests of `init`, which makes thin states for chains around `sketch`."""

import jax
import jax.numpy as jnp
import optax
import pytest

import logra_jax
from tests.helpers import oracles, sketched, toy

apply = jax.jit(logra_jax.apply_updates)


MOMENTS = {
    "trace": lambda: optax.trace(0.9),
    "adam": lambda: optax.scale_by_adam(0.9, 0.99, 1e-3),
}


@pytest.mark.parametrize("name", MOMENTS)
@pytest.mark.parametrize("after", [True, False])
def test_momentum_in_the_chain_equals_inner(name, after):
  middle = MOMENTS[name]
  tx, params, state = sketched.make(inner=middle(), refresh=False)

  def wrap(tx):
    return optax.chain(tx, middle()) if after else optax.chain(middle(), tx)

  chain, *_ = sketched.make(inner=optax.identity(), refresh=False, wrap=wrap)
  chain_state = logra_jax.init(chain, params)
  sketched.assert_thin(chain_state, params)
  for step in range(3):
    grads = sketched.gradients(params, state, seed=step)
    updates, state = jax.jit(tx.update)(grads, state, params)
    chain_updates, new = jax.jit(chain.update)(grads, chain_state, params)
    sketched.assert_same_kind(chain_state, new)
    chain_state = new
    for path in toy.bases(state):
      oracles.assert_close(
          toy.get(chain_updates, path).value,
          toy.get(updates, path).value,
          1e-6,
      )
    assert chain_updates["b"]["bias"] is None


def test_momentum_in_the_chain_at_full_rank():
  """At full rank, states with the shape of the kernel must be accepted."""
  tx, params, _ = sketched.make(
      rank=64, refresh=False, wrap=lambda tx: optax.chain(optax.trace(0.9), tx)
  )
  state = logra_jax.init(tx, params)
  loss = lambda p: jnp.sum(logra_jax.dense(jnp.ones((2, 12)), p["a"]["kernel"]))
  _, grads = logra_jax.value_and_grad(loss)(params, state)
  assert grads["a"]["kernel"].shape == params["a"]["kernel"].shape


def test_row_adam_before_sketch_needs_no_fixed_basis():
  tx, params, _ = sketched.make(
      inner=optax.identity(),
      wrap=lambda tx: optax.chain(logra_jax.scale_by_row_adam(), tx),
  )
  state = logra_jax.init(tx, params)
  loss = lambda p: jnp.sum(logra_jax.dense(jnp.ones((2, 12)), p["a"]["kernel"]))
  _, grads = logra_jax.value_and_grad(loss)(params, state)
  updates, _ = jax.jit(tx.update)(grads, state, params)
  expected = oracles.row_adam([grads["a"]["kernel"]])[0]
  oracles.assert_close(updates["a"]["kernel"].value, expected, 1e-5)


def test_multi_steps_equals_the_whole_batch():
  tx, params, state = sketched.make(others=optax.sgd(1.0))
  steps = optax.MultiSteps(tx, every_k_schedule=4)
  steps_state = logra_jax.init(steps, params)
  sketched.assert_thin(steps_state, params)
  update = jax.jit(steps.update)
  whole = None
  merged = params
  for i in range(4):
    grads = sketched.gradients(params, state, seed=i)
    whole = grads if whole is None else optax.tree.add(whole, grads)
    updates, new = update(grads, steps_state, params)
    sketched.assert_same_kind(steps_state, new)
    steps_state = new
    merged = apply(merged, updates, steps_state)
  mean = optax.tree.scale(1 / 4, whole)
  updates, state = jax.jit(tx.update)(mean, state, params)
  expected = apply(params, updates, state)
  jax.tree.map(lambda a, b: oracles.assert_close(a, b, 1e-5), merged, expected)
  assert int(toy.sketch_state(steps_state).count) == 1
