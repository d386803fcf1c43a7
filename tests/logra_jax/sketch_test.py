"""`sketch` and RowAdam against float64 NumPy, and the rules of their state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import logra_jax
from tests.helpers import oracles, toy

F32, BF16 = jnp.float32, jnp.bfloat16
SHAPES = {"a/kernel": (12, 20), "b/kernel": (3, 20, 7), "b/bias": (7,)}
TARGETS = ".*kernel"
apply = jax.jit(logra_jax.apply_updates)


def make(dtype=F32, shapes=SHAPES, wrap=lambda tx: tx, **kwargs):
  kwargs = {"rank": 4, "targets": TARGETS} | kwargs
  tx = wrap(logra_jax.sketch(**kwargs))
  params = toy.tree(shapes, dtype=dtype)
  return tx, params, tx.init(params)


def gradients(params, state, seed=0, size=1.0):
  """Gradients such as `value_and_grad` gives: thin, dense, or None."""
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


def run(tx, params, state, steps=4, lr=0.1):
  """Applies `steps` gradients; yields (grads, old params, new, old state)."""
  update = jax.jit(tx.update)
  for i in range(steps):
    grads = gradients(params, state, seed=10 * i)
    updates, new_state = update(grads, state, params)
    updates = optax.tree.scale(-lr, updates)
    new = apply(params, updates, new_state)
    yield grads, params, new, state
    params, state = new, new_state


# -- RowAdam -----------------------------------------------------------------


@pytest.mark.parametrize("norm_preserving", [False, True])
@pytest.mark.parametrize("b2", [0.0, 0.95])
def test_row_adam(norm_preserving, b2):
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  # Per unit of the stack: normal, constant, large and tiny next to each other.
  scale = np.asarray([1.0, 1.0, 1e30, 1e-30], np.float32)[:, None, None]
  sketches = [scale * normal(4, 5, 6) for _ in range(5)]
  for s in sketches:
    s[1] = 3.0
  sketches[1] = np.zeros_like(sketches[1])  # a batch without any signal
  sketches[2][:, :, 2] = 0  # an output unit without one
  tx = logra_jax.scale_by_row_adam(b2, norm_preserving=norm_preserving)
  state = tx.init(jnp.zeros((4, 5, 6)))
  expected = oracles.row_adam(sketches, b2, 1e-8, norm_preserving)
  update = jax.jit(tx.update)
  for s, wanted in zip(sketches, expected, strict=True):
    got, state = update(jnp.asarray(s), state)
    for j in range(4):
      oracles.assert_close(got[j], wanted[j], 3e-5)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state))
    if norm_preserving:
      for j in range(4):
        np.testing.assert_allclose(
            oracles.global_norm(got[j]), oracles.global_norm(s[j]), rtol=1e-5
        )
  # No step is the oracle's without its bias correction.
  if not norm_preserving and b2:
    with pytest.raises(AssertionError):
      first = oracles.row_adam([sketches[0]] * 2, b2)[1]
      oracles.assert_close(expected[0][0] * np.sqrt(1 - b2), first[0], 1e-2)


def test_row_adam_epsilon():
  s = jnp.full((1, 3), 2.0)
  plain = logra_jax.scale_by_row_adam(eps=0.5)
  got, _ = plain.update(s, plain.init(s))
  oracles.assert_close(got, np.full((1, 3), 2 / 2.5), 1e-6)
  # Relative to the mean RMS, so a gradient twice as large is no other case.
  relative = logra_jax.scale_by_row_adam(eps=0.5, norm_preserving=True)
  s = jnp.asarray([[1.0, 3.0]])
  for size in (1.0, 1e-20, 1e20):
    got, _ = relative.update(size * s, relative.init(s))
    d = np.asarray([1 / (1 + 1), 3 / (3 + 1)])
    d *= np.sqrt(10) / np.linalg.norm(d)
    oracles.assert_close(np.asarray(got) / size, d[None], 1e-5)


def test_zero_gradients_give_zero_updates():
  preserving = logra_jax.scale_by_row_adam(norm_preserving=True)
  for kwargs in ({"inner": preserving, "update_ratio": 1e-3}, {}):
    tx, params, state = make(**kwargs)
    grads = jax.tree.map(jnp.zeros_like, gradients(params, state))
    updates, _ = jax.jit(tx.update)(grads, state, params)
    for path in toy.bases(state):
      value = toy.get(updates, path).value
      np.testing.assert_array_equal(value, np.zeros_like(value))


# -- the step of `sketch` ----------------------------------------------------


@pytest.mark.parametrize(
    "distribution,refresh", [("rademacher", True), ("orthonormal", False)]
)
def test_several_updates_with_weight_decay(distribution, refresh):
  tx, params, state = make(
      distribution=distribution,
      refresh=refresh,
      weight_decay=0.3,
      factor_dtype=F32,
  )
  seen = {path: [] for path in toy.bases(state)}
  for step, (grads, old, new, before) in enumerate(run(tx, params, state)):
    bases = toy.bases(state, step)
    for path, basis in bases.items():
      same = np.array_equal(basis, toy.bases(state, 0)[path])
      assert same == (step == 0 or not refresh)
      seen[path].append(toy.get(grads, path))
      direction = oracles.row_adam(seen[path])[-1]
      # W ← (1 - lr · wd) W - lr Aᵀ D
      expected = (1 - 0.1 * 0.3) * oracles.f64(toy.get(old, path))
      expected -= 0.1 * oracles.reconstruct(basis, direction)
      oracles.assert_close(toy.get(new, path), expected, 1e-5)
    np.testing.assert_array_equal(new["b"]["bias"], old["b"]["bias"])
    assert int(before.count) == step


@pytest.mark.parametrize(
    "norm_preserving,gradient_size",
    [(False, 1.0), (True, 1.0), (True, 1e-25), (True, 1e25)],
)
def test_update_ratio(norm_preserving, gradient_size):
  tx, params, state = make(
      inner=logra_jax.scale_by_row_adam(norm_preserving=norm_preserving),
      update_ratio=6e-5,
  )
  grads = gradients(params, state, size=gradient_size)
  updates, _ = jax.jit(tx.update)(grads, state, params)
  bases = toy.bases(state)
  deltas = [
      oracles.reconstruct(a, toy.get(updates, p).value)
      for p, a in bases.items()
  ]
  weights = [toy.get(params, p) for p in bases]
  ratio = oracles.global_norm(*deltas) / oracles.global_norm(*weights)
  np.testing.assert_allclose(ratio, 6e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "gradient_size,dtype", [(1.0, F32), (1e-3, F32), (1e25, F32), (1.0, BF16)]
)
def test_global_clip(gradient_size, dtype):
  tx, params, state = make(
      dtype=dtype, clip_norm=0.7, inner=optax.identity(), others=optax.sgd(1.0)
  )
  grads = gradients(params, state, size=gradient_size)
  updates, new_state = jax.jit(tx.update)(grads, state, params)
  bases = toy.bases(state)
  dense = [oracles.reconstruct(a, toy.get(grads, p)) for p, a in bases.items()]
  norm = oracles.global_norm(*dense, grads["b"]["bias"])
  factor = min(1.0, 0.7 / norm)
  assert (factor < 1) == (gradient_size > 1e-2)
  for path in (*bases, "b/bias"):
    expected = factor * oracles.f64(toy.get(grads, path))
    got = toy.get(updates, path).value
    tol = 2**-7 if got.dtype == BF16 else 1e-5
    oracles.assert_close(got, expected, tol)
  assert updates["b"]["bias"].value.dtype == dtype
  assert int(new_state.skipped) == 0


@pytest.mark.parametrize("c", [-4.0, 2.0**-20])
def test_scaling_scales_the_whole_update(c):
  """Powers of two: then 'by exactly c' is bit for bit, decay included."""
  kwargs = {"weight_decay": 0.3, "others": optax.sgd(1.0), "factor_dtype": F32}
  tx, params, state = make(**kwargs)
  scaled, _, scaled_state = make(
      wrap=lambda tx: optax.chain(tx, optax.scale(c)), **kwargs
  )
  grads = gradients(params, state)
  updates, _ = jax.jit(tx.update)(grads, state, params)
  scaled_updates, scaled_state = jax.jit(scaled.update)(
      grads, scaled_state, params
  )
  jax.tree.map(
      lambda u, s: np.testing.assert_array_equal(c * u, s),
      updates,
      scaled_updates,
  )
  # Merged into zero weights, what is left is the update itself.
  zeros = jax.tree.map(jnp.zeros_like, params)
  one = apply(zeros, updates, scaled_state)
  c_one = apply(zeros, scaled_updates, scaled_state)
  jax.tree.map(lambda u, s: np.testing.assert_array_equal(c * u, s), one, c_one)
  # The decay's coefficient is wd · lr: from the merge into large weights.
  big = jax.tree.map(lambda p: jnp.full_like(p, 1e12), params)
  merged = apply(big, scaled_updates, scaled_state)
  factor = oracles.f64(merged["a"]["kernel"]) / 1e12
  oracles.assert_close(factor, np.full((12, 20), 1 + 0.3 * c), 1e-6)


INNER = {
    "trace": (
        lambda: optax.trace(0.9),
        lambda s: oracles.trace(s, 0.9),
    ),
    "adam": (
        lambda: optax.scale_by_adam(0.9, 0.99, 1e-3),
        lambda s: oracles.adam(s, 0.9, 0.99, 1e-3),
    ),
    "momentum_then_row_adam": (
        lambda: optax.chain(optax.trace(0.5), logra_jax.scale_by_row_adam()),
        lambda s: oracles.row_adam(oracles.trace(s, 0.5)),
    ),
}


@pytest.mark.parametrize("name", sorted(INNER))
def test_momentum_of_thin_arrays(name):
  inner, oracle = INNER[name]
  tx, params, state = make(inner=inner(), refresh=False, factor_dtype=F32)
  seen = []
  for grads, old, new, _ in run(tx, params, state, steps=3):
    seen.append(grads["a"]["kernel"])
    basis = toy.bases(state)["a/kernel"]
    expected = oracles.f64(old["a"]["kernel"])
    expected -= 0.1 * oracles.reconstruct(basis, oracle(seen)[-1])
    oracles.assert_close(new["a"]["kernel"], expected, 1e-5)


@pytest.mark.parametrize("name", sorted(INNER))
def test_momentum_with_a_refreshed_basis_is_refused(name):
  with pytest.raises(ValueError, match=r"refresh=True.*refresh=False"):
    make(inner=INNER[name][0]())


@pytest.mark.parametrize("name", ["trace", "adam"])
@pytest.mark.parametrize("after", [True, False])
def test_momentum_in_the_chain_equals_inner(name, after):
  """`logra_jax.init` makes the states that a chain's neighbours need."""
  middle = INNER[name][0]
  tx, params, state = make(inner=middle(), refresh=False)

  def wrap(tx):
    return optax.chain(tx, middle()) if after else optax.chain(middle(), tx)

  chain, *_ = make(inner=optax.identity(), refresh=False, wrap=wrap)
  chain_state = logra_jax.init(chain, params)
  assert_thin(chain_state, params)
  for step in range(3):
    grads = gradients(params, state, seed=step)
    updates, state = jax.jit(tx.update)(grads, state, params)
    chain_updates, new = jax.jit(chain.update)(grads, chain_state, params)
    assert_same_kind(chain_state, new)
    chain_state = new
    for path in toy.bases(state):
      oracles.assert_close(
          toy.get(chain_updates, path).value,
          toy.get(updates, path).value,
          1e-6,
      )
    assert chain_updates["b"]["bias"] is None


