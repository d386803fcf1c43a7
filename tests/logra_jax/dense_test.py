"""Tests of the sketched dense operation against dense gradients.

Each model is a plain function of a parameter tree. Its dense gradient `G` is
computed by `jax.grad` of the same function on the ordinary tree, or by NumPy in
float64. The sketch must be `A G` with the basis that the library draws.
"""

from flax import linen as nn
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import logra_jax
from logra_jax import linen as lnn
from tests.helpers import oracles, sketched, toy

BF16, F32 = jnp.bfloat16, jnp.float32


def make(shapes, **kwargs):
  _, params, state = sketched.make(shapes=shapes, **kwargs)
  return params, state


def check(loss, params, state, *args, tol=2e-5):
  """Asserts that sketches are `A G` for the dense gradient `G` of `loss`."""
  grads, value = sketched.sketch_gradients(loss, params, state, *args)
  dense_value, dense = jax.jit(jax.value_and_grad(loss))(params, *args)
  np.testing.assert_array_equal(value, dense_value)
  for target in state.plan.targets:
    got = toy.get(grads, target.path)
    assert got.dtype == F32 and got.shape == target.thin
    matrix = (*target.batch, target.d_in, target.d_out)
    gradient = toy.get(dense, target.path).reshape(matrix)
    expected = oracles.sketch(toy.bases(state)[target.path], gradient)
    oracles.assert_close(got, expected, tol)
    # The comparison would detect the basis of another update.
    wrong = oracles.sketch(toy.bases(state, 1)[target.path], gradient)
    with pytest.raises(AssertionError):
      oracles.assert_close(got, wrong, 0.1)
  return grads, dense


@pytest.mark.parametrize(
    "d_in,d_out,storage,compute",
    [
        (40, 6, F32, F32),
        (6, 40, F32, F32),
        (16, 16, F32, F32),
        (40, 6, F32, BF16),
        (40, 6, BF16, BF16),
        (40, 6, BF16, F32),
    ],
)
def test_sketch_and_input_gradient(d_in, d_out, storage, compute):
  params, state = make({"kernel": (d_in, d_out)}, dtype=storage)
  x = toy.normal(1, 3, 5, d_in, dtype=compute)
  c = toy.normal(2, 3, 5, d_out, dtype=compute)
  layer = lnn.Dense(d_out, use_bias=False, dtype=compute)

  def loss(params, x):
    y = layer.apply({"params": params}, x)
    assert y.dtype == compute
    return jnp.sum((y * c).astype(F32))

  def both(params, state, x):
    return jax.grad(
        lambda x: logra_jax.value_and_grad(loss)(params, state, x)[0]
    )(x)

  grads, value = sketched.sketch_gradients(loss, params, state, x)
  np.testing.assert_array_equal(value, jax.jit(loss)(params, x))
  gradient = oracles.dense_gradient(x.reshape(-1, d_in), c.reshape(-1, d_out))
  expected = oracles.sketch(toy.bases(state)["kernel"], gradient)
  # bfloat16: the projected input is rounded to 8 bits, but the sum is float32.
  oracles.assert_close(
      grads["kernel"], expected, 1e-5 if compute == F32 else 2**-7
  )
  assert grads["kernel"].dtype == F32
  x_bar = jax.jit(both)(params, state, x)
  np.testing.assert_array_equal(x_bar, jax.jit(jax.grad(loss, 1))(params, x))


@pytest.mark.parametrize("distribution", ["gaussian", "orthonormal"])
def test_other_distributions(distribution):
  params, state = make(sketched.MLP, distribution=distribution)
  check(sketched.mlp, params, state, toy.normal(1, 9, 12))


def test_forward_is_lax_dot_general_bit_for_bit():
  params, state = make({"kernel": (3, 8, 5)})
  x = toy.normal(1, 3, 4, 8)
  numbers = (((2,), (1,)), ((0,), (0,)))
  seen = []

  def loss(params, x):
    y = logra_jax.dot_general(x, params["kernel"], numbers)
    seen.append(y)
    return jnp.sum(y), y

  (_, y), _ = logra_jax.value_and_grad(loss, has_aux=True)(params, state, x)
  np.testing.assert_array_equal(
      y, lax.dot_general(x, params["kernel"], numbers)
  )
  plain = logra_jax.dot_general(
      x.astype(BF16),
      params["kernel"].astype(BF16),
      numbers,
      preferred_element_type=F32,
  )
  assert plain.dtype == F32


def test_preferred_element_type():
  params, state = make({"kernel": (8, 5)}, dtype=BF16)
  x = toy.normal(1, 4, 8, dtype=BF16)

  def loss(params, x):
    y = logra_jax.dot_general(
        x,
        params["kernel"],
        (((1,), (0,)), ((), ())),
        preferred_element_type=F32,
    )
    assert y.dtype == F32
    return jnp.sum(y**2)

  check(loss, params, state, x, tol=2**-6)


