"""Tests of `sketch` and `kl_budget` with the wrappers and tools of optax."""

import functools

from flax import nnx
from flax.core import FrozenDict
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import logra_jax
from logra_jax import _state
from tests.helpers import linear_policy as lp


@functools.cache
def make_step(tx, loss_fn=lp.loss_fn, logits_fn=lp.logits_fn):
  """Returns a jitted training step."""

  @jax.jit
  def step(params, opt_state, batch):
    loss, grads = logra_jax.value_and_grad(loss_fn)(params, opt_state, batch)
    probe = logra_jax.kl_probe(logits_fn, params, opt_state, batch)
    updates, opt_state = tx.update(grads, opt_state, params, probe=probe)
    return logra_jax.apply_updates(params, updates, opt_state), opt_state, loss

  return step


def run(tx, steps, params=None, opt_state=None, **fns):
  params = lp.make_params() if params is None else params
  opt_state = tx.init(params) if opt_state is None else opt_state
  step, losses = make_step(tx, **fns), []
  for n in range(steps):
    params, opt_state, loss = step(params, opt_state, lp.make_batch(n))
    losses.append(float(loss))
  return params, opt_state, losses


def chain(rank=3, learning_rate=0.1, budget=1e-2, **kwargs):
  kwargs = {"others": optax.adam(0.1)} | kwargs
  return optax.chain(
      logra_jax.sketch(rank, **kwargs),
      optax.scale_by_learning_rate(learning_rate),
      logra_jax.kl_budget(budget),
  )


PLAIN = chain()


@functools.cache
def plain_run(steps):
  return run(PLAIN, steps)


def assert_close(a, b, rtol=1e-5):
  jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-6), a, b
  )


def signature(tree):
  leaves, treedef = jax.tree.flatten(tree)
  return treedef, [(x.shape, x.dtype, x.weak_type) for x in leaves]


def test_inject_hyperparams_sets_learning_rate_and_budget():
  make = lambda learning_rate, budget: chain(3, learning_rate, budget)
  tx = optax.inject_hyperparams(make)(learning_rate=0.1, budget=1e-2)
  params, opt_state, _ = run(tx, 3)
  assert_close(params, plain_run(3)[0])
  # A change takes effect without tracing again.
  opt_state.hyperparams["budget"] = jnp.float32(1e-5)
  step, batch = make_step(tx), lp.make_batch()
  _, opt_state, _ = step(params, opt_state, batch)
  diagnostics = logra_jax.diagnostics(opt_state)
  np.testing.assert_allclose(diagnostics["budget"], 1e-5, rtol=1e-6)
  assert diagnostics["alpha"] < 1
  assert step._cache_size() == 1


def test_inject_hyperparams_runs_schedules():
  make = lambda learning_rate, budget: chain(3, learning_rate, budget)
  tx = optax.inject_hyperparams(make)(
      learning_rate=optax.linear_schedule(0.1, 0.0, 2),
      budget=logra_jax.cosine_budget(1e-2, 1e-3, 2),
  )
  budgets, opt_state, params = [], None, None
  for _ in range(4):
    params, opt_state, _ = run(tx, 1, params, opt_state)
    budgets.append(float(logra_jax.diagnostics(opt_state)["budget"]))
  np.testing.assert_allclose(budgets, [1e-2, 5.5e-3, 1e-3, 1e-3], rtol=1e-5)
  assert float(logra_jax.diagnostics(opt_state)["predicted_kl"]) < 1e-12


def test_inject_hyperparams_takes_the_rank_as_static_only():
  make = lambda rank, learning_rate: chain(rank, learning_rate)
  with pytest.raises(ValueError, match=r"rank=.*static_args"):
    optax.inject_hyperparams(make)(3, 0.1).init(lp.make_params())
  tx = optax.inject_hyperparams(make, static_args="rank")(3, 0.1)
  assert_close(run(tx, 2)[0], plain_run(2)[0])


