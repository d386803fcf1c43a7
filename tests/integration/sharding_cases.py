"""Test cases that need eight devices; run by `sharding_test.py`."""

import functools
import re

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import logra_jax
from tests.helpers import linear_policy as lp
from tests.helpers import small_policy as sp

RANK = 3
TX = optax.chain(
    logra_jax.sketch(
        RANK,
        targets=r"layers/(q|down)_proj/kernel",
        others={r"layers/o_proj/kernel|embed/.*": optax.adam(0.1)},
        weight_decay=0.1,
        clip_norm=1.0,
    ),
    optax.scale_by_learning_rate(0.1),
    logra_jax.kl_budget(0.1),
)


def step(params, opt_state, batch):
  """One training step."""
  loss, grads = logra_jax.value_and_grad(sp.loss_fn)(params, opt_state, batch)
  probe = logra_jax.kl_probe(
      sp.hidden_fn, params, opt_state, batch, head_fn=sp.head_fn, chunk_size=16
  )
  updates, opt_state = TX.update(grads, opt_state, params, probe=probe)
  params = logra_jax.apply_updates(params, updates, opt_state)
  return params, opt_state, grads, loss


step = jax.jit(step)


@functools.cache
def inputs():
  params, batch = sp.make_params(), sp.make_batch(batch=8)
  return params, TX.init(params), batch


@functools.cache
def single():
  """The step on one device."""
  return step(*inputs())


def kernels(in_axis, out_axis):
  """Returns specs of the two targets `[layers, d_in, d_out]`."""
  spec = P(None, in_axis, out_axis)
  return {"q_proj": spec, "down_proj": spec}


LAYOUTS = {
    "data parallel": ({"data": 8}, P("data"), kernels(None, None)),
    "fsdp": ({"data": 8}, P("data"), kernels("data", None)),
    "tensor": ({"model": 8}, P(), kernels(None, "model")),
    "fsdp and tensor": (
        {"data": 2, "model": 4},
        P("data"),
        kernels("data", "model"),
    ),
}


def place(mesh, tree, batch_spec, specs):
  params, opt_state, batch = tree
  put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  params = jax.tree_util.tree_map_with_path(
      lambda path, x: put(
          x, specs.get(path[-2].key, P()) if x.ndim == 3 else P()
      ),
      params,
  )
  return params, put(opt_state, P()), put(batch, batch_spec)


def make_mesh(axes, kind=AxisType.Auto):
  return jax.make_mesh(
      tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes)
  )


def assert_close(a, b, atol=1e-5):
  jax.tree.map(
      lambda x, y: np.testing.assert_allclose(
          np.asarray(x), np.asarray(y), rtol=1e-4, atol=atol
      ),
      a,
      b,
  )


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_sharded_step_is_the_step_on_one_device(name):
  axes, batch_spec, specs = LAYOUTS[name]
  mesh = make_mesh(axes)
  params, opt_state, batch = place(mesh, inputs(), batch_spec, specs)
  assert len(params["layers"]["q_proj"]["kernel"].sharding.device_set) == 8
  wanted_params, wanted_state, wanted_grads, wanted_loss = single()
  new_params, new_state, grads, loss = step(params, opt_state, batch)
  thin = grads["layers"]["q_proj"]["kernel"]
  assert thin.shape == (sp.LAYERS, RANK, sp.WIDTH)
  assert_close((loss, grads), (wanted_loss, wanted_grads))
  assert_close(new_state, wanted_state)
  # A factor can be rounded to the other neighbor, which differs by 2⁻⁸.
  assert_close(new_params, wanted_params, atol=1e-4)
  for target in specs:  # the compiler chooses the sharding of the others
    old, new = (p["layers"][target]["kernel"] for p in (params, new_params))
    assert new.sharding.is_equivalent_to(old.sharding, old.ndim)


def test_the_step_compared_does_move_the_parameters():
  """The change far exceeds the tolerance above, and the step is not skipped."""
  new_params, new_state, _, _ = single()
  change = jax.tree.map(
      lambda a, b: float(jnp.max(jnp.abs(a - b))), new_params, inputs()[0]
  )
  layers = change["layers"]
  for name in ("q_proj", "down_proj", "o_proj"):
    assert layers[name]["kernel"] > 3e-3, change
  assert layers["up_proj"]["kernel"] == 0
  diagnostics = logra_jax.diagnostics(new_state)
  assert 0 < float(diagnostics["alpha"]) < 3
  assert int(diagnostics["skipped"]) == 0


