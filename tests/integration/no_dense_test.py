"""Tests that no dense gradient, update or moment is ever stored.

The tests inspect compiled programs: every buffer with the shape of a target
kernel must be the kernel itself.
"""

import jax
from jax import lax
import jax.numpy as jnp
import optax
import pytest

import logra_jax
from tests.helpers import compiled, toy

F32, BF16 = jnp.float32, jnp.bfloat16
# Sizes that no other array in these programs has.
LAYERS, D, FF, N, V, RANK = 3, 48, 80, 10, 24, 4
SHAPES = {
    "embed": (V, D),
    "layers/up_proj/kernel": (LAYERS, D, FF),
    "layers/down_proj/kernel": (LAYERS, FF, D),
}
KERNELS = [(LAYERS, D, FF), (LAYERS, FF, D)]


def layer(h, kernels):
  u = jnp.tanh(logra_jax.dense(h, kernels["up_proj"]["kernel"]))
  return h + logra_jax.dense(u, kernels["down_proj"]["kernel"]), None


def logits_fn(params, batch, *, scan=True, remat=False):
  body = jax.checkpoint(layer) if remat else layer
  h = params["embed"][batch["tokens"]]
  if scan:
    h, _ = lax.scan(body, h, params["layers"])
  else:
    h, _ = body(h, params["layers"])
  return h @ params["embed"].T


def loss_fn(params, batch, **kwargs):
  logits = logits_fn(params, batch, **kwargs).astype(F32)
  return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])


def shapes(dtype=F32, scan=True):
  params = toy.tree(SHAPES, dtype=dtype)
  if not scan:
    params["layers"] = jax.tree.map(lambda p: p[0], params["layers"])
  return params


