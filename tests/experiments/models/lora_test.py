"""Tests of LoRA against written-out products and in the compiled program."""

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.models import decoder, lora, tiny
from experiments.runs import checkpoints
import logra_jax
from tests.helpers import compiled

RANK, ALPHA = 3, 12.0
F32 = jnp.float32


@pytest.fixture(scope="module")
def loaded():
  """A small model, none of whose activations has the shape of a kernel."""
  config = dataclasses.replace(
      tiny.CONFIG,
      d_model=22,
      n_layers=3,
      head_dim=6,
      d_ff=40,
      tied_head=False,
      qkv_bias=True,
      remat=True,
  )
  model = decoder.Decoder(config)
  tokens = jnp.arange(10).reshape(2, 5)
  params = jax.jit(model.init)(jax.random.key(0), tokens)["params"]
  return model, params, tokens


def _moved(params):
  """Adapters as after some steps, when `b` is no longer 0."""
  moved = lambda path, x: (
      x + 0.1 * jax.random.normal(jax.random.key(1), x.shape)
      if jax.tree_util.keystr(path).endswith("kernel'].b")
      else x
  )
  return jax.tree_util.tree_map_with_path(moved, params)


def _paths(tree):
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
  return {name(path): leaf for path, leaf in leaves}


def test_wrap_puts_adapters_beside_the_seven_projections(loaded):
  _, params, _ = loaded
  wrapped = lora.wrap(params, RANK, ALPHA, seed=0)
  before, after = _paths(params), _paths(wrapped)
  kernels = {p for p in before if "_proj/kernel" in p}
  assert len(kernels) == 7
  assert set(after) - set(before) == {
      f"{p}/{name}" for p in kernels for name in ("kernel", "a", "b")
  }
  for path in kernels:
    layers, d_in, d_out = before[path].shape
    a, b = after[f"{path}/a"], after[f"{path}/b"]
    assert (a.shape, a.dtype) == ((layers, d_in, RANK), F32)
    assert (b.shape, b.dtype) == ((layers, RANK, d_out), F32)
    assert not b.any()
    # Kaiming's uniform with a = √5: bound √(6 / (1 + 5) / d_in).
    assert 0.9 * d_in**-0.5 < np.abs(a).max() <= d_in**-0.5
    # var of U(-c, c) is c² / 3; 3 layers · d_in · 3 numbers at least.
    np.testing.assert_allclose(np.var(a), 1 / (3 * d_in), rtol=0.25)
  adapters = [after[f"{p}/a"] for p in sorted(kernels)]
  firsts = {float(a.reshape(-1)[0] * a.shape[1] ** 0.5) for a in adapters}
  assert len(firsts) == 7  # Each adapter has random numbers of its own.


def test_wrap_works_on_shapes_alone(loaded):
  _, params, _ = loaded
  shapes = jax.eval_shape(lambda p: p, params)
  abstract = jax.eval_shape(lambda p: lora.wrap(p, RANK, ALPHA, 0), shapes)
  wrapped = lora.wrap(params, RANK, ALPHA, 0)
  assert jax.tree.structure(abstract) == jax.tree.structure(wrapped)
  assert jax.tree.map(jnp.shape, abstract) == jax.tree.map(jnp.shape, wrapped)


def test_nothing_to_adapt_is_an_error():
  with pytest.raises(ValueError, match=r"no kernel for LoRA.*_proj/kernel"):
    lora.wrap({"dense": {"kernel": jnp.ones((2, 2))}}, RANK, ALPHA, 0)


def test_the_first_adapters_change_nothing_and_merge_to_the_kernels(loaded):
  model, params, tokens = loaded
  wrapped = lora.wrap(params, RANK, ALPHA, 0)
  np.testing.assert_array_equal(
      model.apply({"params": wrapped}, tokens),
      model.apply({"params": params}, tokens),
  )
  merged = lora.merge(wrapped)
  assert jax.tree.structure(merged) == jax.tree.structure(params)
  jax.tree.map(np.testing.assert_array_equal, merged, params)
  assert lora.merge(params) is not wrapped
  jax.tree.map(np.testing.assert_array_equal, lora.merge(params), params)