def test_inject_hyperparams_sets_weight_decay():
  make = lambda weight_decay: chain(weight_decay=weight_decay)
  tx = optax.inject_hyperparams(make)(weight_decay=0.1)
  opt_state = tx.init(lp.make_params())
  opt_state.hyperparams["weight_decay"] = jnp.float32(5.0)
  _, opt_state, _ = run(tx, 1, opt_state=opt_state)
  assert float(optax.tree.get(opt_state.inner_state, "weight_decay")) == 5


def test_named_chain_is_chain():
  names = ("sketch", "rate", "budget")
  parts = [
      logra_jax.sketch(3, others=optax.adam(0.1)),
      optax.scale_by_learning_rate(0.1),
      logra_jax.kl_budget(1e-2),
  ]
  tx = optax.named_chain(*zip(names, parts, strict=True))
  params, opt_state, _ = run(tx, 3)
  assert_close(params, plain_run(3)[0])
  assert isinstance(opt_state["sketch"], logra_jax.SketchState)
  assert int(opt_state["budget"].count) == 3


LABELS = {"q_proj": {"kernel": "thin", "bias": "dense"}}


@pytest.mark.parametrize("make", [lambda tx, p: tx.init(p), logra_jax.init])
@pytest.mark.parametrize("dense_label", ["dense", "zz"])
def test_partition_is_what_others_do(make, dense_label):
  """The order of the labels does not matter, nor does which `init` is used."""
  thin = optax.chain(logra_jax.sketch(3), optax.scale_by_learning_rate(0.1))
  labels = jax.tree.map(lambda x: x.replace("dense", dense_label), LABELS)
  tx = optax.chain(
      optax.partition({"thin": thin, dense_label: optax.adam(0.01)}, labels),
      logra_jax.kl_budget(1e-2),
  )
  params = lp.make_params()
  assert_close(run(tx, 3, params, make(tx, params))[0], plain_run(3)[0])


def test_partition_may_freeze_with_set_to_zero():
  thin = optax.chain(logra_jax.sketch(3), optax.scale_by_learning_rate(0.1))
  tx = optax.chain(
      optax.partition({"thin": thin, "dense": optax.set_to_zero()}, LABELS),
      logra_jax.kl_budget(1e-2),
  )
  params = run(tx, 2)[0]
  frozen = run(chain(others=None), 2)[0]
  assert_close(params, frozen)
  before = lp.make_params()["q_proj"]["bias"]
  np.testing.assert_array_equal(params["q_proj"]["bias"], before)


def test_masked_sketches_what_the_mask_keeps():
  mask = {"q_proj": {"kernel": True, "bias": False}}
  others = {"q_proj": {"kernel": False, "bias": True}}
  tx = optax.chain(
      optax.masked(
          optax.chain(logra_jax.sketch(3), optax.scale_by_learning_rate(0.1)),
          mask,
      ),
      optax.masked(optax.adam(0.01), others),
      logra_jax.kl_budget(1e-2),
  )
  assert_close(run(tx, 3)[0], plain_run(3)[0])


def test_multi_steps_keeps_the_basis_between_updates():
  multi = optax.MultiSteps(PLAIN, every_k_schedule=2)
  step = make_step(multi.gradient_transformation())
  params = lp.make_params()
  with pytest.raises(ValueError, match=r"logra_jax\.init"):
    step(params, multi.init(params), lp.make_batch())
  opt_state = logra_jax.init(multi, params)
  for update in range(2):
    kept, opt_state, _ = step(params, opt_state, lp.make_batch(2 * update))
    assert_close(kept, params, rtol=0)
    assert int(sketch_count(opt_state)) == update
    moved, opt_state, _ = step(kept, opt_state, lp.make_batch(2 * update + 1))
    assert int(sketch_count(opt_state)) == update + 1
    change = jax.tree.map(lambda a, b: jnp.max(jnp.abs(a - b)), moved, kept)
    assert min(jax.tree.leaves(change)) > 1e-4
    params = moved
  assert multi.has_updated(opt_state)


def sketch_count(opt_state):
  (state,) = _state.find_states(opt_state, logra_jax.SketchState)
  return state.count