@pytest.mark.parametrize(
    "x_shape,k_shape,numbers,layout",
    [
        # Heads: several output axes, several input axes, or both.
        ((3, 4, 6), (6, 2, 5), (((2,), (0,)), ((), ())), "ioo"),
        ((3, 4, 2, 6), (2, 6, 5), (((2, 3), (0, 1)), ((), ())), "iio"),
        ((3, 2, 6), (2, 6, 3, 4), (((1, 2), (0, 1)), ((), ())), "iioo"),
        # Contracted axes of x that are not its last and in another order.
        ((6, 3, 2), (2, 6, 5), (((2, 0), (0, 1)), ((), ())), "iio"),
        # Experts: a batch axis, which need not come first in x.
        ((3, 4, 8), (3, 8, 5), (((2,), (1,)), ((0,), (0,))), "bio"),
        ((4, 8, 3), (3, 8, 5), (((1,), (1,)), ((2,), (0,))), ""),
        (
            (2, 4, 3, 6, 2),
            (3, 2, 2, 6, 5),
            (((4, 3), (2, 3)), ((2, 0), (0, 1))),
            "bbiio",
        ),
    ],
)
def test_axes(x_shape, k_shape, numbers, layout):
  targets = {"kernel": layout}
  params, state = make({"kernel": k_shape}, targets=targets, rank=3)
  x = toy.normal(1, *x_shape)
  y = lax.dot_general(x, params["kernel"], numbers)
  c = toy.normal(2, *y.shape)

  def loss(params, x):
    return jnp.sum(c * logra_jax.dot_general(x, params["kernel"], numbers) ** 2)

  check(loss, params, state, x)


