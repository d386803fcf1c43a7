"""Small sketched parameter trees, their gradients, and checks of states."""

import jax
import jax.numpy as jnp

import logra_jax
from tests.helpers import toy

F32 = jnp.float32
SHAPES = {"a/kernel": (12, 20), "b/kernel": (3, 20, 7), "b/bias": (7,)}
MLP = {"a/kernel": (12, 20), "b/kernel": (20, 7)}


def make(dtype=F32, shapes=SHAPES, wrap=lambda tx: tx, **kwargs):
  """Returns `(tx, params, opt_state)` with the kernels as targets of rank 4.

  Args:
    dtype: The dtype of the parameters.
    shapes: The shapes of the parameters, by path.
    wrap: Called with the `sketch` transformation; returns `tx`.
    **kwargs: Arguments of `sketch`.
  """
  kwargs = {"rank": 4, "targets": ".*kernel"} | kwargs
  tx = wrap(logra_jax.sketch(**kwargs))
  params = toy.tree(shapes, dtype=dtype)
  return tx, params, tx.init(params)


def gradients(params, state, seed=0, size=1.0):
  """Random gradients like those of `value_and_grad`: thin, dense, or None."""
  plan = toy.sketch_state(state).plan
  shapes = {t.path: t.thin for t in plan.targets}
  paths = jax.tree_util.tree_flatten_with_path(params)[0]
  out = {}
  for i, (key_path, leaf) in enumerate(paths):
    path = logra_jax._paths.path_string(key_path)
    shape = shapes.get(path, leaf.shape)
    dtype = F32 if path in shapes else leaf.dtype
    out[path] = size * toy.normal(seed + i, *shape, dtype=dtype)
    if path in plan.frozen:
      out[path] = None
  treedef = jax.tree.structure(params)
  return jax.tree.unflatten(treedef, out.values())


def assert_same_kind(old, new):
  """Asserts that structure, shapes and dtypes are the same."""
  assert jax.tree.structure(old) == jax.tree.structure(new)
  kind = lambda x: (x.shape, x.dtype, x.weak_type)
  olds, news = jax.tree.leaves(old), jax.tree.leaves(new)
  for a, b in zip(olds, news, strict=True):
    assert kind(jnp.asarray(a)) == kind(jnp.asarray(b))


def assert_thin(state, params):
  """Asserts that all leaves are arrays, smaller than every target kernel."""
  plan = toy.sketch_state(state).plan
  smallest = min(toy.get(params, t.path).size for t in plan.targets)
  for leaf in jax.tree.leaves(state):
    assert isinstance(leaf, jax.Array)
    assert leaf.size < smallest


def mlp(params, x):
  """A loss of the network with the parameters `MLP`, both of them targets."""
  h = jnp.tanh(logra_jax.dense(x, params["a"]["kernel"]))
  y = logra_jax.dense(h, params["b"]["kernel"])
  return jnp.mean(jnp.sin(y.astype(F32)))


def sketch_gradients(loss, params, state, *args):
  """Returns the gradients and the value of `loss`, compiled."""
  fun = jax.jit(logra_jax.value_and_grad(loss))
  value, grads = fun(params, state, *args)
  return grads, value