def test_momentum_in_the_chain_at_full_rank():
  """There a sketch has the kernel's shape, and nothing is to be refused."""
  tx, params, _ = make(
      rank=64, refresh=False, wrap=lambda tx: optax.chain(optax.trace(0.9), tx)
  )
  state = logra_jax.init(tx, params)
  loss = lambda p: jnp.sum(logra_jax.dense(jnp.ones((2, 12)), p["a"]["kernel"]))
  _, grads = logra_jax.value_and_grad(loss)(params, state)
  assert grads["a"]["kernel"].shape == params["a"]["kernel"].shape


def test_dense_state_in_the_chain_is_refused():
  tx, params, _ = make(
      refresh=False, wrap=lambda tx: optax.chain(tx, optax.trace(0.9))
  )
  loss = lambda p: jnp.sum(logra_jax.dense(jnp.ones((2, 12)), p["a"]["kernel"]))
  with pytest.raises(ValueError, match=r"logra_jax.init\(tx, params\)"):
    logra_jax.value_and_grad(loss)(params, tx.init(params))
  logra_jax.value_and_grad(loss)(params, logra_jax.init(tx, params))
  # A refreshed basis makes the thin moment stale.
  tx, *_ = make(wrap=lambda tx: optax.chain(tx, optax.trace(0.9)))
  with pytest.raises(ValueError, match=r"stale.*refresh=False"):
    logra_jax.value_and_grad(loss)(params, logra_jax.init(tx, params))


