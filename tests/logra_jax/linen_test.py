"""Tests of the Linen layers: equal to Flax, and targets under every lifting."""

import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import logra_jax
from logra_jax import linen
from tests.helpers import toy

KEY = jax.random.key(0)
X = toy.normal(1, 2, 3, 8)
MASK = jnp.ones((2, 3), bool)


def assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)


def assert_drop_in(ours, flax, x):
  """Asserts that parameters and outputs are equal bit for bit."""
  variables = ours.init(KEY, x)
  assert_same(variables, flax.init(KEY, x))
  assert_same(ours.apply(variables, x), flax.apply(variables, x))


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16])
def test_dense_is_flax_dense(x_dtype, dtype, param_dtype, use_bias):
  kwargs = {"dtype": dtype, "param_dtype": param_dtype, "use_bias": use_bias}
  ours, flax = linen.Dense(5, **kwargs), nn.Dense(5, **kwargs)
  assert_drop_in(ours, flax, X.astype(x_dtype))


def test_dense_takes_precision_and_initialisers():
  kwargs = {
      "precision": jax.lax.Precision.HIGHEST,
      "kernel_init": nn.initializers.normal(3.0),
      "bias_init": nn.initializers.ones,
  }
  assert_drop_in(linen.Dense(5, **kwargs), nn.Dense(5, **kwargs), X)
  integers = jnp.arange(8)[None]
  assert_drop_in(linen.Dense(5), nn.Dense(5), integers)


@pytest.mark.parametrize(
    "kwargs, shape",
    [
        ({"features": (2, 5)}, (2, 3, 8)),
        ({"features": 5, "axis": (-2, -1)}, (2, 3, 8)),
        ({"features": (4, 2), "axis": (1, 3)}, (2, 3, 4, 5)),
        ({"features": 5, "batch_dims": (0,)}, (2, 3, 8)),
        ({"features": (5,), "dtype": jnp.bfloat16, "use_bias": False}, (2, 8)),
    ],
)
def test_dense_general_is_flax_dense_general(kwargs, shape):
  ours, flax = linen.DenseGeneral(**kwargs), nn.DenseGeneral(**kwargs)
  assert_drop_in(ours, flax, toy.normal(2, *shape))


def materialised(tx_state, updates, params):
  """Returns the updates as dense arrays, `Aᵀ D` for targets."""
  bases = toy.bases(tx_state)
  flat = jax.tree_util.tree_leaves_with_path(
      updates, is_leaf=lambda x: isinstance(x, logra_jax.Update)
  )
  out = []
  for (path, update), leaf in zip(flat, jax.tree.leaves(params), strict=True):
    name = "/".join(str(getattr(p, "key", p)) for p in path)
    value = update.value
    if name in bases:
      value = jnp.einsum("...ri,...ro->...io", bases[name], value)
    out.append(value.reshape(leaf.shape))
  return jax.tree.unflatten(jax.tree.structure(params), out)