def test_dense_general_layers():
  query = lnn.DenseGeneral((2, 5), axis=-1)
  out = lnn.DenseGeneral(6, axis=(-2, -1))
  experts = lnn.DenseGeneral(4, axis=-1, batch_dims=(0,))
  params = toy.tree(
      {
          "query/kernel": (6, 2, 5),
          "query/bias": (2, 5),
          "out/kernel": (2, 5, 6),
          "out/bias": (6,),
          "experts/kernel": (3, 6, 4),
          "experts/bias": (3, 4),
      }
  )
  tx = logra_jax.sketch(
      rank=3,
      targets={
          "query/kernel": "ioo",
          "out/kernel": "iio",
          "experts/kernel": "bio",
      },
      others=optax.sgd(1.0),
  )
  state = tx.init(params)

  def loss(params, x):
    x = jnp.tanh(query.apply({"params": params["query"]}, x))
    x = jnp.tanh(out.apply({"params": params["out"]}, x))
    return jnp.mean(experts.apply({"params": params["experts"]}, x) ** 2)

  grads, dense = check(loss, params, state, toy.normal(1, 3, 4, 6))
  oracles.assert_close(grads["query"]["bias"], dense["query"]["bias"], 1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_float_dtypes(dtype):
  with jax.enable_x64(dtype == "float64"):
    params, state = make(sketched.MLP, dtype=dtype)
    x = toy.normal(1, 9, 12, dtype=dtype)
    check(
        sketched.mlp,
        params,
        state,
        x,
        tol=1e-6 if dtype == "float64" else 2**-8,
    )


def test_the_next_update_is_not_compiled_again():
  params, state = make(sketched.MLP, others=optax.sgd(1.0))
  traced = []

  @jax.jit
  def step(params, state, x):
    traced.append(1)
    _, grads = logra_jax.value_and_grad(sketched.mlp)(params, state, x)
    tx = logra_jax.sketch(rank=4, targets=".*kernel", others=optax.sgd(1.0))
    updates, state = tx.update(grads, state, params)
    return logra_jax.apply_updates(params, updates, state), state

  for _ in range(3):
    params, state = step(params, state, toy.normal(1, 9, 12))
  assert len(traced) == 1 and int(state.count) == 3


def stacked(params, x, *, remat=False, unroll=1):
  """A stack of residual layers, as a scan over layers."""

  def layer(h, kernels):
    u = jnp.tanh(logra_jax.dense(h, kernels["up"]))
    return h + logra_jax.dense(u, kernels["down"]), None

  layer = jax.checkpoint(layer) if remat else layer
  h, _ = lax.scan(layer, x, params["layers"], unroll=unroll)
  return jnp.mean(jnp.sin(h))


STACK = {"layers/up": (3, 8, 10), "layers/down": (3, 10, 8)}


@pytest.mark.parametrize("remat", [False, True])
def test_scan_over_stacked_layers(remat):
  params, state = make(STACK, targets="layers/.*")
  loss = lambda p, x: stacked(p, x, remat=remat)
  check(loss, params, state, toy.normal(1, 5, 8))


def test_checkpoint():
  params, state = make(sketched.MLP)
  check(jax.checkpoint(sketched.mlp), params, state, toy.normal(1, 9, 12))


@pytest.mark.parametrize("remat", [False, True])
def test_flax_scan(remat):

  class Layer(nn.Module):

    @nn.compact
    def __call__(self, h):
      u = jnp.tanh(lnn.Dense(10, name="up_proj")(h))
      return h + lnn.Dense(8, name="down_proj")(u), None

  class Model(nn.Module):

    @nn.compact
    def __call__(self, h):
      layer = nn.remat(Layer, prevent_cse=False) if remat else Layer
      scan = nn.scan(
          layer,
          variable_axes={"params": 0},
          split_rngs={"params": True},
          length=3,
      )
      return scan(name="layers")(h)[0]

  x = toy.normal(1, 5, 8)
  model = Model()
  params = model.init(jax.random.key(0), x)["params"]
  state = logra_jax.sketch(rank=4, others=optax.sgd(1.0)).init(params)
  assert len(state.plan.targets) == 2  # the default pattern matches them
  loss = lambda p, x: jnp.mean(jnp.sin(model.apply({"params": p}, x)))
  grads, dense = check(loss, params, state, x)
  for name in ("up_proj", "down_proj"):
    oracles.assert_close(
        grads["layers"][name]["bias"], dense["layers"][name]["bias"], 1e-5
    )


def test_vmap_over_examples():
  params, state = make(sketched.MLP)
  x = toy.normal(1, 3, 5, 12)
  each = jax.jit(
      jax.vmap(logra_jax.value_and_grad(sketched.mlp), (None, None, 0))
  )
  _, grads = each(params, state, x)
  dense = jax.vmap(jax.grad(sketched.mlp), (None, 0))(params, x)
  for path, basis in toy.bases(state).items():
    assert toy.get(grads, path).shape == (
        3,
        *basis.shape[:1],
        *toy.get(params, path).shape[1:],
    )
    expected = oracles.sketch(basis, toy.get(dense, path))
    oracles.assert_close(toy.get(grads, path), expected, 2e-5)


@pytest.mark.parametrize("in_axes", [0, None])
def test_vmap_over_kernels(in_axes):
  params, state = make({"kernel": (3, 8, 5)})
  x = toy.normal(1, *((3,) if in_axes == 0 else ()), 4, 8)

  def loss(params, x):
    y = jax.vmap(logra_jax.dense, (in_axes, 0))(x, params["kernel"])
    return jnp.mean(jnp.sin(y))

  check(loss, params, state, x)


def test_layer_called_twice():
  params, state = make({"kernel": (8, 8), "once/kernel": (8, 8)})

  def loss(params, x):
    h = jnp.tanh(logra_jax.dense(x, params["kernel"]))
    h = jnp.tanh(logra_jax.dense(h, params["once"]["kernel"]))
    return jnp.mean(jnp.sin(logra_jax.dense(h, params["kernel"])))

  check(loss, params, state, toy.normal(1, 5, 8))


@pytest.mark.parametrize(
    "distribution", ["rademacher", "gaussian", "orthonormal"]
)
def test_a_sketch_of_full_rank_is_the_dense_gradient(distribution):
  params, state = make(sketched.MLP, rank=64, distribution=distribution)
  assert [t.rank for t in state.plan.targets] == [12, 20]
  x = toy.normal(1, 9, 12)
  grads, _ = sketched.sketch_gradients(sketched.mlp, params, state, x)
  dense = jax.jit(jax.grad(sketched.mlp))(params, x)
  for path in toy.bases(state):
    oracles.assert_close(toy.get(grads, path), toy.get(dense, path), 2e-5)


# -- forward mode ------------------------------------------------------------


def tangents(fun, params, state, factors, scale):
  """Our tangent of `fun` along `Aᵀ D + wd · scale · W`, and the dense one."""
  view = logra_jax._state.View(params, state)
  updates = jax.tree.map(lambda _: None, params)
  for path, factor in factors.items():
    *parents, name = path.split("/")
    node = toy.get(updates, "/".join(parents)) if parents else updates
    node[name] = logra_jax.Update(factor, jnp.float32(scale))
  tree, free, direction = view.perturbation(updates)
  ours = jax.jit(lambda f, d: jax.jvp(lambda f: fun(tree(f)), (f,), (d,)))(
      free, direction
  )

  def dense(path, leaf):
    path = logra_jax._paths.path_string(path)
    delta = float(state.weight_decay) * scale * oracles.f64(leaf)
    if path in factors:
      delta += oracles.reconstruct(
          toy.bases(state)[path], factors[path]
      ).reshape(leaf.shape)
    return jnp.asarray(delta, leaf.dtype)

  delta = jax.tree_util.tree_map_with_path(dense, params)
  return ours, jax.jit(lambda p, d: jax.jvp(fun, (p,), (d,)))(params, delta)


@pytest.mark.parametrize(
    "model,dtype",
    [
        ("mlp", F32),
        ("mlp", BF16),
        ("remat", F32),
        ("scan", F32),
        ("scan_remat", F32),
        ("scan_remat", BF16),
    ],
)
def test_forward_mode(model, dtype):
  shapes, d_in = (sketched.MLP, 12) if model in ("mlp", "remat") else (STACK, 8)
  params, state = make(shapes, targets=".*", weight_decay=0.25, dtype=dtype)
  x = toy.normal(1, 5, d_in, dtype=dtype)
  fun = {
      "mlp": lambda p: sketched.mlp(p, x),
      "remat": lambda p: jax.checkpoint(sketched.mlp)(p, x),
      "scan": lambda p: stacked(p, x),
      "scan_remat": lambda p: stacked(p, x, remat=True),
  }[model]
  factors = {
      t.path: toy.normal(i, *t.thin) for i, t in enumerate(state.plan.targets)
  }
  (y, y_dot), (dense_y, dense_dot) = tangents(fun, params, state, factors, 8.0)
  tol = 1e-5 if dtype == F32 else 0.05
  oracles.assert_close(y, dense_y, 1e-6 if dtype == F32 else 2**-7)
  oracles.assert_close(y_dot, dense_dot, tol)
  # The comparison would detect a missing decay term.
  state = state._replace(weight_decay=jnp.float32(0))
  (_, without), _ = tangents(fun, params, state, factors, 8.0)
  with pytest.raises(AssertionError):
    oracles.assert_close(without, dense_dot, tol)


def test_forward_mode_of_several_axes():
  numbers = (((3, 1), (1, 2)), ((2,), (0,)))
  targets = {"kernel": "biioo"}
  params, state = make(
      {"kernel": (3, 2, 4, 5, 2)}, targets=targets, weight_decay=1.0
  )
  x = toy.normal(1, 6, 4, 3, 2)
  fun = lambda p: logra_jax.dot_general(x, p["kernel"], numbers)
  factors = {"kernel": toy.normal(2, 3, 4, 10)}
  ours, dense = tangents(fun, params, state, factors, -2.0)
  oracles.assert_close(ours[1], dense[1], 1e-5)


# -- misuse ------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda x, k: jnp.sum(k),
        lambda x, k: x @ k,
        lambda x, k: jnp.einsum("ni,io->no", x, k),
        lambda x, k: k + 1,
        lambda x, k: 2 * k,
        lambda x, k: k.T,
        lambda x, k: k.astype(BF16),
        lambda x, k: k[0],
    ],
    ids=["sum", "matmul", "einsum", "add", "mul", "T", "astype", "index"],
)
def test_other_operations_on_a_target_are_refused(use):
  params, state = make({"block/kernel": (8, 5)})
  loss = lambda p, x: jnp.sum(use(x, p["block"]["kernel"]))
  match = "'block/kernel'.*logra_jax.dot_general"
  with pytest.raises((TypeError, AttributeError), match=match):
    logra_jax.value_and_grad(loss)(params, state, toy.normal(1, 4, 8))


