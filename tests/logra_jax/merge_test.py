"""Tests of `apply_updates` against float64, and of its rounding to bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import logra_jax
from logra_jax import _merge
from tests.helpers import oracles, toy

F32, BF16 = jnp.float32, jnp.bfloat16
apply = jax.jit(logra_jax.apply_updates)


def make(shapes, dtype=F32, layout="", others=None, **kwargs):
  params = toy.tree(shapes, dtype=dtype)
  tx = logra_jax.sketch(
      rank=4, targets={".*kernel": layout}, others=others, **kwargs
  )
  return params, tx.init(params)


def counted(state, steps=1):
  """Returns the state as after `steps` calls of `update`."""
  return state._replace(count=state.count + steps)


def thin_updates(params, state, size=1.0, scale=-1.0, seed=0):
  """Returns an `Update` with a random factor for each target, else None."""
  thin = {t.path: t.thin for t in state.plan.targets}

  def one(path, leaf):
    path = logra_jax._paths.path_string(path)
    if path not in thin:
      return None
    factor = size * toy.normal(seed + len(path), *thin[path])
    return logra_jax.Update(factor, jnp.float32(scale))

  return jax.tree_util.tree_map_with_path(one, params)


@pytest.mark.parametrize(
    "shape,layout",
    [
        ((12, 7), ""),
        ((3, 12, 7), ""),
        ((2, 3, 12, 7), ""),
        ((12, 2, 4), "ioo"),
        ((3, 2, 6, 2, 4), "biioo"),
    ],
)
@pytest.mark.parametrize("distribution", ["rademacher", "orthonormal"])
def test_merge(shape, layout, distribution):
  params, state = make(
      {"kernel": shape},
      layout=layout,
      distribution=distribution,
      weight_decay=0.25,
      factor_dtype=F32,
  )
  updates = thin_updates(params, state, scale=-0.5)
  new = apply(params, updates, counted(state))["kernel"]
  (target,) = state.plan.targets
  delta = oracles.reconstruct(
      toy.bases(state, 0)["kernel"], updates["kernel"].value
  ).reshape(shape)
  expected = (1 - 0.25 * 0.5) * oracles.f64(params["kernel"]) + delta
  oracles.assert_close(new, expected, 1e-6)
  # The comparison would detect the bases of the next update.
  other = oracles.reconstruct(
      toy.bases(state, 1)["kernel"], updates["kernel"].value
  ).reshape(shape)
  if target.rank < target.d_in:
    with pytest.raises(AssertionError):
      oracles.assert_close(new, expected - delta + other, 0.1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtypes_and_structure_are_kept(dtype):
  with jax.enable_x64(dtype == "float64"):
    shapes = {"a/kernel": (12, 7), "a/bias": (7,), "frozen": (5,)}
    params, state = make(
        shapes, dtype=jnp.dtype(dtype), others={"a/bias": optax.sgd(1.0)}
    )
    params["ids"] = jnp.arange(4)
    updates = thin_updates(params, state)
    updates["a"]["bias"] = logra_jax.Update(
        toy.normal(3, 7, dtype=jnp.dtype(dtype)), jnp.float32(1)
    )
    new = apply(params, updates, counted(state))
    assert jax.tree.structure(new) == jax.tree.structure(params)
    kind = lambda x: (x.shape, x.dtype)
    assert jax.tree.map(kind, new) == jax.tree.map(kind, params)
    np.testing.assert_array_equal(new["ids"], params["ids"])
    np.testing.assert_array_equal(new["frozen"], params["frozen"])
    # The error against float64 is at most one unit in the last place.
    unit = float(jnp.finfo(dtype).eps)
    factor = updates["a"]["kernel"].value.astype(BF16)
    delta = oracles.reconstruct(toy.bases(state, 0)["a/kernel"], factor)
    kernel = oracles.f64(params["a"]["kernel"]) + delta
    # The product is computed in float32 for any storage dtype.
    tol = max(unit, 3e-7)
    oracles.assert_close(new["a"]["kernel"], kernel, tol)
    bias = oracles.f64(params["a"]["bias"]) + oracles.f64(
        updates["a"]["bias"].value
    )
    oracles.assert_close(new["a"]["bias"], bias, unit)


def test_float64_weights_keep_their_digits():
  with jax.enable_x64(True):
    params, state = make({"kernel": (12, 7)}, dtype=jnp.float64)
    updates = thin_updates(params, state, size=1e-12)
    new = apply(params, updates, counted(state))["kernel"]
    delta = oracles.reconstruct(
        toy.bases(state, 0)["kernel"], updates["kernel"].value.astype(BF16)
    )
    moved = oracles.f64(new) - oracles.f64(params["kernel"])
    # 2⁻⁵² times a weight below 4 is 1e-15, a thousandth of the step.
    oracles.assert_close(moved, delta, 2e-3)


def test_factors_are_rounded_before_the_merge():
  params, state = make({"kernel": (3, 12, 7)})
  updates = thin_updates(params, state)
  rounded = jax.tree.map(lambda x: x.astype(BF16).astype(F32), updates)
  state = counted(state)
  one, two = apply(params, updates, state), apply(params, rounded, state)
  np.testing.assert_array_equal(one["kernel"], two["kernel"])
  # A copy that receives the bfloat16 factors merges the same numbers.
  sent = jax.tree.map(lambda x: x.astype(BF16), updates)
  three = apply(params, sent, state)
  np.testing.assert_array_equal(one["kernel"], three["kernel"])
  unrounded, float_state = make({"kernel": (3, 12, 7)}, factor_dtype=F32)
  four = apply(unrounded, updates, counted(float_state))
  assert np.any(np.asarray(four["kernel"]) != np.asarray(one["kernel"]))


def test_plain_updates_without_a_sketch():
  params = toy.tree({"a": (6, 5), "b": (5,)})
  tx = optax.adam(0.1)
  grads = toy.tree({"a": (6, 5), "b": (5,)}, seed=7)
  updates, state = tx.update(grads, tx.init(params), params)
  new = apply(params, updates, state)
  jax.tree.map(
      lambda a, b: oracles.assert_close(a, b, 1e-7),
      new,
      optax.apply_updates(params, updates),
  )


def test_a_parameter_named_like_a_counter():
  params = toy.tree({"count": (3,), "q_proj/kernel": (8, 5)})
  tx = logra_jax.sketch(rank=2, others=optax.adam(0.1))
  state = tx.init(params)
  grads = {"count": jnp.ones(3), "q_proj": {"kernel": jnp.ones((2, 5))}}
  updates, state = tx.update(grads, state, params)
  new = logra_jax.apply_updates(params, updates, state)
  assert new["count"].shape == (3,)


# -- stochastic rounding to bfloat16 -----------------------------------------


@pytest.mark.parametrize("what", ["kernel", "bias"])
def test_rounding_is_unbiased_where_nearest_loses_everything(what):
  """Merges 400 steps of 1/100 of a unit in the last place."""
  n, steps = 2000, 400
  unit = 2.0**-7  # spacing of bfloat16 in [1, 2)
  step = np.float32(unit / 100)
  params = {
      "q_proj": {"kernel": jnp.full((1, n), 1.25, BF16)},
      "bias": jnp.full((n,), 1.25, BF16),
  }
  tx = logra_jax.sketch(rank=1, others=optax.sgd(1.0), factor_dtype=F32)
  state = tx.init(params)
  zero = jnp.float32(0)

  @jax.jit
  def body(i, params):
    at = state._replace(count=state.count + i + 1)
    # With d_in = rank = 1 the basis is ±1; undo its sign so that weights grow.
    (sign,) = state.plan.targets[0].basis(
        at.keys(at.count - 1)["q_proj/kernel"]
    )
    updates = {
        "q_proj": {
            "kernel": logra_jax.Update(step * sign * jnp.ones((1, n)), zero)
        },
        "bias": logra_jax.Update(jnp.full((n,), step), zero),
    }
    return logra_jax.apply_updates(params, updates, at)

  after = jax.lax.fori_loop(0, steps, body, params)
  moved = oracles.f64(after[what] if what == "bias" else after["q_proj"][what])
  moved = moved.ravel() - 1.25
  # An element moves by Binomial(400, 1/100) units: the mean is 4, the variance
  # 400 · 0.01 · 0.99. (All elements stay below 2, where the unit doubles.)
  z = (moved.mean() - steps * step) / (unit * np.sqrt(3.96 / n))
  assert abs(z) < 6
  np.testing.assert_allclose(
      moved.var() / unit**2, 3.96, rtol=6 * np.sqrt(2 / n)
  )
  nearest = (params["bias"] + jnp.asarray(step, BF16)).astype(BF16)
  np.testing.assert_array_equal(
      nearest, params["bias"]
  )  # to nearest, nothing would move


def test_rounding_of_any_number_is_unbiased_and_to_a_neighbour():
  n = 4000
  x = np.asarray(
      [1.001, -3.3, 1e-30, -7e20, 0.1, 65400.0, 1e-40, 3.38e38], np.float32
  )
  keys = jax.random.split(jax.random.key(0), n)
  round_to = jax.jit(
      jax.vmap(lambda k: _merge._round_to(jnp.asarray(x), BF16, k))
  )
  out = oracles.f64(round_to(keys))
  for j, value in enumerate(map(float, x)):
    low, high = np.unique(out[:, j])[[0, -1]]
    assert low <= value <= high
    assert len(np.unique(out[:, j])) <= 2
    p = (value - low) / (high - low)
    sigma = (high - low) * np.sqrt(p * (1 - p) / n)
    assert abs(out[:, j].mean() - value) < 6 * sigma


def test_rounding_never_makes_an_infinity():
  largest = float(jnp.finfo(BF16).max)
  # Numbers above the largest bfloat16, but nearer to it than to 2¹²⁸.
  x = jnp.full((10_000,), np.float32(largest * (1 + 2.0**-10)))
  for value in (x, -x, jnp.full((10_000,), largest)):
    out = _merge._round_to(value, BF16, jax.random.key(1))
    assert bool(jnp.isfinite(out).all())
  # Infinities and NaN in the input are kept.
  bad = jnp.asarray([jnp.inf, -jnp.inf, jnp.nan])
  np.testing.assert_array_equal(
      oracles.f64(_merge._round_to(bad, BF16, jax.random.key(1))),
      oracles.f64(bad),
  )


def test_zero_update_changes_no_bit():
  params, state = make(
      {"kernel": (3, 12, 7), "bias": (7,)}, dtype=BF16, others=optax.sgd(1.0)
  )
  # No subnormal numbers, because some processors flush them to zero.
  params["kernel"] = (
      params["kernel"]
      .at[0, 0]
      .set(jnp.asarray([0.0, -0.0, 2e-38, 3.3e38, -3.3e38, -2e-38, 1.0], BF16))
  )
  updates = thin_updates(params, state, size=0.0, scale=0.0)
  updates["bias"] = logra_jax.Update(jnp.zeros(7, BF16), jnp.float32(0))
  new = apply(params, updates, counted(state))
  bits = lambda x: np.asarray(x).view(np.uint16)
  for path in ("kernel", "bias"):
    old, now = bits(params[path]), bits(new[path])
    # Only the sign of zero can change, because -0 + 0 = +0.
    same = (old == now) | ((old == 0x8000) & (now == 0))
    assert same.all()


@pytest.mark.parametrize("refresh", [True, False])
def test_noise_differs_between_updates_seeds_and_parameters(refresh):
  shapes = {"a/kernel": (40, 30), "b/kernel": (40, 30), "s/kernel": (2, 40, 30)}
  noise = []
  for seed, steps in ((0, 1), (0, 2), (1, 1)):
    params, state = make(shapes, dtype=BF16, refresh=refresh, seed=seed)
    params = jax.tree.map(lambda p: jnp.ones_like(p), params)
    # With a decay of half a unit in the last place, each weight is rounded up
    # or down with equal probability.
    state = state._replace(weight_decay=jnp.float32(2.0**-8))
    updates = thin_updates(params, state, size=0.0, scale=1.0)
    new = apply(params, updates, counted(state, steps))
    flips = jax.tree.map(lambda x: np.asarray(x) > 1, new)
    noise += [flips["a"]["kernel"], flips["b"]["kernel"], *flips["s"]["kernel"]]
    again = apply(params, updates, counted(state, steps))
    jax.tree.map(np.testing.assert_array_equal, new, again)
  for i, one in enumerate(noise):
    for other in noise[:i]:
      agree = np.mean(one == other)
      assert abs(agree - 0.5) < 6 * 0.5 / np.sqrt(one.size)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("size", [0.02, 1.0, 3e-6])
def test_sixteen_bits_are_rounded_without_bias(dtype, size):
  """Steps of a hundredth of the spacing arrive in the mean."""
  n = 200_000
  start = jnp.full((n,), size, dtype)
  above = jnp.nextafter(start[0], jnp.asarray(jnp.inf, dtype))
  spacing = float(above) - float(start[0])
  step = 0.01 * spacing
  wide = start.astype(jnp.float32) + jnp.float32(step)
  found = _merge._round_to(wide, dtype, jax.random.key(0))
  assert found.dtype == dtype
  values = np.unique(np.asarray(found, np.float64))
  assert set(values) <= {float(start[0]), float(above)}
  moved = np.mean(np.asarray(found, np.float64) - float(start[0])) / step
  # Six standard deviations of a mean of n coins of chance 0.01.
  assert abs(moved - 1) < 6 * np.sqrt(0.99 / (0.01 * n))
  # What the dtype represents stays, and the largest number stays finite.
  exact = _merge._round_to(start.astype(jnp.float32), dtype, jax.random.key(1))
  np.testing.assert_array_equal(exact, start)
  top = jnp.full((100,), jnp.finfo(dtype).max, jnp.float32)
  assert np.isfinite(
      np.asarray(_merge._round_to(top, dtype, jax.random.key(2)), np.float64)
  ).all()