def check(model, x, targets=r"(.*/)?kernel", tolerance=1e-4, mask=MASK):
  """Asserts that sketches are `A G`, and that the probe uses `Aᵀ D`."""
  params = model.init(KEY, x)["params"]
  tx = logra_jax.sketch(2, targets=targets, others=optax.sgd(1.0))
  state = tx.init(params)
  logits = lambda p, batch: model.apply({"params": p}, batch["x"])
  batch = {"x": x, "completion_mask": mask}
  loss = lambda p: jnp.sum(jnp.sin(logits(p, batch).astype(jnp.float32)))

  @jax.jit
  def ours(params, state):
    value, grads = logra_jax.value_and_grad(loss)(params, state)
    updates, _ = tx.update(grads, state, params)
    probe = logra_jax.kl_probe(logits, params, state, batch)
    return value, grads, updates, probe(updates)

  value, grads, updates, predicted = ours(params, state)

  @jax.jit
  def dense(params, change):
    value, grads = jax.value_and_grad(loss)(params)
    z, dz = jax.jvp(lambda p: logits(p, batch), (params,), (change,))
    return value, grads, jnp.mean(logra_jax.quadratic_kl(z, dz), where=mask)

  change = materialised(state, updates, params)
  change = jax.tree.map(lambda c, p: c.astype(p.dtype), change, params)
  dense_value, dense_grads, dense_kl = dense(params, change)
  np.testing.assert_allclose(value, dense_value, rtol=1e-5)
  assert predicted > 0
  np.testing.assert_allclose(predicted, dense_kl, rtol=100 * tolerance)
  plan = {t.path: t for t in toy.sketch_state(state).plan.targets}
  bases = toy.bases(state)
  leaves = zip(
      jax.tree_util.tree_leaves_with_path(grads),
      jax.tree.leaves(dense_grads),
      strict=True,
  )
  for (path, grad), dense_grad in leaves:
    name = "/".join(p.key for p in path)
    wanted = np.asarray(dense_grad, np.float32)
    if name in plan:
      t = plan.pop(name)
      assert grad.shape == t.thin and grad.dtype == jnp.float32
      wanted = wanted.reshape(*t.batch, t.d_in, t.d_out)
      wanted = np.einsum("...ri,...io->...ro", bases[name], wanted)
    size = np.max(np.abs(wanted))
    np.testing.assert_allclose(grad, wanted, atol=tolerance * size, rtol=0)
  assert not plan  # every target was checked
  return params


class Layer(nn.Module):
  """A residual layer with the signature of a scan body."""

  dtype: jnp.dtype | None = None

  @nn.compact
  def __call__(self, x, _=None):
    h = linen.Dense(12, dtype=self.dtype, name="up")(x)
    h = linen.Dense(8, dtype=self.dtype, use_bias=False, name="down")(h)
    return x + nn.tanh(h), None


class Lifted(nn.Module):
  lift: str

  @nn.compact
  def __call__(self, x):
    scan = functools.partial(
        nn.scan, variable_axes={"params": 0}, split_rngs={"params": True}
    )
    remat = functools.partial(nn.remat, prevent_cse=False)
    vmap = functools.partial(
        nn.vmap, variable_axes={"params": 0}, split_rngs={"params": True}
    )
    shared = functools.partial(
        nn.vmap, variable_axes={"params": None}, split_rngs={"params": False}
    )
    if self.lift == "remat":
      return nn.remat(Layer)(name="layers")(x)[0]
    if self.lift == "scan":
      return scan(Layer, length=3)(name="layers")(x, None)[0]
    if self.lift == "scan of remat":
      return scan(remat(Layer), length=3)(name="layers")(x, None)[0]
    if self.lift == "remat of scan":
      return remat(scan(Layer, length=3))(name="layers")(x, None)[0]
    if self.lift == "vmap":  # one expert for each row
      return vmap(Layer)(name="layers")(x)[0]
    if self.lift == "vmap, shared":
      return shared(Layer)(name="layers")(x)[0]
    if self.lift == "scan of remat of vmap":
      body = remat(vmap(Layer, in_axes=(0, None)))
      return scan(body, length=3)(name="layers")(x, None)[0]
    if self.lift == "twice":
      layer = Layer(name="layers")
      return layer(layer(x)[0])[0]
    raise AssertionError(self.lift)


@pytest.mark.parametrize(
    "lift, batch",
    [
        ("remat", ()),
        ("scan", (3,)),
        ("scan of remat", (3,)),
        ("remat of scan", (3,)),
        ("vmap", (2,)),
        ("vmap, shared", ()),
        ("scan of remat of vmap", (3, 2)),
        ("twice", ()),
    ],
)
def test_targets_under_lifted_transformations(lift, batch):
  params = check(Lifted(lift), X)
  assert params["layers"]["up"]["kernel"].shape == (*batch, 8, 12)


