"""Tests of `nnx.Linear`: equal to Flax, and with a target in an `nnx.Param`."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import logra_jax
from logra_jax import _state
from tests.helpers import linear_policy as lp
from tests.helpers import toy


def values(module):
  return jax.tree.leaves(nnx.state(module))


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16])
def test_linear_is_flax_linear(x_dtype, dtype, param_dtype, use_bias):
  kwargs = {"dtype": dtype, "param_dtype": param_dtype, "use_bias": use_bias}
  ours = logra_jax.nnx.Linear(8, 5, rngs=nnx.Rngs(0), **kwargs)
  flax = nnx.Linear(8, 5, rngs=nnx.Rngs(0), **kwargs)
  paths = lambda m: [p for p, _ in nnx.to_flat_state(nnx.state(m))]
  assert paths(ours) == paths(flax)
  x = toy.normal(0, 2, 8, dtype=x_dtype)
  results = [[*values(layer), layer(x)] for layer in (ours, flax)]
  for a, b in zip(*results, strict=True):
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a, b)


def test_linear_takes_what_flax_linear_takes():
  kwargs = {
      "precision": jax.lax.Precision.HIGHEST,
      "kernel_init": nnx.initializers.normal(3.0),
      "preferred_element_type": jnp.float32,
  }
  ours = logra_jax.nnx.Linear(8, 5, rngs=nnx.Rngs(0), **kwargs)
  flax = nnx.Linear(8, 5, rngs=nnx.Rngs(0), **kwargs)
  x = toy.normal(0, 2, 8)
  np.testing.assert_array_equal(ours(x), flax(x))
  assert isinstance(ours, nnx.Linear)


class Policy(nnx.Module):
  """Two layers, the first of them under `nnx.remat`."""

  def __init__(self, rngs, linear=logra_jax.nnx.Linear):
    self.up_proj = linear(lp.WIDTH, 8, rngs=rngs)
    self.down_proj = linear(8, lp.VOCAB, use_bias=False, rngs=rngs)

  def __call__(self, x):
    up = nnx.remat(lambda layer, x: layer(x))
    return self.down_proj(nnx.tanh(up(self.up_proj, x)))


TX = optax.chain(
    logra_jax.sketch(3, others=optax.adam(0.1)),
    optax.scale_by_learning_rate(0.1),
    logra_jax.kl_budget(1e-2),
)


def loss_of(logits, batch):
  log_probs = jax.nn.log_softmax(logits)
  taken = jnp.take_along_axis(log_probs, batch["action"][..., None], -1)
  return -jnp.mean(taken[..., 0], where=batch["completion_mask"])


@functools.cache
def make_step(graphdef):
  logits = lambda state, batch: nnx.merge(graphdef, state)(batch["x"])
  loss_fn = lambda state, batch: loss_of(logits(state, batch), batch)

  @jax.jit
  def step(state, opt_state, batch):
    loss, grads = logra_jax.value_and_grad(loss_fn)(state, opt_state, batch)
    probe = logra_jax.kl_probe(logits, state, opt_state, batch)
    updates, opt_state = TX.update(grads, opt_state, state, probe=probe)
    state = logra_jax.apply_updates(state, updates, opt_state)
    realised = logra_jax.realised_kl(probe, state)
    return state, opt_state, loss, grads, realised

  return step


def test_the_four_calls_train_a_split_module():
  module = Policy(nnx.Rngs(0))
  graphdef, state = nnx.split(module, nnx.Param)
  opt_state, batch = TX.init(state), lp.make_batch()
  (plan,) = [
      s.plan for s in _state.find_states(opt_state, logra_jax.SketchState)
  ]
  assert [t.path for t in plan.targets] == [
      "down_proj/kernel",
      "up_proj/kernel",
  ]
  structure = jax.tree.structure((state, opt_state))
  losses = []
  for _ in range(4):
    state, opt_state, loss, grads, realised = make_step(graphdef)(
        state, opt_state, batch
    )
    losses.append(float(loss))
    np.testing.assert_allclose(realised, 1e-2, rtol=0.3)
  assert losses == sorted(losses, reverse=True), losses
  assert jax.tree.structure((state, opt_state)) == structure
  assert grads["up_proj"]["kernel"][...].shape == (3, 8)
  # The trained state can be put back into the module for inference.
  nnx.update(module, state)
  logits = module(batch["x"])
  assert float(loss_of(logits, batch)) < losses[-1]


def test_an_nnx_step_is_that_of_plain_arrays():
  graphdef, state = nnx.split(Policy(nnx.Rngs(0)), nnx.Param)
  batch = lp.make_batch()
  state, *_ = make_step(graphdef)(state, TX.init(state), batch)

  def logits(params, batch):
    up, down = params["up_proj"], params["down_proj"]
    h = jnp.tanh(logra_jax.dense(batch["x"], up["kernel"]) + up["bias"])
    return logra_jax.dense(h, down["kernel"])

  @jax.jit
  def step(params, opt_state, batch):
    loss_fn = lambda p, b: loss_of(logits(p, b), b)
    _, grads = logra_jax.value_and_grad(loss_fn)(params, opt_state, batch)
    probe = logra_jax.kl_probe(logits, params, opt_state, batch)
    updates, opt_state = TX.update(grads, opt_state, params, probe=probe)
    return logra_jax.apply_updates(params, updates, opt_state)

  params = nnx.to_pure_dict(nnx.state(Policy(nnx.Rngs(0)), nnx.Param))
  params = step(params, TX.init(params), batch)
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
      nnx.to_pure_dict(state),
      params,
  )


def test_a_scanned_stack_of_modules_is_a_batched_target():
  class Layer(nnx.Module):

    def __init__(self, rngs):
      self.q_proj = logra_jax.nnx.Linear(lp.WIDTH, lp.WIDTH, rngs=rngs)

    def __call__(self, x):
      return x + jnp.tanh(self.q_proj(x))

  @nnx.split_rngs(splits=3)
  @nnx.vmap(in_axes=0, out_axes=0)
  def stack(rngs):
    return Layer(rngs)

  graphdef, state = nnx.split(stack(nnx.Rngs(0)), nnx.Param)
  x = lp.make_batch()["x"]

  def loss(state):
    layers = nnx.merge(graphdef, state)
    scan = nnx.scan(
        nnx.remat(lambda layer, x: layer(x)),
        in_axes=(0, nnx.Carry),
        out_axes=nnx.Carry,
    )
    return jnp.sum(jnp.sin(scan(layers, x)))

  tx = logra_jax.sketch(2)
  opt_state = tx.init(state)
  _, grads = jax.jit(logra_jax.value_and_grad(loss))(state, opt_state)
  dense = jax.jit(jax.grad(loss))(state)
  basis = toy.bases(opt_state)["q_proj/kernel"]
  wanted = np.einsum("lri,lio->lro", basis, dense["q_proj"]["kernel"][...])
  got = grads["q_proj"]["kernel"][...]
  assert got.shape == (3, 2, lp.WIDTH)
  np.testing.assert_allclose(got, wanted, atol=1e-4)


def test_a_target_in_a_linear_of_flax_is_refused_by_name():
  graphdef, state = nnx.split(Policy(nnx.Rngs(0), nnx.Linear), nnx.Param)
  x = lp.make_batch()["x"]
  loss = lambda state: jnp.sum(nnx.merge(graphdef, state)(x))
  opt_state = logra_jax.sketch(3).init(state)
  with pytest.raises(TypeError, match=r"up_proj.*logra_jax\.nnx\.Linear"):
    logra_jax.value_and_grad(loss)(state, opt_state)
