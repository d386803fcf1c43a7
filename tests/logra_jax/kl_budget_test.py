"""Tests of the KL budget: its formula, its guards, and chains that use it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import logra_jax
from logra_jax import _state
from tests.helpers import linear_policy as lp

UPDATE = {"w": jnp.array([0.5, -2.0, 3.0])}


def budget_state(opt_state):
  (state,) = _state.find_states(opt_state, logra_jax.KLBudgetState)
  return state


def apply_budget(tx, state, predicted, update=UPDATE, **kwargs):
  """Calls `update` with a probe that always predicts `predicted`."""
  return tx.update(
      update, state, probe=lambda u: jnp.float32(predicted), **kwargs
  )


@functools.cache
def make_step(tx, logits_fn=lp.logits_fn, loss_fn=lp.loss_fn):
  """Returns a jitted training step; `spoil` is added to the gradients."""

  @jax.jit
  def step(params, opt_state, batch, spoil=0.0):
    loss, grads = logra_jax.value_and_grad(loss_fn)(params, opt_state, batch)
    grads = jax.tree.map(lambda g: g + spoil, grads)
    probe = logra_jax.kl_probe(logits_fn, params, opt_state, batch)
    updates, opt_state = tx.update(grads, opt_state, params, probe=probe)
    new_params = logra_jax.apply_updates(params, updates, opt_state)
    realised = logra_jax.realised_kl(probe, new_params)
    return new_params, opt_state, {"loss": loss, "realised": realised}

  return step


def run(tx, steps, params=None, loss_fn=lp.loss_fn, logits_fn=lp.logits_fn):
  params = lp.make_params() if params is None else params
  opt_state, batch = tx.init(params), lp.make_batch()
  step = make_step(tx, logits_fn, loss_fn)
  history = []
  for _ in range(steps):
    params, opt_state, out = step(params, opt_state, batch)
    history.append(out | logra_jax.diagnostics(opt_state))
  return params, opt_state, history


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def assert_finite(tree):
  for leaf in jax.tree.leaves(tree):
    assert np.all(np.isfinite(np.asarray(leaf, np.float64)))


@pytest.mark.parametrize(
    "predicted, alpha",
    [
        (4e-3, 0.5),
        (1e-3, 1.0),
        (2.5e-4, 2.0),
        (1e-9, 3.0),
        (1e-37, 3.0),
        (3e38, np.sqrt(1e-3) / np.sqrt(3e38)),
    ],
)
def test_alpha_is_the_root_of_budget_over_prediction(predicted, alpha):
  tx = logra_jax.kl_budget(1e-3)
  scaled, state = apply_budget(tx, tx.init(UPDATE), predicted)
  np.testing.assert_allclose(state.alpha, alpha, rtol=1e-6)
  np.testing.assert_allclose(scaled["w"], alpha * UPDATE["w"], rtol=1e-6)
  assert float(state.predicted) == np.float32(predicted)
  assert float(state.budget) == np.float32(1e-3)
  assert int(state.count) == 1 and int(state.skipped) == 0


@pytest.mark.parametrize("alpha_max", [0.25, 1.0, 7.0])
def test_alpha_max_bounds_the_scale(alpha_max):
  tx = logra_jax.kl_budget(1e-3, alpha_max=alpha_max)
  _, state = apply_budget(tx, tx.init(UPDATE), 1e-12)
  assert float(state.alpha) == alpha_max


def test_an_infinite_budget_is_the_identity_up_to_alpha_max():
  rest = [
      logra_jax.sketch(rank=3, others=optax.adam(0.1), weight_decay=0.1),
      optax.scale_by_learning_rate(0.1),
  ]
  limit = logra_jax.kl_budget(float("inf"), alpha_max=1.0)
  limited, free = optax.chain(*rest, limit), optax.chain(*rest)
  params = lp.make_params()
  limited_state, free_state = limited.init(params), free.init(params)
  grads = jax.tree.map(
      lambda p: p[-3:], params
  )  # any arrays of the right shapes
  grads["q_proj"]["bias"] = params["q_proj"]["bias"]
  update = lambda tx: jax.jit(
      lambda g, s, p: tx.update(g, s, p, probe=lambda u: jnp.float32(7.0))
  )
  for _ in range(3):
    got, limited_state = update(limited)(grads, limited_state, params)
    wanted, free_state = update(free)(grads, free_state, params)
    assert_equal(got, wanted)
  assert_equal(limited_state[:2], free_state)
  assert float(limited_state[2].alpha) == 1
  loose = logra_jax.kl_budget(float("inf"))
  assert float(apply_budget(loose, loose.init(UPDATE), 5.0)[1].alpha) == 3


def test_a_budget_is_spent_and_not_more():
  tx = optax.chain(
      logra_jax.sketch(rank=3, others=optax.adam(0.1), weight_decay=0.1),
      optax.scale_by_learning_rate(1.0),
      logra_jax.kl_budget(1e-4),
  )
  for entry in run(tx, 4)[2]:
    assert entry["predicted_kl"] > 1e-3 and entry["alpha"] < 1
    np.testing.assert_allclose(entry["realised"], 1e-4, rtol=0.05)


def test_a_schedule_follows_the_update_count():
  tx = logra_jax.kl_budget(lambda count: 1e-3 * (1 + count))
  state = tx.init(UPDATE)
  for n, predicted in enumerate([1e-3, float("nan"), 1e-3]):
    _, state = apply_budget(tx, state, predicted)
    np.testing.assert_allclose(state.budget, 1e-3 * (1 + n), rtol=1e-6)
    assert int(state.count) == n + 1  # a skipped update counts too


@pytest.mark.parametrize(
    "count, budget",
    [(0, 2e-4), (150, 1.1e-4), (300, 2e-5), (301, 2e-5), (10**9, 2e-5)],
)
def test_cosine_budget_falls_from_its_first_to_its_last_value(count, budget):
  schedule = logra_jax.cosine_budget(2e-4, 2e-5, 300)
  np.testing.assert_allclose(schedule(jnp.int32(count)), budget, rtol=1e-5)


def test_cosine_budget_never_rises():
  schedule = jax.vmap(logra_jax.cosine_budget(2e-4, 2e-5, 300))
  values = np.asarray(schedule(jnp.arange(320)))
  assert np.all(np.diff(values) <= 0) and np.all(np.diff(values)[10:290] < 0)


def test_the_mismatch_is_averaged_and_taken_off_the_budget():
  budget, gaps = 1e-3, [4e-4, -1.0, 1e-3, 9e-3, 5e-4]
  tx = logra_jax.kl_budget(budget)
  state, mean, floors = tx.init(UPDATE), 0.0, 0
  for gap in gaps:
    _, state = apply_budget(tx, state, 1e-3, mismatch=jnp.float32(gap))
    mean = 0.7 * mean + 0.3 * max(gap, 0.0)
    left = max(budget - mean, 0.5 * budget)
    floors += left == 0.5 * budget
    np.testing.assert_allclose(state.mismatch, mean, rtol=1e-5)
    np.testing.assert_allclose(state.budget, left, rtol=1e-5)
    np.testing.assert_allclose(state.alpha, np.sqrt(left / 1e-3), rtol=1e-5)
  assert 0 < floors < len(gaps)


@pytest.mark.parametrize("gap", [np.nan, np.inf, -np.inf])
def test_a_mismatch_that_is_not_finite_leaves_the_mean(gap):
  tx = logra_jax.kl_budget(1e-3)
  _, before = apply_budget(tx, tx.init(UPDATE), 1e-3, mismatch=1e-4)
  _, state = apply_budget(tx, before, 1e-3, mismatch=jnp.float32(gap))
  wanted = 0.7 * before.mismatch if gap == -np.inf else before.mismatch
  np.testing.assert_allclose(state.mismatch, wanted, rtol=1e-6)
  assert np.isfinite(state.alpha) and int(state.skipped) == 0


@pytest.mark.parametrize("predicted", [np.nan, np.inf, -np.inf, -1e-30])
def test_a_bad_prediction_skips_the_step(predicted):
  tx = logra_jax.kl_budget(1e-3, optax.adam(0.1))
  _, before = apply_budget(tx, tx.init(UPDATE), 1e-3)
  scaled, state = apply_budget(tx, before, predicted)
  assert_equal(scaled, {"w": np.zeros(3)})
  assert_equal(state.inner, before.inner)
  assert int(state.skipped) == 1 and float(state.alpha) == 0
  _, state = apply_budget(tx, state, 1e-3)
  assert int(state.skipped) == 1 and float(state.alpha) == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_an_update_that_is_not_finite_skips_the_step(bad):
  tx = logra_jax.kl_budget(1e-3)
  update = {"w": jnp.array([1.0, bad, 1.0]), "frozen": None}
  scaled, state = apply_budget(tx, tx.init(update), 1e-3, update)
  assert_equal(scaled, {"w": np.zeros(3), "frozen": None})
  assert int(state.skipped) == 1


@pytest.mark.parametrize("bad", [np.nan, -1e-3])
def test_a_bad_scheduled_budget_skips_the_step(bad):
  tx = logra_jax.kl_budget(lambda count: jnp.where(count == 1, bad, 1e-3))
  state = tx.init(UPDATE)
  for skipped in (0, 1, 1):
    scaled, state = apply_budget(tx, state, 1e-3)
    assert int(state.skipped) == skipped
    assert_finite(scaled)


CHAINS = {
    "sketch": optax.chain(
        logra_jax.sketch(rank=3, others=optax.adam(0.1)),
        optax.scale_by_learning_rate(0.1),
        logra_jax.kl_budget(1e-3),
    ),
    "bare sketch": optax.chain(
        logra_jax.sketch(rank=3, others=optax.adam(0.1)),
        logra_jax.kl_budget(1e-3),
    ),
    "inner sketch": logra_jax.kl_budget(
        1e-3,
        optax.chain(
            logra_jax.sketch(rank=3, others=optax.adam(0.1)),
            optax.scale_by_learning_rate(0.1),
        ),
    ),
    "inner adamw": logra_jax.kl_budget(1e-3, optax.adamw(0.1)),
    "inner muon": logra_jax.kl_budget(1e-3, optax.contrib.muon(0.1)),
}


@pytest.mark.parametrize("spoil", [np.nan, np.inf, -1e38])
@pytest.mark.parametrize("name", CHAINS)
def test_a_bad_gradient_costs_a_step_and_nothing_else(name, spoil):
  tx = CHAINS[name]
  step, batch = make_step(tx), lp.make_batch()
  params = lp.make_params()
  params, opt_state, _ = step(params, tx.init(params), batch)
  new_params, new_state, _ = step(params, opt_state, batch, spoil)
  assert_finite(jax.tree.leaves((new_params, optimizer_moments(new_state))))
  if not np.isfinite(spoil):
    assert_equal(new_params, params)
    assert_equal(optimizer_moments(new_state), optimizer_moments(opt_state))
    assert logra_jax.diagnostics(new_state)["skipped"] == 1
  # The next step with a finite gradient is taken.
  last_params, last_state, out = step(new_params, new_state, batch)
  assert logra_jax.diagnostics(last_state)["alpha"] > 0
  assert np.isfinite(out["realised"]) and out["realised"] > 1e-5
  assert_finite(last_params)


def optimizer_moments(opt_state):
  """Returns all floats of the state except the scalars of `kl_budget`."""
  is_ours = lambda x: isinstance(x, logra_jax.KLBudgetState)
  trees = [
      leaf.inner if is_ours(leaf) else leaf
      for leaf in jax.tree.leaves(opt_state, is_leaf=is_ours)
  ]
  return [x for x in jax.tree.leaves(trees) if x.dtype == jnp.float32]


def test_a_skipped_step_leaves_the_path_of_the_inner_form():
  """The result equals that of a run without the bad step, bit for bit."""
  tx = CHAINS["inner adamw"]
  step, batch = make_step(tx), lp.make_batch()
  ends = []
  for spoils in ([0.0, 0.0], [0.0, np.nan, 0.0]):
    params = lp.make_params()
    opt_state = tx.init(params)
    for spoil in spoils:
      params, opt_state, _ = step(params, opt_state, batch, spoil)
    ends.append((params, opt_state.inner))
  assert_equal(*ends)


def test_nan_logits_skip_the_step():
  tx = CHAINS["sketch"]
  step = make_step(tx, lambda p, b: lp.logits_fn(p, b) * b["scale"])
  params, batch = lp.make_params(), lp.make_batch()
  opt_state = tx.init(params)
  bad = batch | {"scale": jnp.float32(jnp.nan)}
  new_params, opt_state, _ = step(params, opt_state, bad)
  assert_equal(new_params, params)
  assert logra_jax.diagnostics(opt_state)["skipped"] == 1
  good = batch | {"scale": jnp.float32(1.0)}
  assert step(params, opt_state, good)[2]["realised"] > 0


def test_a_probe_without_a_generated_token_skips_the_step_under_jit():
  tx = CHAINS["sketch"]

  @jax.jit
  def step(params, opt_state, batch, mask):
    _, grads = logra_jax.value_and_grad(lp.loss_fn)(params, opt_state, batch)
    probe = logra_jax.kl_probe(
        lp.logits_fn, params, opt_state, batch | {"completion_mask": mask}
    )
    updates, opt_state = tx.update(grads, opt_state, params, probe=probe)
    return logra_jax.apply_updates(params, updates, opt_state), opt_state

  params, batch = lp.make_params(), lp.make_batch()
  empty = jnp.zeros_like(batch["completion_mask"])
  new_params, opt_state = step(params, tx.init(params), batch, empty)
  assert_equal(new_params, params)
  assert logra_jax.diagnostics(opt_state)["skipped"] == 1


def test_a_state_with_an_infinity_of_its_own_is_no_bad_moment():
  """The state of `reduce_on_plateau` starts with an infinite best value."""
  inner = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau())
  tx = logra_jax.kl_budget(1e-3, inner)
  _, state = apply_budget(tx, tx.init(UPDATE), 1e-3, value=jnp.float32(1.0))
  assert int(state.skipped) == 0 and float(state.alpha) == 1


def test_a_probe_is_required():
  tx = optax.chain(optax.sgd(0.1), logra_jax.kl_budget(1e-3))
  with pytest.raises(ValueError, match=r"probe=None.*kl_probe"):
    tx.update(UPDATE, tx.init(UPDATE), UPDATE)


def lora_loss(params, batch):
  return lp.loss_fn(lora_merged(params), batch)


def lora_logits(params, batch):
  return lp.logits_fn(lora_merged(params), batch)


def lora_merged(params):
  layer = lp.make_params()["q_proj"]
  delta = params["q_proj/lora_a"] @ params["q_proj/lora_b"]
  return {"q_proj": layer | {"kernel": layer["kernel"] + delta}}


OPTIMIZERS = {
    "sgd": optax.sgd(1.0),
    "adamw": optax.adamw(0.1),
    "muon": optax.contrib.muon(0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
}


@pytest.mark.parametrize("form", ["chain", "inner"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_dense_optimizer_can_be_budgeted(name, form):
  inner = OPTIMIZERS[name]
  tx = (
      logra_jax.kl_budget(1e-3, inner, alpha_max=100.0)
      if form == "inner"
      else optax.chain(inner, logra_jax.kl_budget(1e-3, alpha_max=100.0))
  )
  _, _, history = run(tx, 4)
  losses = [float(h["loss"]) for h in history]
  assert losses == sorted(losses, reverse=True), losses
  for entry in history:
    np.testing.assert_allclose(entry["realised"], 1e-3, rtol=0.1)
    assert entry["skipped"] == 0


@pytest.mark.parametrize("form", ["chain", "inner"])
def test_lora_parameters_can_be_budgeted(form):
  rng = np.random.default_rng(0)
  params = {
      "q_proj/lora_a": jnp.asarray(rng.normal(size=(lp.WIDTH, 2)), jnp.float32),
      "q_proj/lora_b": jnp.zeros((2, lp.VOCAB)),
  }
  inner = optax.adam(0.1)
  tx = (
      logra_jax.kl_budget(1e-3, inner)
      if form == "inner"
      else optax.chain(inner, logra_jax.kl_budget(1e-3))
  )
  _, _, history = run(tx, 4, params, lora_loss, lora_logits)
  losses = [float(h["loss"]) for h in history]
  assert losses == sorted(losses, reverse=True), losses
  for entry in history:
    np.testing.assert_allclose(entry["realised"], 1e-3, rtol=0.2)


def first_step(tx):
  """Returns the change of each parameter in one step, and its slope of loss."""
  before = lp.make_params()
  after, _, _ = run(tx, 1)
  change = jax.tree.map(lambda a, b: a - b, after, before)
  batch = lp.make_batch()
  slope = jax.grad(lp.loss_fn)(before, batch)
  slopes = jax.tree.map(lambda g, d: float(jnp.sum(g * d)), slope, change)
  return change, slopes["q_proj"]


LABELS = {"q_proj": {"kernel": "thin", "bias": "dense"}}
WITH_RATE = optax.chain(
    logra_jax.sketch(rank=6), optax.scale_by_learning_rate(1.0)
)
SIGNED = {
    "bare": [logra_jax.sketch(rank=6, others=optax.adam(0.1))],
    "learning rate": [
        logra_jax.sketch(rank=6, others=optax.adam(0.1)),
        optax.scale_by_learning_rate(0.3),
    ],
    "momentum": [
        logra_jax.sketch(
            rank=6, refresh=False, inner=optax.trace(0.9), others=optax.sgd(1.0)
        ),
    ],
    "partition": [
        optax.partition({"thin": WITH_RATE, "dense": optax.adamw(0.1)}, LABELS)
    ],
    "bare partition": [
        optax.partition(
            {"thin": logra_jax.sketch(rank=6), "dense": optax.adamw(0.1)},
            LABELS,
        )
    ],
}


@pytest.mark.parametrize("name", SIGNED)
def test_targets_and_others_both_descend(name):
  budget = logra_jax.kl_budget(1e-4, alpha_max=100.0)
  _, slopes = first_step(optax.chain(*SIGNED[name], budget))
  assert slopes["kernel"] < 0 and slopes["bias"] < 0, slopes


def test_a_learning_rate_does_not_matter_where_the_budget_binds():
  budget = logra_jax.kl_budget(1e-4, alpha_max=1e6)
  bare, _ = first_step(optax.chain(*SIGNED["bare"], budget))
  with_rate, _ = first_step(optax.chain(*SIGNED["learning rate"], budget))
  for path in ("kernel", "bias"):
    a, b = bare["q_proj"][path], with_rate["q_proj"][path]
    np.testing.assert_allclose(a, b, rtol=0.01, atol=1e-6)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_dense_update_is_never_negated(sign):
  tx = optax.chain(optax.scale(sign), logra_jax.kl_budget(1e-3))
  scaled, _ = tx.update(UPDATE, tx.init(UPDATE), probe=lambda u: 4e-3)
  np.testing.assert_allclose(scaled["w"], 0.5 * sign * UPDATE["w"], rtol=1e-6)


def test_the_scale_is_common_to_all_parameters():
  rest = SIGNED["learning rate"]
  free, _ = first_step(optax.chain(*rest))
  tx = optax.chain(*rest, logra_jax.kl_budget(1e-4))
  params, _, history = run(tx, 1)
  change = jax.tree.map(lambda a, b: a - b, params, lp.make_params())
  wanted = optax.tree.scale(history[0]["alpha"], free)
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=0.02, atol=1e-6),
      change,
      wanted,
  )


@pytest.mark.parametrize(
    "bad", [0, -1e-3, float("nan"), None, "1e-3", True, np.float32(-1)]
)
@pytest.mark.parametrize("name", ["budget", "alpha_max"])
def test_a_budget_and_its_largest_scale_must_be_positive(name, bad):
  kwargs = {"budget": 1e-3, name: bad}
  with pytest.raises(ValueError, match=f"{name}="):
    logra_jax.kl_budget(**kwargs)


@pytest.mark.parametrize("good", [np.float32(1e-3), jnp.float32(1e-3), 1])
def test_a_budget_may_be_any_real_scalar(good):
  tx = logra_jax.kl_budget(good)
  _, state = apply_budget(tx, tx.init(UPDATE), float(good))
  np.testing.assert_allclose(state.alpha, 1.0)


@pytest.mark.parametrize(
    "args, name",
    [
        ((0.0, 1e-5, 10), "init_value"),
        ((1e-4, -1e-5, 10), "end_value"),
        ((1e-4, 1e-5, 0), "steps"),
        ((1e-4, 1e-5, 2.5), "steps"),
        ((1e-4, 1e-5, True), "steps"),
    ],
)
def test_a_cosine_budget_checks_its_numbers(args, name):
  with pytest.raises(ValueError, match=f"{name}="):
    logra_jax.cosine_budget(*args)


def test_the_budget_may_be_an_injected_hyperparameter():
  def make(budget, alpha_max):
    return logra_jax.kl_budget(budget, optax.sgd(0.1), alpha_max=alpha_max)

  tx = optax.inject_hyperparams(make)(budget=1e-3, alpha_max=3.0)
  state = tx.init(UPDATE)
  update = jax.jit(functools.partial(apply_budget, tx))
  _, state = update(state, 4e-3)
  np.testing.assert_allclose(budget_state(state).alpha, 0.5, rtol=1e-6)
  state.hyperparams["budget"] = jnp.float32(4e-3)
  _, state = update(state, 4e-3)
  np.testing.assert_allclose(budget_state(state).alpha, 1.0, rtol=1e-6)
  state.hyperparams["alpha_max"] = jnp.float32(0.1)
  _, state = update(state, 4e-3)
  np.testing.assert_allclose(budget_state(state).alpha, 0.1, rtol=1e-6)
  with pytest.raises(ValueError, match="budget="):
    optax.inject_hyperparams(make)(budget=-1e-3, alpha_max=3.0).init(UPDATE)


@pytest.mark.parametrize("predicted", [0.0, -0.0])
def test_a_step_that_the_probe_does_not_see_is_skipped(predicted):
  tx = logra_jax.kl_budget(1e-3)
  scaled, state = apply_budget(tx, tx.init(UPDATE), predicted)
  assert not np.any(scaled["w"])
  assert int(state.skipped) == 1 and float(state.alpha) == 0.0


def test_a_step_of_zero_is_none_that_the_probe_must_see():
  tx = logra_jax.kl_budget(1e-3)
  zero = jax.tree.map(jnp.zeros_like, UPDATE)
  _, state = tx.update(zero, tx.init(UPDATE), probe=lambda _: jnp.float32(0))
  assert int(state.skipped) == 0 and float(state.alpha) == 1.0


@pytest.mark.parametrize("inner", [False, True])
def test_logits_that_ignore_their_parameters_give_no_step(inner):
  """A closure over the outer parameters predicts 0 for any step."""
  params, batch = lp.make_params(), lp.make_batch()
  others = {"bias|.*/bias": optax.sgd(1.0)}
  sketch = logra_jax.sketch(rank=3, others=others)
  budget = logra_jax.kl_budget
  tx = budget(1e-3, sketch) if inner else optax.chain(sketch, budget(1e-3))
  state = tx.init(params)
  _, grads = logra_jax.value_and_grad(lp.loss_fn)(params, state, batch)
  probe = logra_jax.kl_probe(
      lambda _, x: lp.logits_fn(params, x), params, state, batch
  )
  updates, state = jax.jit(tx.update)(grads, state, params, probe=probe)
  new = logra_jax.apply_updates(params, updates, state)
  for old, moved in zip(
      jax.tree.leaves(params), jax.tree.leaves(new), strict=True
  ):
    np.testing.assert_array_equal(old, moved)
  assert int(logra_jax.diagnostics(state)["skipped"]) == 1


def test_a_scheduled_budget_of_zero_is_no_step():
  tx = logra_jax.kl_budget(lambda count: jnp.where(count < 1, 0.0, 1e-3))
  scaled, state = apply_budget(tx, tx.init(UPDATE), 1e-3)
  assert not np.any(scaled["w"]) and int(state.skipped) == 0
  scaled, state = apply_budget(tx, state, 1e-3)
  np.testing.assert_allclose(scaled["w"], UPDATE["w"], rtol=1e-6)


def test_alpha_max_can_be_a_schedule():
  tx = logra_jax.kl_budget(1e-3, alpha_max=lambda count: 1.0 + count)
  state = tx.init(UPDATE)
  for expected in (1.0, 2.0, 3.0):
    _, state = apply_budget(tx, state, 1e-12)
    assert float(state.alpha) == expected


def test_numpy_integers_are_integers():
  schedule = logra_jax.cosine_budget(2e-4, 2e-5, np.int64(300))
  assert float(schedule(300)) == pytest.approx(2e-5)


@pytest.mark.parametrize("bound", [np.nan, -1.0])
def test_a_scheduled_alpha_max_that_is_no_bound_gives_no_step(bound):
  tx = logra_jax.kl_budget(1e-3, alpha_max=lambda count: jnp.float32(bound))
  scaled, state = apply_budget(tx, tx.init(UPDATE), 1e-3)
  assert not np.any(scaled["w"])
  assert int(state.skipped) == 1 and float(state.alpha) == 0.0
