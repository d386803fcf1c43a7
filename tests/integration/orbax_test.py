"""Tests that Orbax restores a run bit for bit, and that it continues so."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

import logra_jax
from tests.helpers import linear_policy as lp


def chain(rank=3, others=None, **kwargs):
  others = optax.adam(0.1) if others is None else others
  return optax.chain(
      logra_jax.sketch(rank, others=others, **kwargs),
      optax.scale_by_learning_rate(0.1),
      logra_jax.kl_budget(logra_jax.cosine_budget(1e-2, 1e-3, 4)),
  )


WITH_TRACE = optax.chain(
    logra_jax.sketch(3, refresh=False, others=optax.sgd(0.1)),
    optax.trace(0.9),
    optax.scale_by_learning_rate(0.1),
    logra_jax.kl_budget(1e-2),
)
# Saved in the middle of an accumulation; FROZEN has a bias that is None there.
MULTI = optax.MultiSteps(chain(), every_k_schedule=3)
FROZEN = optax.MultiSteps(
    optax.chain(logra_jax.sketch(3), logra_jax.kl_budget(1e-2)),
    every_k_schedule=3,
)
INNER = logra_jax.kl_budget(1e-2, optax.adamw(0.1))
CASES = {
    "chain": chain(),
    "thin moments": chain(refresh=False, inner=optax.trace(0.9)),
    "moments after sketch": WITH_TRACE,
    "accumulation": MULTI,
    "accumulation, frozen bias": FROZEN,
    "dense inner": INNER,
}


@functools.cache
def make_step(tx):
  @jax.jit
  def step(params, opt_state, batch):
    _, grads = logra_jax.value_and_grad(lp.loss_fn)(params, opt_state, batch)
    probe = logra_jax.kl_probe(lp.logits_fn, params, opt_state, batch)
    updates, opt_state = tx.update(grads, opt_state, params, probe=probe)
    return logra_jax.apply_updates(params, updates, opt_state), opt_state

  return step


def run(tx, tree, steps):
  for n in steps:
    tree = make_step(tx)(*tree, lp.make_batch(n))
  return tree


def start(tx):
  params = lp.make_params()
  params["q_proj"]["bias"] = params["q_proj"]["bias"].astype(jnp.bfloat16)
  return params, logra_jax.init(tx, params)


def save(path, tree):
  with ocp.CheckpointManager(path) as manager:
    manager.save(0, args=ocp.args.StandardSave(tree))
    manager.wait_until_finished()


def restore(path, abstract):
  with ocp.CheckpointManager(path) as manager:
    return manager.restore(0, args=ocp.args.StandardRestore(abstract))


def assert_same(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_run_is_bit_equal_to_one_that_never_stopped(name, tmp_path):
  tx = CASES[name]
  tree = run(tx, start(tx), range(2))
  save(tmp_path / "run", tree)
  # A new process only knows the shapes.
  abstract = jax.eval_shape(lambda: start(tx))
  restored = restore(tmp_path / "run", abstract)
  assert_same(restored, tree)
  assert_same(run(tx, restored, range(2, 5)), run(tx, tree, range(2, 5)))


def test_the_state_is_arrays_and_thin():
  tx = chain()
  _, opt_state = run(tx, start(tx), range(1))
  leaves = jax.tree.leaves(opt_state)
  assert all(isinstance(leaf, jax.Array) for leaf in leaves)
  kernel = lp.WIDTH * lp.VOCAB
  assert all(leaf.size < kernel for leaf in leaves)


def test_nnx_states_can_be_saved(tmp_path):
  tx = chain()
  params = nnx.State(jax.tree.map(nnx.Param, lp.make_params()))
  tree = (params, tx.init(params))
  save(tmp_path / "nnx", tree)
  restored = restore(tmp_path / "nnx", jax.eval_shape(lambda: tree))
  assert jax.tree.structure(restored) == jax.tree.structure(tree)
  assert_same(jax.tree.leaves(restored), jax.tree.leaves(tree))


@pytest.mark.parametrize(
    "saved, other",
    [
        # The shape of a moment in sketch coordinates contains the rank.
        (
            {"refresh": False, "inner": optax.trace(0.9)},
            {"refresh": False, "inner": optax.trace(0.9), "rank": 2},
        ),
        ({}, {"inner": optax.trace(0.9), "refresh": False}),
        ({}, {"others": optax.sgd(0.1)}),
        ({}, {"targets": {"q_proj/(kernel|bias)": "io"}}),
    ],
)
def test_the_state_of_another_plan_is_refused(saved, other, tmp_path):
  params = lp.make_params()
  params["q_proj"]["bias"] = jnp.ones((2, 3))  # so that it can be a target
  save(tmp_path / "run", chain(**saved).init(params))
  wanted = jax.eval_shape(lambda: chain(**saved).init(params))
  restore(tmp_path / "run", wanted)
  abstract = jax.eval_shape(lambda: chain(**other).init(params))
  with pytest.raises(ValueError, match=r"mismatch|shape|not found"):
    restore(tmp_path / "run", abstract)


def test_the_state_of_row_adam_does_not_depend_on_the_rank(tmp_path):
  """Its moments belong to output units, so a run can continue at another."""
  tx, other = chain(rank=3), chain(rank=2)
  tree = run(tx, start(tx), range(2))
  save(tmp_path / "run", tree)
  restored = restore(tmp_path / "run", jax.eval_shape(lambda: start(other)))
  assert_same(jax.tree.leaves(restored), jax.tree.leaves(tree))
  _, opt_state = run(other, restored, range(2, 3))
  assert float(logra_jax.diagnostics(opt_state)["alpha"]) > 0
  assert int(logra_jax.diagnostics(opt_state)["skipped"]) == 0


def test_a_state_of_another_tree_is_refused_at_its_use():
  params = lp.make_params()
  opt_state = chain().init(params)
  wider = lp.make_params(vocab=lp.VOCAB + 1)
  with pytest.raises(ValueError, match=r"'q_proj/kernel'.*tx\.init"):
    logra_jax.value_and_grad(lp.loss_fn)(wider, opt_state, lp.make_batch())