def test_multi_steps_takes_the_step_of_the_mean_gradient():
  tx = optax.chain(
      logra_jax.sketch(3, inner=optax.identity(), others=optax.sgd(1.0)),
      optax.scale_by_learning_rate(0.1),
  )
  multi = optax.MultiSteps(tx, every_k_schedule=2)
  params = lp.make_params()
  batches = [lp.make_batch(seed) for seed in (1, 2)]

  @jax.jit
  def accumulated(params):
    opt_state = logra_jax.init(multi, params)
    for batch in batches:
      _, grads = logra_jax.value_and_grad(lp.loss_fn)(params, opt_state, batch)
      updates, opt_state = multi.update(grads, opt_state, params)
      params = logra_jax.apply_updates(params, updates, opt_state)
    return params

  @jax.jit
  def at_once(params):
    opt_state = tx.init(params)
    loss = lambda p: sum(lp.loss_fn(p, b) for b in batches) / 2
    _, grads = logra_jax.value_and_grad(loss)(params, opt_state)
    updates, opt_state = tx.update(grads, opt_state, params)
    return logra_jax.apply_updates(params, updates, opt_state)

  # The factor is rounded to bfloat16, and its last bit can differ.
  assert_close(accumulated(params), at_once(params), rtol=1e-2)


def test_tree_get_finds_what_the_states_hold():
  _, opt_state, _ = plain_run(2)
  for name in ("alpha", "predicted", "budget", "mismatch"):
    assert optax.tree.get(opt_state, name).dtype == jnp.float32
  assert int(optax.tree.get(opt_state, "seed")) == 42
  counts = optax.tree.get_all_with_path(opt_state, "count")
  assert {int(value) for _, value in counts} == {2}
  changed = optax.tree.set(opt_state, mismatch=jnp.float32(0.5))
  assert float(optax.tree.get(changed, "mismatch")) == 0.5
  ours = lambda path, value: "SketchState" in str(path)
  assert optax.tree.get(opt_state, "skipped", filtering=ours) == 0


def test_map_params_works_on_a_budget_and_is_refused_for_thin_arrays():
  """The arrays of `sketch` have neither the shapes nor the tree of params."""
  params = lp.make_params()
  budget = logra_jax.kl_budget(1e-3, optax.adam(0.1))
  shapes = optax.tree.map_params(
      budget,
      lambda x, p: x.shape == p.shape,
      budget.init(params),
      params,
      transform_non_params=lambda x: True,
  )
  assert jax.tree.all(shapes) and len(jax.tree.leaves(shapes)) > 6
  with pytest.raises(ValueError, match="matches no parameter"):
    optax.tree.map_params(PLAIN, jnp.ones_like, PLAIN.init(params))


def test_state_and_params_keep_structure_shape_and_dtype():
  tx = chain(weight_decay=0.1, clip_norm=1.0)
  params = lp.make_params()
  params["q_proj"]["bias"] = params["q_proj"]["bias"].astype(jnp.bfloat16)
  before = signature((params, jax.jit(tx.init)(params)))
  eager = signature((params, tx.init(params)))
  params, opt_state, _ = run(tx, 2, params)
  assert signature((params, opt_state)) == before == eager


def test_scan_over_updates_is_a_loop_over_updates():
  batches = [lp.make_batch(n) for n in range(3)]
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches)

  def body(carry, batch):
    params, opt_state, loss = make_step(PLAIN)(*carry, batch)
    return (params, opt_state), loss

  params = lp.make_params()
  carry = (params, PLAIN.init(params))
  (params, opt_state), losses = jax.jit(
      lambda carry: jax.lax.scan(body, carry, stacked)
  )(carry)
  loop_params, loop_state, loop_losses = plain_run(3)
  np.testing.assert_allclose(losses, loop_losses, rtol=1e-5)
  assert_close(params, loop_params)
  assert_close(opt_state, loop_state, rtol=1e-3)


@pytest.mark.parametrize("make", [lambda tx, p: tx.init(p), logra_jax.init])
def test_params_and_state_can_be_donated(make):
  params = lp.make_params()
  opt_state = make(PLAIN, params)
  step = jax.jit(make_step(PLAIN), donate_argnums=(0, 1))
  for n in range(2):
    old = params
    params, opt_state, _ = step(params, opt_state, lp.make_batch(n))
    assert all(x.is_deleted() for x in jax.tree.leaves(old))
  assert_close(params, plain_run(2)[0])


