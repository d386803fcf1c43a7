"""Tests of truncation against a float64 sort, and of draws against softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.rollouts import sampling
from experiments.rollouts.sampling import Sampling


def softmax(x):
  x = np.asarray(x, np.float64)
  e = np.exp(x - x.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def truncate(logits, top_k, top_p, keep=None):
  return np.asarray(_truncate(np.asarray(logits), top_k, top_p, keep))


_truncate = jax.jit(sampling.truncate, static_argnums=(1, 2))


def kept_by_sort(logits, top_k, top_p):
  """Mask of the tokens of one row that a float64 sort keeps, with ties."""
  kept = np.ones(len(logits), bool)
  if top_k:
    kept &= logits >= np.sort(logits)[::-1][:top_k][-1]
  if top_p < 1:
    probs = np.where(kept, np.exp(np.float64(logits) - logits.max()), 0.0)
    probs /= probs.sum()
    order = np.argsort(-probs, kind="stable")
    n = np.searchsorted(np.cumsum(probs[order]), top_p) + 1
    kept &= logits >= logits[order[:n]][-1]
  return kept


CASES = [(0, 0.9), (0, 1e-6), (7, 1.0), (40, 0.5), (1000, 1.0)]


@pytest.mark.parametrize(("top_k", "top_p"), CASES)
def test_truncation_is_that_of_a_sort(top_k, top_p):
  logits = np.random.default_rng(0).normal(0, 3, (6, 600)).astype(np.float32)
  logits[1] = -logits[1]
  logits[2] *= 5.0  # One token has nearly all of the probability.
  logits[3, ::2] = -np.inf
  truncated = truncate(logits, top_k, top_p)
  for row, logit in zip(truncated, logits, strict=True):
    kept = kept_by_sort(logit, top_k, top_p)
    kept &= np.isfinite(logit)
    np.testing.assert_array_equal(np.isfinite(row), kept)
    np.testing.assert_array_equal(row[kept], logit[kept])
  assert top_k == 1000 or np.isinf(truncated).sum() > 2 * 300


def test_top_p_keeps_no_more_than_it_needs():
  logits = np.log(np.asarray([[0.5, 0.2, 0.15, 0.1, 0.05]], np.float32))
  for top_p, n in [(0.4, 1), (0.6, 2), (0.97, 5)]:
    assert np.isfinite(truncate(logits, 0, top_p)).sum() == n
  # The likelier of the top two holds 0.5 / 0.7 = 0.714 of their probability.
  assert np.isfinite(truncate(logits, 2, 0.71)).sum() == 1
  assert np.isfinite(truncate(logits, 2, 0.72)).sum() == 2


def test_equally_likely_tokens_stay_together():
  logits = jnp.asarray([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
  for truncated in (
      truncate(logits, 2, 1.0),
      truncate(logits, 0, 0.5),
  ):
    kept = np.isfinite(truncated)[0]
    assert kept.tolist() == [False, True, True, True, True, False]


def test_a_token_may_be_kept_in_any_case():
  logits = jnp.asarray([[0.0, 5.0, 1.0], [4.0, 5.0, 1.0]])
  truncated = truncate(logits, 1, 1.0, keep=jnp.asarray([2, 1]))
  assert np.isfinite(truncated).tolist() == [
      [False, True, True],
      [False, True, False],
  ]


def test_gradients_are_those_of_the_tokens_kept():
  logits = jnp.asarray([2.0, 1.0, 0.0, -1.0])

  def log_prob(x):
    return jax.nn.log_softmax(sampling.truncate(x, 2, 0.99))[1]

  probs = softmax([2.0, 1.0])
  expected = [-probs[0], 1 - probs[1], 0.0, 0.0]
  np.testing.assert_allclose(jax.grad(log_prob)(logits), expected, atol=1e-6)
  np.testing.assert_allclose(
      jax.jvp(log_prob, (logits,), (jnp.arange(4.0),))[1],
      np.dot(expected, np.arange(4)),
      atol=1e-6,
  )


def test_warp_forbids_heats_and_truncates():
  logits = jnp.asarray([[9.0, 2.0, 1.0, 0.0]] * 2)
  warped = sampling.warp(
      logits,
      Sampling(8, min_new_tokens=3, temperature=0.5, top_k=2),
      eos_ids=(0,),
      step=jnp.asarray([2, 3]),
  )
  inf = np.inf
  expected = [[-inf, 4.0, 2.0, -inf], [18.0, 4.0, -inf, -inf]]
  np.testing.assert_allclose(warped, expected)
  greedy = sampling.warp(logits, Sampling(8, temperature=0.0))
  np.testing.assert_array_equal(greedy, logits)
  with pytest.raises(ValueError, match="min_new_tokens=3 needs step"):
    sampling.warp(logits, Sampling(8, min_new_tokens=3), eos_ids=(0,))


def chi_square(counts, probs):
  """Pearson's χ² statistic, in standard deviations above its mean."""
  expected = probs * counts.sum()
  used = expected > 5
  terms = np.square(counts - expected)[used] / expected[used]
  degrees = used.sum() - 1
  return (terms.sum() - degrees) / np.sqrt(2 * degrees)