def test_a_model_with_adapters_is_the_model_of_the_merged_kernels(loaded):
  model, params, tokens = loaded
  moved = _moved(lora.wrap(params, RANK, ALPHA, 0))
  merged = lora.merge(moved)
  # Written out for one kernel: W + (12 / 3) a b.
  node, kernel = moved["layers"]["up_proj"]["kernel"], params["layers"]
  delta = np.einsum("ldr,lro->ldo", node.a, node.b)
  np.testing.assert_allclose(
      merged["layers"]["up_proj"]["kernel"],
      kernel["up_proj"]["kernel"] + 4 * delta,
      atol=1e-6,
  )
  adapted = model.apply({"params": moved}, tokens)
  expected = model.apply({"params": merged}, tokens)
  before = model.apply({"params": params}, tokens)
  assert np.abs(expected - before).max() > 0.1  # The adapters matter.
  np.testing.assert_allclose(adapted, expected, atol=1e-4)


def test_the_gradient_of_the_adapters_is_the_chain_rules():
  """d/da = s Xᵀ (dY bᵀ) and d/db = s (X a)ᵀ dY; 0 for the kernel."""
  draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
  x, dy = draw(0, 5, 8), draw(1, 5, 6)
  node = lora.LoRAKernel(draw(2, 8, 6), draw(3, 8, 2), draw(4, 2, 6), 0.5)
  loss = lambda node: jnp.sum(logra_jax.dense(x, node) * dy)
  grads = jax.grad(loss)(node)
  np.testing.assert_allclose(grads.a, 0.5 * x.T @ (dy @ node.b.T), rtol=1e-4)
  np.testing.assert_allclose(grads.b, 0.5 * (x @ node.a).T @ dy, rtol=1e-4)
  assert not grads.kernel.any()


def test_batched_kernels_and_the_compute_dtype():
  draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
  x, kernel = draw(0, 3, 5, 8), draw(1, 3, 8, 6)
  node = lora.LoRAKernel(kernel, draw(2, 3, 8, 2), draw(3, 3, 2, 6), 2.0)
  dims = (((2,), (1,)), ((0,), (0,)))
  y = logra_jax.dot_general(x, node, dims)
  expected = jnp.einsum("bni,bio->bno", x, node.merged())
  np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)
  half = lora.LoRAKernel(node.kernel, node.a, node.b, 2.0, dtype=jnp.bfloat16)
  y = logra_jax.dot_general(
      x.astype(jnp.bfloat16), half, dims, preferred_element_type=F32
  )
  assert y.dtype == F32
  np.testing.assert_allclose(y, expected, atol=0.03 * np.abs(expected).max())


def test_a_kernel_used_the_other_way_round_is_an_error():
  node = lora.LoRAKernel(
      jnp.ones((4, 4)), jnp.ones((4, 2)), jnp.ones((2, 4)), 1.0
  )
  with pytest.raises(ValueError, match=r"\(4, 4\) is contracted over axes"):
    logra_jax.dot_general(jnp.ones((3, 4)), node, (((1,), (1,)), ((), ())))


def test_bfloat16_kernels_merge_in_float32():
  kernel = jnp.full((2, 2), 1.0, jnp.bfloat16)
  a, b = jnp.full((2, 1), 0.5), jnp.full((1, 2), 2.0**-8)
  # 1 + 4 · 2⁻⁹ = 1 + 2⁻⁷, which bfloat16 can represent; it cannot 1 + 2⁻⁹.
  merged = lora.LoRAKernel(kernel, a, b, 4.0).merged()
  assert merged.dtype == jnp.bfloat16
  np.testing.assert_array_equal(merged.astype(F32), 1 + 2.0**-7)