def test_the_basis_is_the_same_bits_however_it_is_sharded():
  tx = logra_jax.sketch(8)
  params = {"q_proj": {"kernel": jnp.ones((2, 64, 16))}}
  state = tx.init(params)
  (target,) = state.plan.targets
  draw = lambda s: target.basis(s.keys(s.count)[target.path])
  wanted = jax.jit(draw)(state)
  assert wanted.shape == (2, 8, 64)
  mesh = make_mesh({"data": 2, "model": 4})
  for spec in (P(), P(None, "data", "model"), P("data", None, "model")):
    got = jax.jit(draw, out_shardings=NamedSharding(mesh, spec))(state)
    np.testing.assert_array_equal(got, wanted)


def collectives(text):
  """Returns the sizes of all arrays in the collectives of a program."""
  names = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
  lines = re.findall(rf"= (.*?) (?:{names})(?:-start)?\(", text)
  shapes = [s for line in lines for s in re.findall(r"\w\d+\[([\d,]*)\]", line)]
  return [int(np.prod([int(n) for n in s.split(",") if n])) for s in shapes]


def test_data_parallel_gradients_are_reduced_as_sketches():
  d_in, d_out = 64, 48
  mesh = make_mesh({"data": 8})
  put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  params = {"q_proj": {"kernel": put(jnp.ones((d_in, d_out)), P())}}
  x = put(jnp.ones((16, 4, d_in)), P("data"))
  state = logra_jax.sketch(RANK).init(params)
  loss = lambda p, x: jnp.sum(
      jnp.sin(logra_jax.dense(x, p["q_proj"]["kernel"]))
  )
  text = lambda f, *a: jax.jit(f).lower(*a).compile().as_text()
  thin = collectives(text(logra_jax.value_and_grad(loss), params, state, x))
  assert RANK * d_out in thin and max(thin) == RANK * d_out, thin
  dense = collectives(text(jax.value_and_grad(loss), params, x))
  assert d_in * d_out in dense, dense


def test_a_data_parallel_probe_exchanges_no_tokens():
  """Each device evaluates the head for its own responses."""
  params, opt_state, batch = linear_inputs()
  put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  mesh = make_mesh({"data": 8})
  probe = logra_jax.kl_probe(
      lp.hidden_fn,
      put(params, P()),
      put(opt_state, P()),
      put(batch, P("data")),
      head_fn=lp.head_fn,
      chunk_size=16,  # two positions of eight responses
  )
  updates = lp.make_params()
  updates["q_proj"]["kernel"] = updates["q_proj"]["kernel"][:RANK]
  updates = jax.tree.map(
      lambda x: logra_jax.Update(x, jnp.float32(1.0)), updates
  )
  call = jax.jit(lambda probe, updates: probe(updates))
  sizes = collectives(call.lower(probe, updates).compile().as_text())
  assert sizes and max(sizes) < 8, sizes


def test_a_fully_sharded_gradient_needs_no_scatter_of_a_kernel():
  """Kernels are gathered for the product, but their gradients stay thin."""
  d_in, d_out = 64, 48
  mesh = make_mesh({"data": 8})
  put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  params = {"q_proj": {"kernel": put(jnp.ones((d_in, d_out)), P("data"))}}
  x = put(jnp.ones((16, 4, d_in)), P("data"))
  state = logra_jax.sketch(RANK).init(params)
  loss = lambda p, s, x: jnp.sum(
      jnp.sin(logra_jax.dense(x, p["q_proj"]["kernel"]))
  )
  grads = lambda p, s, x: logra_jax.value_and_grad(lambda p: loss(p, s, x))(
      p, s
  )
  text = jax.jit(grads).lower(params, state, x).compile().as_text()
  reduced = re.findall(r"= (.*?) (?:all-reduce|reduce-scatter)\(", text)
  assert reduced
  assert not any(f"[{d_in},{d_out}]" in line for line in reduced), reduced
  assert not any(f"[{d_in // 8},{d_out}]" in line for line in reduced), reduced


LINEAR_TX = optax.chain(
    logra_jax.sketch(RANK, others=optax.adam(0.1)),
    optax.scale_by_learning_rate(0.1),
    logra_jax.kl_budget(1e-3),
)


def linear_inputs():
  """Returns parameters, optimizer state, and a batch of eight responses."""
  params, batch = lp.make_params(), lp.make_batch()
  batch = jax.tree.map(lambda x: jnp.concatenate([x] * 8)[:8], batch)
  return params, LINEAR_TX.init(params), batch


@jax.jit
def linear_step(params, opt_state, batch):
  _, grads = logra_jax.value_and_grad(lp.loss_fn)(params, opt_state, batch)
  probe = logra_jax.kl_probe(
      lp.hidden_fn, params, opt_state, batch, head_fn=lp.head_fn, chunk_size=8
  )
  updates, opt_state = LINEAR_TX.update(grads, opt_state, params, probe=probe)
  return logra_jax.apply_updates(params, updates, opt_state), opt_state, grads