def test_row_adam_before_sketch_needs_no_fixed_basis():
  tx, params, _ = make(
      inner=optax.identity(),
      wrap=lambda tx: optax.chain(logra_jax.scale_by_row_adam(), tx),
  )
  state = logra_jax.init(tx, params)
  loss = lambda p: jnp.sum(logra_jax.dense(jnp.ones((2, 12)), p["a"]["kernel"]))
  _, grads = logra_jax.value_and_grad(loss)(params, state)
  updates, _ = jax.jit(tx.update)(grads, state, params)
  expected = oracles.row_adam([grads["a"]["kernel"]])[0]
  oracles.assert_close(updates["a"]["kernel"].value, expected, 1e-5)


def test_multi_steps_equals_the_whole_batch():
  tx, params, state = make(others=optax.sgd(1.0))
  steps = optax.MultiSteps(tx, every_k_schedule=4)
  steps_state = logra_jax.init(steps, params)
  assert_thin(steps_state, params)
  update = jax.jit(steps.update)
  whole = None
  merged = params
  for i in range(4):
    grads = gradients(params, state, seed=i)
    whole = grads if whole is None else optax.tree.add(whole, grads)
    updates, new = update(grads, steps_state, params)
    assert_same_kind(steps_state, new)
    steps_state = new
    merged = apply(merged, updates, steps_state)
  mean = optax.tree.scale(1 / 4, whole)
  updates, state = jax.jit(tx.update)(mean, state, params)
  expected = apply(params, updates, state)
  jax.tree.map(lambda a, b: oracles.assert_close(a, b, 1e-5), merged, expected)
  assert int(toy.sketch_state(steps_state).count) == 1