def _loss(model, params, tokens):
  logits = model.apply({"params": params}, tokens)
  return -jnp.mean(jax.nn.log_softmax(logits)[..., 0])


def test_no_dense_gradient_is_computed(loaded):
  """No product or buffer but the kernels themselves has a kernel's shape."""
  model, params, tokens = loaded
  wrapped = lora.wrap(params, RANK, ALPHA, 0)
  tx = optax.sgd(1.0)

  def step(params, tokens):
    state = tx.init(params)
    loss = lambda p: _loss(model, p, tokens)
    _, grads = logra_jax.value_and_grad(loss)(params, state)
    # Trains adapters only, like optimizers.make_optimizer.
    return [g for path, g in _paths(grads).items() if path[-2:] in ("/a", "/b")]

  kernels = [
      x.shape for p, x in _paths(params).items() if p.endswith("_proj/kernel")
  ]
  buffers = compiled.dense_buffers(jax.jit(step), (wrapped, tokens), kernels)
  assert buffers == []
  dense = lambda params, tokens: jax.grad(lambda p: _loss(model, p, tokens))(
      params
  )
  control = compiled.dense_buffers(jax.jit(dense), (params, tokens), kernels)
  assert len(control) >= 7


def test_the_probe_predicts_the_kl_of_adapters(loaded):
  model, params, tokens = loaded
  wrapped = _moved(lora.wrap(params, RANK, ALPHA, 0))
  direction = jax.tree_util.tree_map_with_path(
      lambda path, x: (
          1e-3 * jax.random.normal(jax.random.key(2), x.shape)
          if jax.tree_util.keystr(path).endswith((".a", ".b"))
          else None
      ),
      wrapped,
  )
  batch = {"tokens": tokens, "completion_mask": jnp.ones(tokens.shape, bool)}
  probe = logra_jax.kl_probe(
      lambda p, b: model.apply({"params": p}, b["tokens"]),
      wrapped,
      (),
      batch,
  )
  predicted = jax.jit(lambda p, d: p(d))(probe, direction)
  new = logra_jax.apply_updates(wrapped, direction, ())
  np.testing.assert_array_equal(
      new["layers"]["q_proj"]["kernel"].kernel,
      wrapped["layers"]["q_proj"]["kernel"].kernel,
  )
  assert predicted > 0
  np.testing.assert_allclose(
      logra_jax.realised_kl(probe, new), predicted, rtol=0.1
  )


def test_checkpoints_keep_adapters(loaded, tmp_path):
  _, params, _ = loaded
  wrapped = _moved(lora.wrap(params, RANK, ALPHA, 0))
  saved = checkpoints.Checkpoints(tmp_path)
  saved.save(1, wrapped)
  template = jax.eval_shape(lambda p: lora.wrap(p, RANK, ALPHA, 0), params)
  update, restored = saved.restore(template)
  assert update == 1
  assert jax.tree.structure(restored) == jax.tree.structure(wrapped)
  jax.tree.map(np.testing.assert_array_equal, restored, wrapped)


def test_scan_vmap_and_donation_slice_all_of_a_node():
  draw = lambda i, *shape: jax.random.normal(jax.random.key(i), shape)
  node = lora.LoRAKernel(
      draw(0, 3, 8, 8), draw(1, 3, 8, 2), draw(2, 3, 2, 8), 0.1
  )
  x, merged = draw(3, 5, 8), node.merged()
  body = lambda h, k: (logra_jax.dense(h, k), None)
  expected = x @ merged[0] @ merged[1] @ merged[2]
  y, _ = lax.scan(body, x, node)
  np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-3)
  each = jax.vmap(logra_jax.dense, in_axes=(None, 0))(x, node)
  np.testing.assert_allclose(each, x @ merged, rtol=1e-4, atol=1e-4)
  double = jax.jit(lambda n: jax.tree.map(lambda p: 2 * p, n), donate_argnums=0)
  doubled = double(node)
  assert node.kernel.is_deleted() and node.a.is_deleted()
  assert doubled.scaling == 0.1
