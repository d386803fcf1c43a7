"""Tests of reference KL estimates against the KL of whole distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.learning import reference_kl


def _kl(p, q):
  return np.sum(p * (np.log(p) - np.log(q)))


@pytest.mark.parametrize("estimator", [*reference_kl.ESTIMATORS, "plain"])
def test_what_a_reference_kl_descends(estimator):
  """Expected gradients over a vocabulary are differences of the KL."""
  rng = np.random.default_rng(1)
  logits, reference = rng.normal(size=(2, 6))
  softmax = lambda z: np.exp(z) / np.exp(z).sum()
  q = softmax(reference)

  def expected(z):
    # Every token of the vocabulary has the weight of its probability.
    d = jax.nn.log_softmax(z) - np.log(q)
    estimate = (
        d if estimator == "plain" else reference_kl.estimate(d, estimator)
    )
    return jnp.sum(jax.lax.stop_gradient(jax.nn.softmax(z)) * estimate)

  value, gradient = jax.jit(jax.value_and_grad(expected))(np.float32(logits))
  kl = {
      "k1": lambda z: _kl(softmax(z), q),
      "k2": lambda z: _kl(softmax(z), q),
      "k3": lambda z: _kl(q, softmax(z)),
      "plain": lambda z: 0.0,
  }[estimator]
  right = [
      (kl(logits + step) - kl(logits - step)) / 2e-6
      for step in 1e-6 * np.eye(6)
  ]
  np.testing.assert_allclose(gradient, right, atol=1e-6)
  assert (np.abs(right).max() > 0.1) == (estimator != "plain")
  if estimator in ("k1", "k3"):  # k2 is biased at third order.
    np.testing.assert_allclose(value, _kl(softmax(logits), q), rtol=1e-5)


def test_an_unknown_estimator_is_an_error():
  with pytest.raises(ValueError, match="one of k1, k2, k3, got 'k4'"):
    reference_kl.estimate(jnp.zeros(1), "k4")