@pytest.mark.parametrize("kernel_spec", [P(), P("model")])
def test_meshes_with_explicit_axes(kernel_spec):
  """Explicit axes are the default of `jax.make_mesh`."""
  wanted = linear_step(*linear_inputs())
  mesh = make_mesh({"data": 4, "model": 2}, AxisType.Explicit)
  put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  params, opt_state, batch = linear_inputs()
  params = put(params, P())
  kernel = put(params["q_proj"]["kernel"], kernel_spec)
  params["q_proj"]["kernel"] = kernel
  got = linear_step(params, put(opt_state, P()), put(batch, P("data")))
  assert_close(got, wanted)
  new = got[0]["q_proj"]["kernel"]
  assert new.sharding.is_equivalent_to(kernel.sharding, kernel.ndim)


@pytest.mark.parametrize("spec", [P(), P(None, "model"), P("model", None)])
def test_sketches_are_split_as_the_kernel_on_explicit_axes(spec):
  tx = optax.chain(logra_jax.sketch(RANK), optax.scale(-0.1))

  @jax.jit
  def step(params, opt_state, x):
    grad = logra_jax.value_and_grad(
        lambda p: jnp.sum(jnp.sin(logra_jax.dense(x, p["q_proj"]["kernel"])))
    )
    _, grads = grad(params, opt_state)
    updates, opt_state = tx.update(grads, opt_state, params)
    return logra_jax.apply_updates(params, updates, opt_state), grads

  kernel = jax.random.normal(jax.random.key(0), (8, 16))
  x = jax.random.normal(jax.random.key(1), (12, 8))
  params = {"q_proj": {"kernel": kernel}}
  wanted = step(params, tx.init(params), x)
  mesh = make_mesh({"data": 4, "model": 2}, AxisType.Explicit)
  put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
  got = step(put(params, spec), put(tx.init(params), P()), put(x, P("data")))
  assert_close(got, wanted)
  new, thin = (tree["q_proj"]["kernel"] for tree in got)
  assert new.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
  outputs = NamedSharding(mesh, P(None, *spec[1:]))
  assert thin.sharding.is_equivalent_to(outputs, 2)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_sums_sketches(check_vma):
  """The sum of the sketches of all shards is the sketch of the batch."""
  params, opt_state, batch = linear_inputs()
  loss = lambda p, b: jnp.sum(
      jnp.sin(lp.logits_fn(p, b)), where=b["completion_mask"][..., None]
  )
  grad = logra_jax.value_and_grad(loss)
  wanted = jax.jit(grad)(params, opt_state, batch)

  def shard(params, opt_state, batch):
    value, grads = grad(params, opt_state, batch)
    # With check_vma, JAX already sums the gradients of replicated parameters.
    return jax.lax.psum(value, "data"), (
        grads if check_vma else jax.lax.psum(grads, "data")
    )

  f = jax.shard_map(
      shard,
      mesh=make_mesh({"data": 8}),
      in_specs=(P(), P(), P("data")),
      out_specs=P(),
      check_vma=check_vma,
  )
  assert_close(jax.jit(f)(params, opt_state, batch), wanted)


def test_a_probe_inside_shard_map_is_averaged_over_shards():
  params, opt_state, batch = linear_inputs()
  updates, _ = jax.jit(LINEAR_TX.update)(
      linear_step(params, opt_state, batch)[2],
      opt_state,
      params,
      probe=jax.tree_util.Partial(lambda u: 1e-3),
  )
  batch = batch | {"completion_mask": jnp.ones((8, lp.LENGTH), bool)}

  def predicted(opt_state, batch):
    return logra_jax.kl_probe(
        lp.hidden_fn, params, opt_state, batch, head_fn=lp.head_fn
    )(updates)

  f = jax.shard_map(
      lambda s, b: jax.lax.pmean(predicted(s, b), "data"),
      mesh=make_mesh({"data": 8}),
      in_specs=(P(), P("data")),
      out_specs=P(),
  )
  wanted = jax.jit(predicted)(opt_state, batch)
  assert_close(jax.jit(f)(opt_state, batch), wanted, atol=0)


def test_a_checkpoint_restores_onto_another_mesh(tmp_path):
  axes, batch_spec, specs = LAYOUTS["fsdp"]
  tree = place(make_mesh(axes), inputs(), batch_spec, specs)[:2]
  with ocp.CheckpointManager(tmp_path / "run") as manager:
    manager.save(0, args=ocp.args.StandardSave(tree))
    manager.wait_until_finished()
    axes, batch_spec, specs = LAYOUTS["fsdp and tensor"]
    wanted = place(make_mesh(axes), inputs(), batch_spec, specs)[:2]
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        wanted,
    )
    restored = manager.restore(0, args=ocp.args.StandardRestore(abstract))
  for a, b in zip(
      jax.tree.leaves(restored), jax.tree.leaves(wanted), strict=True
  ):
    np.testing.assert_array_equal(a, b)
    assert a.sharding == b.sharding