@pytest.mark.parametrize(
    "shape,numbers,match",
    [
        ((8, 5), (((1,), (1,)), ((), ())), "'kernel' is contracted over"),
        ((2, 4, 5), (((1, 2), (0, 1)), ((), ())), "give its layout"),
        ((8, 2, 5), (((1,), (0,)), ((), ())), "1 batch, 1 input and 1 output"),
    ],
)
def test_layouts_that_do_not_fit_the_product(shape, numbers, match):
  params, state = make({"kernel": shape})
  (_x_axes, k_axes), _ = numbers
  x = jnp.ones((3, *(shape[a] for a in k_axes)))
  loss = lambda p: jnp.sum(logra_jax.dot_general(x, p["kernel"], numbers))
  with pytest.raises(ValueError, match=match):
    logra_jax.value_and_grad(loss)(params, state)


def test_precision_reaches_every_product():
  params, state = make({"kernel": (12, 7)})

  def loss(params, x):
    y = logra_jax.dense(x, params["kernel"], precision="highest")
    return jnp.sum(jnp.square(y))

  step = lambda p, s, x: logra_jax.value_and_grad(loss)(p, s, x)
  jaxpr = str(jax.make_jaxpr(step)(params, state, jnp.ones((3, 12))))
  products = jaxpr.count("dot_general[")
  assert products >= 3
  assert jaxpr.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == (
      products
  )