# -- ranks and the other parameters ------------------------------------------


def test_ranks_by_path():
  _, _, state = make(rank={"a/.*": 3, ".*": 5})
  assert [t.thin for t in state.plan.targets] == [(3, 20), (3, 5, 7)]


def test_rank_is_clipped_to_the_inputs():
  _, _, state = make(rank=16)
  assert [t.rank for t in state.plan.targets] == [12, 16]


def test_others():
  shapes = SHAPES | {"norm/scale": (7,), "embed": (9, 4)}
  kinds = lambda others: make(shapes=shapes, others=others)[2].plan
  rest = ("b/bias", "embed", "norm/scale")
  by_name = lambda paths: tuple(sorted(paths))
  plan = kinds(None)
  assert by_name(plan.frozen) == rest and plan.dense == ()
  plan = kinds(optax.adam(1e-3))
  assert by_name(plan.dense) == rest and plan.frozen == ()
  mapping = {
      "embed": None,
      ".*/scale": optax.sgd(0.5),
      ".*/bias": optax.adam(1e-3),
  }
  plan = kinds(mapping)
  assert plan.frozen == ("embed",) and by_name(plan.dense) == (
      "b/bias",
      "norm/scale",
  )
  tx, params, state = make(shapes=shapes, others=mapping)
  for grads, old, new, _ in run(tx, params, state, steps=1, lr=1.0):
    np.testing.assert_array_equal(new["embed"], old["embed"])
    scale = oracles.f64(old["norm"]["scale"]) - 0.5 * oracles.f64(
        grads["norm"]["scale"]
    )
    oracles.assert_close(new["norm"]["scale"], scale, 1e-6)
    # Adam's first step is the sign, up to its epsilon.
    bias = oracles.f64(old["b"]["bias"]) - 1e-3 * np.sign(grads["b"]["bias"])
    oracles.assert_close(new["b"]["bias"], bias, 1e-5)


def test_others_that_need_the_parameters():
  adamw = optax.adamw(1e-2, weight_decay=0.5)
  tx, params, state = make(others=adamw)
  grads = gradients(params, state)
  updates, _ = jax.jit(tx.update)(grads, state, params)
  expected, _ = adamw.update(
      grads["b"]["bias"], adamw.init(params["b"]["bias"]), params["b"]["bias"]
  )
  oracles.assert_close(-updates["b"]["bias"].value, expected, 1e-6)


# -- gradients that are not finite -------------------------------------------


@pytest.mark.parametrize(
    "where,bad",
    [("a/kernel", np.nan), ("b/kernel", -np.inf), ("b/bias", np.inf)],
)
def test_non_finite_gradient_is_skipped(where, bad):
  tx, params, state = make(others=optax.adam(1e-2), clip_norm=1.0)
  update = jax.jit(tx.update)
  _, state = update(gradients(params, state), state, params)
  grads = gradients(params, state, seed=1)
  block, name = where.split("/")
  grads[block][name] = grads[block][name].at[..., 0].set(bad)
  updates, after = update(grads, state, params)
  for leaf in jax.tree.leaves(updates):
    np.testing.assert_array_equal(leaf, np.zeros_like(leaf))
  same = apply(params, updates, after)
  jax.tree.map(np.testing.assert_array_equal, same, params)
  jax.tree.map(
      np.testing.assert_array_equal,
      (after.inner, after.others),
      (state.inner, state.others),
  )
  assert int(after.skipped) == 1 and int(after.count) == 2
  # The next good gradient is used, with the moments from before.
  updates, recovered = update(gradients(params, state, 2), after, params)
  assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(updates))
  assert int(recovered.skipped) == 1
  assert int(recovered.inner.count) == 2