def keys(seed, n):
  rows = jnp.arange(n)
  return sampling.row_keys(jax.random.key(seed), rows, jnp.zeros_like(rows))


@pytest.mark.parametrize("vocab", [1, 256, 600])
def test_sampling_in_blocks(vocab):
  logits = 2.0 * jax.random.normal(jax.random.key(0), (vocab,))
  # Add a token that cannot be drawn, as in a truncated distribution.
  logits = logits.at[vocab // 2].set(-jnp.inf) if vocab > 1 else logits
  rows = jnp.broadcast_to(logits, (20_000, vocab))
  tokens, log_probs = jax.jit(sampling.draw)(rows, keys(1, 20_000))
  expected = jax.nn.log_softmax(logits)
  np.testing.assert_allclose(log_probs, expected[tokens], atol=1e-5)
  counts = np.bincount(np.asarray(tokens), minlength=vocab)
  assert counts.size == vocab
  if vocab > 1:
    assert counts[vocab // 2] == 0
    assert abs(chi_square(counts, np.exp(expected))) < 5


def test_keys_differ_by_row_and_step_and_not_by_place():
  def of(rows, steps):
    args = jnp.asarray(rows), jnp.asarray(steps)
    return jax.random.key_data(sampling.row_keys(jax.random.key(0), *args))

  key_data = of([0, 0, 1, 1], [0, 1, 0, 1])
  assert len({tuple(x) for x in key_data.tolist()}) == 4
  np.testing.assert_array_equal(of([1, 7], [1, 0])[0], key_data[3])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be .* got 0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be .* got 1.5"),
        ({"max_new_tokens": True}, "max_new_tokens must be .* got True"),
        ({"min_new_tokens": -1}, "min_new_tokens must be .* got -1"),
        ({"min_new_tokens": 9}, "min_new_tokens=9 .* max_new_tokens=8"),
        ({"temperature": -0.1}, "temperature must be .* got -0.1"),
        ({"temperature": float("nan")}, "temperature must be .* got nan"),
        ({"temperature": float("inf")}, "temperature must be .* got inf"),
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"top_k": -1}, "top_k must be .* at least 0, got -1"),
        ({"top_p": 0}, "top_p must be above 0 .* got 0; .* temperature=0"),
        ({"top_p": 1.1}, "top_p must be .* got 1.1"),
        ({"stop": "end"}, r"stop must be a sequence .* give \('end',\)"),
        ({"stop": ("a", "")}, "stop must hold strings .* got ''"),
        ({"stop": (3,)}, "stop must hold strings .* got 3"),
    ],
)
def test_bad_settings(options, message):
  with pytest.raises(ValueError, match=message):
    Sampling(**({"max_new_tokens": 8} | options))


def test_settings_are_hashable():
  assert Sampling(8, stop=["a"]) == Sampling(8, stop=("a",))
  assert len({Sampling(8, stop=["a"]), Sampling(8, stop=("a",))}) == 1
