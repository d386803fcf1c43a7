"""Tests of sums over responses against a dense matrix product."""

import jax
import jax.numpy as jnp
import numpy as np

from experiments.learning import objectives


def test_sums_over_responses():
  k = 512
  rng = np.random.default_rng(2)
  response = np.sort(rng.integers(9, size=(2, k))).astype(np.int32)
  response[1] = 4  # One response fills the whole row.
  x = rng.normal(size=(2, k)).astype(np.float32)
  half_square = lambda x, response: (
      0.5 * jnp.sum(objectives.response_sums(x, response) ** 2)
  )
  program = jax.jit(jax.value_and_grad(half_square)).lower(x, response)
  program = program.compile()
  # The oracle multiplies with the matrix of tokens of the same response.
  same = np.float64(response[:, :, None] == response[:, None, :])
  sums = np.einsum("gkj,gj->gk", same, x)
  value, grads = program(x, response)
  np.testing.assert_allclose(value, 0.5 * np.sum(sums**2), rtol=1e-5)
  right = np.einsum("gkj,gk->gj", same, sums)
  np.testing.assert_allclose(grads, right, rtol=1e-4, atol=1e-2)
  # The program never makes that matrix.
  assert program.memory_analysis().temp_size_in_bytes < k * k / 4
  for length in (1, 2):
    ones = jnp.ones((1, length))
    found = objectives.response_sums(ones, jnp.zeros((1, length), jnp.int32))
    np.testing.assert_array_equal(found, length)
