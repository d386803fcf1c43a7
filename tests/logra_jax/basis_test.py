"""Tests of the random basis: what it depends on, its moments and identities.

Each bound is six standard deviations of the statistic under the expected
distribution. A correct generator would fail one with probability below 1e-6,
and since the seeds are fixed, a test passes either always or never.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from logra_jax import _basis
from tests.helpers import oracles, toy

DISTRIBUTIONS = sorted(_basis.DISTRIBUTIONS)

draw = jax.jit(_basis.draw, static_argnums=(1, 2, 3))
project = jax.jit(_basis.project, static_argnums=(2, 3))


def key(seed=42, count=0, path="layers/q_proj/kernel", batch=()):
  return _basis.target_key(jnp.uint32(seed), jnp.int32(count), path, batch)


def draws(n, rank, d_in, distribution):
  keys = jax.random.key_data(
      jax.random.split(jax.random.key(1, impl="threefry2x32"), n)
  )
  return oracles.f64(draw(keys, rank, d_in, distribution))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_is_a_function_of_seed_count_and_path_only(distribution):
  a = draw(key(), 6, 40, distribution)
  again = draw(key(), 6, 40, distribution)
  np.testing.assert_array_equal(a, again)
  others = [
      key(seed=43),
      key(count=1),
      key(path="layers/k_proj/kernel"),
      key(seed=0, count=42),  # not a function of seed + count
  ]
  for other in others:
    b = draw(other, 6, 40, distribution)
    assert np.abs(np.corrcoef(np.ravel(a), np.ravel(b))[0, 1]) < 0.5


def test_seed_count_and_path_are_not_interchangeable():
  keys = {
      tuple(np.asarray(key(seed, count, path)).tolist())
      for seed in range(6)
      for count in range(6)
      for path in ("a", "b", "a/b", "b/a")
  }
  assert len(keys) == 6 * 6 * 4


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_same_under_jit_and_vmap(distribution):
  stacked = key(batch=(3, 2))
  # Run only one distribution op by op, because each op has to be compiled.
  first = _basis.draw if distribution == "rademacher" else draw
  eager = first(stacked, 6, 40, distribution)
  assert eager.shape == (3, 2, 6, 40) and eager.dtype == jnp.float32
  # Signs involve no arithmetic and are equal bit for bit; the compiler can fuse
  # operations of the other distributions.
  tol = 0.0 if distribution == "rademacher" else 1e-6
  oracles.assert_close(draw(stacked, 6, 40, distribution), eager, tol)
  one = lambda k: draw(k, 6, 40, distribution)
  oracles.assert_close(jax.vmap(jax.vmap(one))(stacked), eager, tol)
  one_by_one = [[one(stacked[i, j]) for j in range(2)] for i in range(3)]
  oracles.assert_close(np.asarray(one_by_one), eager, tol)


def test_key_is_the_same_under_jit():
  jitted = jax.jit(_basis.target_key, static_argnums=(2, 3))
  for batch in ((), (3, 2)):
    traced = jitted(jnp.uint32(7), jnp.int32(3), "p", batch)
    np.testing.assert_array_equal(traced, key(7, 3, "p", batch))


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_every_matrix_of_a_stack_has_its_own_basis(distribution):
  a = np.asarray(draw(key(batch=(4,)), 6, 40, distribution))
  for i in range(4):
    for j in range(i):
      corr = np.corrcoef(a[i].ravel(), a[j].ravel())[0, 1]
      assert abs(corr) < 6 / np.sqrt(6 * 40)


@pytest.mark.parametrize("d_in", [8, 31, 32, 33, 100])
def test_rademacher_entries_are_exact_signs(d_in):
  rank = 7
  a = np.asarray(draw(key(), rank, d_in, "rademacher"))
  assert a.shape == (rank, d_in)
  size = np.float32(1) / np.float32(np.sqrt(rank))
  np.testing.assert_array_equal(np.abs(a), np.full_like(a, size))


def test_rademacher_signs_are_balanced_and_independent():
  n, rank, d_in = 40, 16, 96
  a = np.sign(draws(n, rank, d_in, "rademacher"))
  bound = lambda count: 6 / np.sqrt(count)
  assert abs(a.mean()) < bound(a.size)
  assert np.abs(a.mean(axis=(0, 1))).max() < bound(n * rank)  # each column
  assert np.abs(a.mean(axis=(0, 2))).max() < bound(n * d_in)
  # Correlation of neighboring bits, neighboring words and neighboring rows.
  for shifted in (
      a[..., 1:] * a[..., :-1],
      a[..., 32:] * a[..., :-32],
      a[:, 1:] * a[:, :-1],
  ):
    assert abs(shifted.mean()) < bound(shifted.size)


def test_gaussian_moments():
  rank = 16
  x = draws(40, rank, 96, "gaussian").ravel() * np.sqrt(rank)
  n = x.size
  assert abs(x.mean()) < 6 / np.sqrt(n)  # Var x = 1
  assert abs((x**2).mean() - 1) < 6 * np.sqrt(2 / n)  # Var x² = 2
  assert abs((x**3).mean()) < 6 * np.sqrt(15 / n)  # Var x³ = 15
  assert abs((x**4).mean() - 3) < 6 * np.sqrt(96 / n)  # Var x⁴ = 105 - 9


@pytest.mark.parametrize("rank,d_in", [(1, 5), (6, 40), (20, 20)])
def test_orthonormal_rows(rank, d_in):
  a = oracles.f64(draw(key(batch=(2,)), rank, d_in, "orthonormal"))
  expected = np.broadcast_to(np.eye(rank) * d_in / rank, (2, rank, rank))
  oracles.assert_close(a @ a.swapaxes(-1, -2), expected, 1e-5)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("rank,d_in", [(4, 24), (24, 24)])
def test_reconstruction_is_unbiased(distribution, rank, d_in):
  n = 1500
  a = draws(n, rank, d_in, distribution)
  mean = np.einsum("nri,nrj->ij", a, a) / n
  # Each entry of AᵀA is a sum of `rank` products. Their variances are at most
  # 2 / rank² (a squared normal), and their correlations are negative or zero.
  tolerance = 6 * np.sqrt(2 / (rank * n))
  assert np.abs(mean - np.eye(d_in)).max() < tolerance
  # The bound is tight enough to reject a basis that is too large by 1/8.
  assert np.abs(1.125**2 * mean - np.eye(d_in)).max() > tolerance


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("batch", [(), (3, 2)])
def test_gram_identity(distribution, batch):
  a = draw(key(batch=batch), 6, 40, distribution)
  d = toy.normal(0, *batch, 6, 11)
  dense = np.sum(oracles.reconstruct(a, d) ** 2)
  oracles.assert_close(_basis.gram_norm_squared(a, d), dense, 1e-5)
  wrong = draw(key(count=1, batch=batch), 6, 40, distribution)
  if (
      distribution != "orthonormal"
  ):  # its Gram matrix does not depend on the key
    with pytest.raises(AssertionError):
      oracles.assert_close(_basis.gram_norm_squared(wrong, d), dense, 1e-5)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("batch", [(), (3, 2)])
def test_project(distribution, dtype, batch):
  rank, d_in = 6, 40
  x = toy.normal(1, *batch, 9, d_in, dtype=dtype)
  k = key(batch=batch)
  y = project(x, k, rank, distribution)
  assert y.dtype == dtype and y.shape == (*batch, 9, rank)
  a = oracles.f64(draw(k, rank, d_in, distribution))
  expected = np.einsum("...ni,...ri->...nr", oracles.f64(x), a)
  # float32: the rounding error of a sum of d_in terms. bfloat16: the result is
  # rounded to 8 bits, and so are the basis entries unless they are signs.
  oracles.assert_close(y, expected, 1e-5 if dtype == jnp.float32 else 2**-7)


def test_bfloat16_projection_onto_signs_loses_only_the_last_rounding():
  rank, d_in = 6, 40
  x = toy.normal(1, 9, d_in, dtype=jnp.bfloat16)
  y = oracles.f64(project(x, key(), rank, "rademacher"))
  a = oracles.f64(draw(key(), rank, d_in, "rademacher"))
  exact = oracles.f64(x) @ a.T
  half_ulp = 2.0**-8  # of a number with 8 significant bits
  assert np.all(np.abs(y - exact) <= half_ulp * np.abs(exact) + 1e-6)


@pytest.mark.parametrize("distribution", ["rademacher", "gaussian"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_full_basis_is_the_identity(distribution, dtype):
  keys = jax.random.key_data(jax.random.split(jax.random.key(0), 3))
  np.testing.assert_array_equal(
      draw(keys, 5, 5, distribution), np.broadcast_to(np.eye(5), (3, 5, 5))
  )
  x = jax.random.normal(jax.random.key(1), (3, 4, 5), dtype)
  found = _basis.project(x, keys, 5, distribution)
  np.testing.assert_array_equal(np.asarray(found), np.asarray(x))