def test_overflow_inside_the_inner_transformation_is_skipped():
  """1e30 is finite; its square, which Adam keeps, is not."""
  tx, params, state = make(
      inner=optax.scale_by_adam(), refresh=False, others=optax.adam(1e-2)
  )
  update = jax.jit(tx.update)
  for huge in ("a", "b"):  # a sketch; a sketch and a dense gradient
    grads = gradients(params, state)
    grads[huge] = optax.tree.scale(1e30, grads[huge])
    updates, after = update(grads, state, params)
    assert int(after.skipped) == 1
    jax.tree.map(
        np.testing.assert_array_equal,
        (after.inner, after.others),
        (state.inner, state.others),
    )
    for leaf in jax.tree.leaves(updates):
      np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


def test_overflow_of_the_update_is_skipped():
  tx, params, state = make(inner=optax.scale(1e30))
  grads = gradients(params, state, size=1e20)
  updates, after = jax.jit(tx.update)(grads, state, params)
  assert int(after.skipped) == 1
  for leaf in jax.tree.leaves(updates):
    np.testing.assert_array_equal(leaf, np.zeros_like(leaf))


# -- the state ---------------------------------------------------------------


def assert_same_kind(old, new):
  """Same structure, shapes and dtypes."""
  assert jax.tree.structure(old) == jax.tree.structure(new)
  kind = lambda x: (x.shape, x.dtype, x.weak_type)
  olds, news = jax.tree.leaves(old), jax.tree.leaves(new)
  for a, b in zip(olds, news, strict=True):
    assert kind(jnp.asarray(a)) == kind(jnp.asarray(b))


def assert_thin(state, params):
  """Arrays only, and none with as many numbers as a target kernel."""
  plan = toy.sketch_state(state).plan
  smallest = min(toy.get(params, t.path).size for t in plan.targets)
  for leaf in jax.tree.leaves(state):
    assert isinstance(leaf, jax.Array)
    assert leaf.size < smallest


CONFIGS = {
    "default": {},
    "all": {
        "rank": {"a/.*": 3, ".*": 5},
        "others": optax.adamw(1e-3),
        "clip_norm": 1.0,
        "weight_decay": 0.1,
        "distribution": "gaussian",
    },
    "ratio": {
        "inner": logra_jax.scale_by_row_adam(norm_preserving=True),
        "update_ratio": 6e-5,
        "others": {".*bias": optax.sgd(0.1, momentum=0.9)},
    },
    "momentum": {"inner": optax.trace(0.9), "refresh": False},
}


@pytest.mark.parametrize(
    "name,dtype", [*((name, F32) for name in sorted(CONFIGS)), ("all", BF16)]
)
def test_state_is_thin_arrays_of_constant_kind(name, dtype):
  tx, params, state = make(dtype=dtype, **CONFIGS[name])
  assert_thin(state, params)
  grads = gradients(params, state)
  donating = jax.jit(tx.update, donate_argnums=1)
  kept = jax.tree.map(jnp.copy, state)
  updates, new = jax.jit(tx.update)(grads, state, params)
  assert_same_kind(state, new)
  assert_same_kind(logra_jax.init(tx, params), state)
  jitted, donated = donating(grads, kept, params)
  jax.tree.map(
      lambda a, b: oracles.assert_close(a, b, 2**-7 if dtype == BF16 else 1e-5),
      (updates, new),
      (jitted, donated),
  )
  for target in new.plan.targets:
    assert toy.get(updates, target.path).value.dtype == F32


def test_a_norm_after_sketch_is_of_the_thin_arrays():
  """`scale`, a leaf too, must not count: clipping at the norm is no change."""
  params = {"q_proj": {"kernel": jnp.ones((8, 6))}}
  grads = {"q_proj": {"kernel": jnp.full((4, 6), 1e-3)}}
  sketch = logra_jax.sketch(4, inner=optax.identity())
  bound = float(optax.tree.norm(grads)) * (1 + 1e-6)
  tx = optax.chain(sketch, optax.clip_by_global_norm(bound))
  out, _ = tx.update(grads, tx.init(params), params)
  np.testing.assert_array_equal(
      out["q_proj"]["kernel"].value, grads["q_proj"]["kernel"]
  )