@pytest.mark.parametrize(
    "kwargs, layout",
    [
        ({"features": (2, 5)}, "ioo"),
        ({"features": 5, "axis": (-2, -1)}, "iio"),
        ({"features": 5, "batch_dims": (0,)}, "bio"),
        ({"features": (5, 2), "batch_dims": (0,), "axis": (1, 2)}, "biioo"),
    ],
)
def test_dense_general_kernels_are_targets(kwargs, layout):
  model = linen.DenseGeneral(**kwargs)
  rows = jax.eval_shape(model.init_with_output, KEY, X)[0].shape[:-1]
  check(model, X, {"kernel": layout}, mask=jnp.ones(rows, bool))


@pytest.mark.parametrize("param_dtype", [jnp.float32, jnp.bfloat16])
def test_half_precision_targets(param_dtype):
  model = linen.Dense(5, dtype=jnp.bfloat16, param_dtype=param_dtype)
  check(model, X, tolerance=2e-2)


def test_boxed_parameters_are_targets_by_their_own_name():
  """`nn.with_partitioning` boxes the array, but does not change its path."""
  init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
  model = linen.Dense(5, kernel_init=init)
  params = model.init(KEY, X)["params"]
  assert isinstance(params["kernel"], nn.Partitioned)
  tx = logra_jax.sketch(2, targets="kernel", others=optax.sgd(1.0))
  state = tx.init(params)
  loss = lambda p: jnp.sum(jnp.sin(model.apply({"params": p}, X)))
  _, grads = logra_jax.value_and_grad(loss)(params, state)
  assert grads["kernel"].value.shape == (2, 5)
  updates, state = tx.update(grads, state, params)
  new_params = logra_jax.apply_updates(params, updates, state)
  assert jax.tree.structure(new_params) == jax.tree.structure(params)
  plain = nn.meta.unbox(params)
  plain_state = tx.init(plain)
  _, plain_grads = logra_jax.value_and_grad(loss)(plain, plain_state)
  np.testing.assert_allclose(
      grads["kernel"].value, plain_grads["kernel"], rtol=1e-6
  )


@pytest.mark.parametrize("layer", [nn.Dense(5), nn.DenseGeneral(5)])
def test_a_target_in_a_layer_of_flax_is_refused_by_name(layer):
  params = layer.init(KEY, X)["params"]
  state = logra_jax.sketch(2, targets="kernel").init(params)
  loss = lambda p: jnp.sum(layer.apply({"params": p}, X))
  with pytest.raises(TypeError, match=r"'kernel'.*logra_jax\.linen\.Dense"):
    logra_jax.value_and_grad(loss)(params, state)
  probe = logra_jax.kl_probe(
      lambda p, b: layer.apply({"params": p}, b["x"]),
      params,
      state,
      {"x": X, "completion_mask": MASK},
  )
  updates = jax.tree.map(lambda x: None, params)
  updates["kernel"] = logra_jax.Update(jnp.ones((2, 5)), jnp.float32(1.0))
  with pytest.raises(TypeError, match=r"'kernel'.*logra_jax\.linen\.Dense"):
    probe(updates)


def test_any_other_use_of_a_target_is_refused_by_name():
  layer = linen.Dense(5)
  params = layer.init(KEY, X)["params"]
  state = logra_jax.sketch(2, targets="kernel").init(params)
  uses = [
      lambda p: jnp.sum(p["kernel"] ** 2),
      lambda p: jnp.sum(jnp.square(p["kernel"])),
      lambda p: jnp.sum(p["kernel"] * 2.0),
      lambda p: jnp.sum(2.0 * p["kernel"]),
      lambda p: jnp.sum(X @ p["kernel"]),
      lambda p: jnp.sum(p["kernel"].T),
      lambda p: jnp.sum(p["kernel"].astype(jnp.bfloat16)),
      lambda p: jnp.sum(p["kernel"][0]),
      lambda p: jnp.sum(jnp.einsum("bti,io->bto", X, p["kernel"])),
  ]
  for use in uses:
    with pytest.raises((TypeError, AttributeError), match="'kernel'"):
      logra_jax.value_and_grad(use)(params, state)