def a_batch():
  return {
      "tokens": jnp.arange(N).reshape(2, N // 2) % V,
      "completion_mask": jnp.ones((2, N // 2), bool),
  }


def backward(dtype, scan, remat, micro=False):
  params = shapes(dtype, scan)
  state = logra_jax.sketch(rank=RANK, others=optax.sgd(1.0)).init(params)
  loss = lambda p, b: loss_fn(p, b, scan=scan, remat=remat)
  grad = logra_jax.value_and_grad(loss)
  if not micro:
    return grad, (params, state, a_batch())

  def accumulated(params, state, batch):
    zeros = jax.tree.map(
        lambda g: jnp.zeros(g.shape, F32),
        jax.eval_shape(grad, params, state, batch)[1],
    )
    add = lambda total, rows: (
        jax.tree.map(
            jnp.add, total, grad(params, state, {"tokens": rows[None]})[1]
        ),
        None,
    )
    return lax.scan(add, zeros, batch["tokens"])[0]

  return accumulated, (params, state, a_batch())


@pytest.mark.parametrize("scan", [True, False])
def test_a_dense_gradient_is_found(scan):
  """A control: the tests below would detect a dense gradient."""
  loss = lambda p, b: loss_fn(p, b, scan=scan)
  found = compiled.dense_buffers(
      jax.jit(jax.grad(loss)), (shapes(F32, scan), a_batch()), KERNELS
  )
  assert len(found) >= 2 and any(" dot(" in line for line in found)


def test_a_dense_update_is_found():
  tx = optax.sgd(1.0, momentum=0.9)
  params = shapes()
  args = (params, tx.init(params))
  assert compiled.dense_buffers(jax.jit(tx.update), args, KERNELS)


@pytest.mark.parametrize(
    "dtype,scan,remat,micro",
    [
        (F32, False, False, False),
        (F32, True, False, False),
        (F32, True, True, False),
        (F32, True, True, True),
        (BF16, True, True, False),
        (BF16, True, False, True),
    ],
)
def test_backward(dtype, scan, remat, micro):
  fun, args = backward(dtype, scan, remat, micro)
  assert compiled.dense_buffers(jax.jit(fun), args, KERNELS) == []


row_adam = logra_jax.scale_by_row_adam
UPDATES = {
    "plain": {"weight_decay": 0.1},
    "norm_preserving_ratio": {
        "inner": row_adam(norm_preserving=True),
        "update_ratio": 6e-5,
    },
    "clip": {"clip_norm": 1.0, "distribution": "gaussian"},
    "momentum": {
        "inner": optax.chain(optax.trace(0.9), row_adam()),
        "refresh": False,
    },
}


def optimizer(name, dtype=F32):
  tx = optax.chain(
      logra_jax.sketch(rank=RANK, others=optax.adam(1e-3), **UPDATES[name]),
      logra_jax.kl_budget(1e-4),
  )
  params = shapes(dtype)
  return tx, params, tx.init(params)


@pytest.mark.parametrize(
    "name,dtype",
    [(name, BF16 if name == "plain" else F32) for name in UPDATES],
)
def test_update_with_its_probe(name, dtype):
  tx, params, state = optimizer(name, dtype)

  def update(params, state, batch):
    _, grads = logra_jax.value_and_grad(loss_fn)(params, state, batch)
    probe = logra_jax.kl_probe(
        logits_fn, params, state, batch, temperature=0.7, chunk_size=4
    )
    return tx.update(grads, state, params, probe=probe)

  args = (params, state, a_batch())
  assert compiled.dense_buffers(jax.jit(update), args, KERNELS) == []


@pytest.mark.parametrize("name", UPDATES)
def test_state_is_thin(name):
  _tx, _params, state = optimizer(name)
  for leaf in jax.tree.leaves(state):
    assert isinstance(leaf, jax.Array) and leaf.size < D * FF
  (sketch,) = [state[0]]
  moments = sum(leaf.size for leaf in jax.tree.leaves(sketch.inner))
  thin = LAYERS * RANK * (D + FF)
  # RowAdam has one number for each output unit and a count; a trace is thin.
  expected = LAYERS * (D + FF) + 1 + (thin if name == "momentum" else 0)
  assert moments == expected


# -- residuals of the backward pass -------------------------------------------


def kept_shapes(fun, *args):
  return {leaf.shape for leaf in compiled.residuals(fun, *args)}


def test_the_projected_input_is_kept_and_not_the_input():
  """In a chain of linear layers only the kernel gradients need the inputs."""
  params = toy.tree({"a/kernel": (48, 80), "b/kernel": (80, 32)})
  state = logra_jax.sketch(rank=RANK, targets=".*").init(params)
  view = logra_jax._state.View(params, state)
  x = toy.normal(1, N, 48)

  def chain(params, x):
    h = logra_jax.dense(x, params["a"]["kernel"])
    return logra_jax.dense(h, params["b"]["kernel"])

  ours = kept_shapes(lambda f: chain(view.tree(f), x), view.free())
  assert (N, RANK) in ours
  assert (N, 48) not in ours and (N, 80) not in ours
  dense = kept_shapes(lambda p: chain(p, x), params)
  assert (N, 48) in dense and (N, 80) in dense
  # With remat, the inputs of the block are kept, but nothing computed in it.
  block = jax.checkpoint(lambda f: chain(view.tree(f), x))
  assert (N, RANK) not in kept_shapes(block, view.free())


def test_kept_in_a_scan_over_layers():
  params = toy.tree({"layers/kernel": (LAYERS, 48, 48)})
  state = logra_jax.sketch(rank=RANK, targets=".*").init(params)
  view = logra_jax._state.View(params, state)
  x = toy.normal(1, N, 48)

  def chain(params):
    body = lambda h, k: (logra_jax.dense(h, k), None)
    return lax.scan(body, x, params["layers"]["kernel"])[0]

  ours = kept_shapes(lambda f: chain(view.tree(f)), view.free())
  assert (LAYERS, N, RANK) in ours and (LAYERS, N, 48) not in ours
  assert (LAYERS, N, 48) in kept_shapes(chain, params)
