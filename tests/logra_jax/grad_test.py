"""Tests of what `value_and_grad` returns, and of what it refuses."""

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import logra_jax
from tests.helpers import oracles, sketched, toy

F32, BF16 = jnp.float32, jnp.bfloat16


def test_value_and_grad_with_aux_and_arguments():
  _, params, state = sketched.make(shapes=sketched.MLP)

  def loss(params, x, *, scale):
    return scale * sketched.mlp(params, x), {"x": x}

  x = toy.normal(1, 9, 12)
  fun = logra_jax.value_and_grad(loss, has_aux=True)
  (value, aux), grads = fun(params, state, x, scale=2.0)
  plain, _ = sketched.sketch_gradients(sketched.mlp, params, state, x)
  np.testing.assert_array_equal(aux["x"], x)
  oracles.assert_close(value, 2 * sketched.mlp(params, x), 1e-6)
  jax.tree.map(lambda a, b: oracles.assert_close(a, 2 * b, 1e-6), grads, plain)


def test_frozen_parameters_have_no_gradient_and_others_a_dense_one():
  shapes = sketched.MLP | {"a/bias": (20,), "scale": (7,)}
  _, params, state = sketched.make(
      shapes=shapes, others={"scale": optax.sgd(1.0)}
  )
  params["ids"] = jnp.arange(3)  # integers are never differentiated
  tx = logra_jax.sketch(
      rank=4, targets=".*kernel", others={"scale": optax.sgd(1.0)}
  )
  state = tx.init(params)

  def loss(params, x):
    h = jnp.tanh(
        logra_jax.dense(x, params["a"]["kernel"]) + params["a"]["bias"]
    )
    y = logra_jax.dense(h, params["b"]["kernel"]) * params["scale"]
    return jnp.mean(jnp.sin(y)) + 0 * params["ids"][0]

  x = toy.normal(1, 9, 12)
  grads, _ = sketched.sketch_gradients(loss, params, state, x)
  assert grads["a"]["bias"] is None and grads["ids"] is None
  expected = jax.grad(lambda s: loss({**params, "scale": s}, x))(
      params["scale"]
  )
  oracles.assert_close(grads["scale"], expected, 1e-5)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_micro_batches_add_up(dtype):
  _, params, state = sketched.make(dtype, sketched.MLP)
  x = toy.normal(1, 8, 3, 12, dtype=dtype)
  whole, _ = sketched.sketch_gradients(sketched.mlp, params, state, x)

  @jax.jit
  def accumulated(params, state, x):
    add = lambda total, x: (
        jax.tree.map(
            jnp.add,
            total,
            logra_jax.value_and_grad(sketched.mlp)(params, state, x)[1],
        ),
        None,
    )
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, F32), whole)
    return lax.scan(add, zeros, x)[0]

  parts = jax.tree.map(lambda g: g / len(x), accumulated(params, state, x))
  # Both are float32 sums of the same terms. With bfloat16, the compiler can
  # round an intermediate value of the model in only one of the programs.
  tol = 1e-5 if dtype == F32 else 2**-6
  jax.tree.map(lambda a, b: oracles.assert_close(a, b, tol), parts, whole)


def test_unused_target_has_a_zero_sketch():
  _, params, state = sketched.make(
      shapes={"kernel": (8, 8), "unused/kernel": (8, 6)}
  )
  loss = lambda p, x: jnp.sum(logra_jax.dense(x, p["kernel"]))
  grads, _ = sketched.sketch_gradients(loss, params, state, toy.normal(1, 5, 8))
  np.testing.assert_array_equal(grads["unused"]["kernel"], np.zeros((4, 6)))


def test_dense_state_in_the_chain_is_refused():
  tx, params, _ = sketched.make(
      refresh=False, wrap=lambda tx: optax.chain(tx, optax.trace(0.9))
  )
  loss = lambda p: jnp.sum(logra_jax.dense(jnp.ones((2, 12)), p["a"]["kernel"]))
  with pytest.raises(ValueError, match=r"logra_jax.init\(tx, params\)"):
    logra_jax.value_and_grad(loss)(params, tx.init(params))
  logra_jax.value_and_grad(loss)(params, logra_jax.init(tx, params))
  # A refreshed basis would make the thin moment stale.
  tx, *_ = sketched.make(wrap=lambda tx: optax.chain(tx, optax.trace(0.9)))
  with pytest.raises(ValueError, match=r"stale.*refresh=False"):
    logra_jax.value_and_grad(loss)(params, logra_jax.init(tx, params))


def test_value_and_grad_without_a_sketch():
  tx = optax.sgd(1.0)
  p = {"w": jnp.arange(3.0)}
  value, grads = logra_jax.value_and_grad(lambda p: jnp.sum(p["w"] ** 2))(
      p, tx.init(p)
  )
  assert float(value) == 5.0 and grads["w"].tolist() == [0.0, 2.0, 4.0]


def test_parameters_that_do_not_fit_the_state():
  loss = lambda p, x: jnp.sum(
      logra_jax.dense(x, p["layers"]["q_proj"]["kernel"][...])
  )
  tx = logra_jax.sketch(rank=2)
  state = tx.init(toy.tree(toy.LAYER_SHAPES))
  other = toy.tree(toy.LAYER_SHAPES | {"layers/q_proj/kernel": (2, 8, 7)})
  match = (
      r"\(2, 8, 7\) at 'layers/q_proj/kernel', .*\(2, 8, 6\); make opt_state"
  )
  with pytest.raises(ValueError, match=match):
    logra_jax.value_and_grad(loss)(other, state, jnp.ones((3, 8)))
  with pytest.raises(ValueError, match="shape None at 'layers/q_proj/kernel'"):
    logra_jax.value_and_grad(loss)({"w": jnp.ones(3)}, state, jnp.ones((3, 8)))