def test_frozen_dicts_train_as_dicts_do():
  params, _, _ = run(PLAIN, 2, FrozenDict(lp.make_params()))
  assert isinstance(params, FrozenDict)
  assert_close(params.unfreeze(), plain_run(2)[0])


def test_nnx_states_train_as_dicts_do():
  """The paths are the same as in a dict, and so are the bases."""
  tree = jax.tree.map(nnx.Param, lp.make_params())
  state = nnx.State(tree)
  plain = lambda s: {"q_proj": {k: v[...] for k, v in s["q_proj"].items()}}
  params, _, _ = run(
      PLAIN,
      2,
      state,
      loss_fn=lambda p, b: lp.loss_fn(plain(p), b),
      logits_fn=lambda p, b: lp.logits_fn(plain(p), b),
  )
  assert isinstance(params, nnx.State)
  assert jax.tree.structure(params) == jax.tree.structure(state)
  assert_close(plain(params), plain_run(2)[0])


def test_lists_and_tuples_train_as_dicts_do():
  tx = chain(targets="0/kernel")
  layer = lp.make_params()["q_proj"]
  dicts, tuples = {"0": layer}, (layer,)
  ends = []
  for params, get in ((dicts, lambda p: p["0"]), (tuples, lambda p: p[0])):
    loss = lambda p, b, get=get: lp.loss_fn({"q_proj": get(p)}, b)
    logits = lambda p, b, get=get: lp.logits_fn({"q_proj": get(p)}, b)
    end, _, _ = run(tx, 2, params, loss_fn=loss, logits_fn=logits)
    ends.append(get(end))
  assert_close(*ends)


def test_momentum_and_adam_may_stand_after_sketch():
  for between in (optax.trace(0.9), optax.scale_by_adam()):
    tx = optax.chain(
        logra_jax.sketch(3, refresh=False, others=optax.sgd(1.0)),
        between,
        optax.scale_by_learning_rate(0.1),
        logra_jax.kl_budget(1e-2),
    )
    params = lp.make_params()
    opt_state = logra_jax.init(tx, params)
    shapes = {x.shape for x in jax.tree.leaves(opt_state)}
    assert (lp.WIDTH, lp.VOCAB) not in shapes and (3, lp.VOCAB) in shapes
    before = signature(opt_state)
    params, opt_state, losses = run(tx, 3, params, opt_state)
    assert signature(opt_state) == before
    assert np.isfinite(losses).all()


def test_optax_statistics_of_updates_see_thin_arrays():
  """Norms and clipping after `sketch` apply to the thin factors."""
  clip = optax.clip_by_global_norm(1e-3)
  tx = optax.chain(logra_jax.sketch(3, others=None), clip)
  params = lp.make_params()
  opt_state = tx.init(params)
  _, grads = jax.jit(
      lambda p, s: logra_jax.value_and_grad(lp.loss_fn)(p, s, lp.make_batch())
  )(params, opt_state)
  updates, _ = tx.update(grads, opt_state, params)
  assert updates["q_proj"]["kernel"].value.shape == (3, lp.VOCAB)
  np.testing.assert_allclose(optax.tree.norm(updates), 1e-3, rtol=1e-5)


@pytest.mark.parametrize("scale", [0.25, -3.0])
def test_scaling_scales_the_update_exactly(scale):
  params = lp.make_params()
  change = {}
  for c in (1.0, scale):
    tx = optax.chain(
        logra_jax.sketch(3, weight_decay=0.5, others=optax.sgd(1.0)),
        optax.scale(2.0**-10 * c),
    )
    opt_state = tx.init(params)
    step = jax.jit(lambda g, s, p, tx=tx: tx.update(g, s, p)[0])
    grads = jax.tree.map(lambda p: p[-3:], params)
    grads["q_proj"]["bias"] = params["q_proj"]["bias"]
    change[c] = step(grads, opt_state, params)
  scaled = optax.tree.scale(scale, change[1.0])
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6),
      scaled,
      change[scale],
  )
