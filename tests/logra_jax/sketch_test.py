"""Tests of `sketch` against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import logra_jax
from tests.helpers import oracles, sketched, toy

F32, BF16 = jnp.float32, jnp.bfloat16
apply = jax.jit(logra_jax.apply_updates)


def run(tx, params, state, steps=4, lr=0.1):
  """Trains; yields (grads, old params, new params, old state) for each step."""
  update = jax.jit(tx.update)
  for i in range(steps):
    grads = sketched.gradients(params, state, seed=10 * i)
    updates, new_state = update(grads, state, params)
    updates = optax.tree.scale(-lr, updates)
    new = apply(params, updates, new_state)
    yield grads, params, new, state
    params, state = new, new_state


def test_zero_gradients_give_zero_updates():
  preserving = logra_jax.scale_by_row_adam(norm_preserving=True)
  for kwargs in ({"inner": preserving, "update_ratio": 1e-3}, {}):
    tx, params, state = sketched.make(**kwargs)
    grads = jax.tree.map(jnp.zeros_like, sketched.gradients(params, state))
    updates, _ = jax.jit(tx.update)(grads, state, params)
    for path in toy.bases(state):
      value = toy.get(updates, path).value
      np.testing.assert_array_equal(value, np.zeros_like(value))


# -- the step of `sketch` ----------------------------------------------------


@pytest.mark.parametrize(
    "distribution,refresh", [("rademacher", True), ("orthonormal", False)]
)
def test_several_updates_with_weight_decay(distribution, refresh):
  tx, params, state = sketched.make(
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
  tx, params, state = sketched.make(
      inner=logra_jax.scale_by_row_adam(norm_preserving=norm_preserving),
      update_ratio=6e-5,
  )
  grads = sketched.gradients(params, state, size=gradient_size)
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
  tx, params, state = sketched.make(
      dtype=dtype, clip_norm=0.7, inner=optax.identity(), others=optax.sgd(1.0)
  )
  grads = sketched.gradients(params, state, size=gradient_size)
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
  """The factors are powers of two, so that results are equal bit for bit."""
  kwargs = {"weight_decay": 0.3, "others": optax.sgd(1.0), "factor_dtype": F32}
  tx, params, state = sketched.make(**kwargs)
  scaled, _, scaled_state = sketched.make(
      wrap=lambda tx: optax.chain(tx, optax.scale(c)), **kwargs
  )
  grads = sketched.gradients(params, state)
  updates, _ = jax.jit(tx.update)(grads, state, params)
  scaled_updates, scaled_state = jax.jit(scaled.update)(
      grads, scaled_state, params
  )
  jax.tree.map(
      lambda u, s: np.testing.assert_array_equal(c * u, s),
      updates,
      scaled_updates,
  )
  # Merging into zero weights leaves just the update.
  zeros = jax.tree.map(jnp.zeros_like, params)
  one = apply(zeros, updates, scaled_state)
  c_one = apply(zeros, scaled_updates, scaled_state)
  jax.tree.map(lambda u, s: np.testing.assert_array_equal(c * u, s), one, c_one)
  # Merging into huge weights leaves just the decay, with coefficient wd · lr.
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
  tx, params, state = sketched.make(
      inner=inner(), refresh=False, factor_dtype=F32
  )
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
    sketched.make(inner=INNER[name][0]())


# -- ranks and the other parameters ------------------------------------------


def test_others():
  shapes = sketched.SHAPES | {"norm/scale": (7,), "embed": (9, 4)}
  kinds = lambda others: sketched.make(shapes=shapes, others=others)[2].plan
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
  tx, params, state = sketched.make(shapes=shapes, others=mapping)
  for grads, old, new, _ in run(tx, params, state, steps=1, lr=1.0):
    np.testing.assert_array_equal(new["embed"], old["embed"])
    scale = oracles.f64(old["norm"]["scale"]) - 0.5 * oracles.f64(
        grads["norm"]["scale"]
    )
    oracles.assert_close(new["norm"]["scale"], scale, 1e-6)
    # Adam's first step is the sign of the gradient, up to its epsilon.
    bias = oracles.f64(old["b"]["bias"]) - 1e-3 * np.sign(grads["b"]["bias"])
    oracles.assert_close(new["b"]["bias"], bias, 1e-5)


def test_others_that_need_the_parameters():
  adamw = optax.adamw(1e-2, weight_decay=0.5)
  tx, params, state = sketched.make(others=adamw)
  grads = sketched.gradients(params, state)
  updates, _ = jax.jit(tx.update)(grads, state, params)
  expected, _ = adamw.update(
      grads["b"]["bias"], adamw.init(params["b"]["bias"]), params["b"]["bias"]
  )
  oracles.assert_close(-updates["b"]["bias"].value, expected, 1e-6)


def test_a_norm_after_sketch_is_of_the_thin_arrays():
  """Clipping at the norm changes nothing: the leaf `scale` does not count."""
  params = {"q_proj": {"kernel": jnp.ones((8, 6))}}
  grads = {"q_proj": {"kernel": jnp.full((4, 6), 1e-3)}}
  sketch = logra_jax.sketch(4, inner=optax.identity())
  bound = float(optax.tree.norm(grads)) * (1 + 1e-6)
  tx = optax.chain(sketch, optax.clip_by_global_norm(bound))
  out, _ = tx.update(grads, tx.init(params), params)
  np.testing.assert_array_equal(
      out["q_proj"]["kernel"].value, grads["q_proj"]["kernel"]
  )
