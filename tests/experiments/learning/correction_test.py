"""Tests of truncated importance weights against a float64 loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.learning import correction

_CAP = 1.2
# Two rows; -1 marks empty slots. Response 3 was cut off by the limit.
_RESPONSE = np.asarray([[0, 0, 0, 1, 1, -1], [-1, 2, 3, 3, 3, -1]], np.int32)
_MASK = _RESPONSE >= 0
_FINISHED = _MASK & (_RESPONSE != 3)


def _log_probs(fill=0.0):
  """Log-probs of the sampler and of the trainer, `[G, K]` float64."""
  rng = np.random.default_rng(0)
  sampler = -rng.uniform(0.1, 3.0, size=_MASK.shape)
  trainer = sampler + 0.3 * rng.normal(size=_MASK.shape)
  return [np.where(_MASK, x, fill) for x in (sampler, trainer)]


def _ratios(kind):
  """π_trainer / π_sampler, from a loop over tokens."""
  sampler, trainer = _log_probs()
  ratios = np.zeros(_MASK.shape)
  for g, k in zip(*np.nonzero(_MASK), strict=True):
    same = _RESPONSE[g] == _RESPONSE[g, k]
    if kind == "token":
      same = np.arange(_MASK.shape[1]) == k
    ratios[g, k] = np.prod(np.exp(trainer - sampler)[g, same])
  return np.where(_MASK, 1.0, 0.0) if kind == "none" else ratios


def _found(kind, fill=0.0, cap=_CAP):
  sampler, trainer = (jnp.asarray(x, jnp.float32) for x in _log_probs(fill))
  response = _RESPONSE if fill == 0 else np.maximum(_RESPONSE, 0)
  return _both(sampler, trainer, response, kind, cap)


@functools.partial(jax.jit, static_argnames=("kind", "cap"))
def _both(sampler, trainer, response, kind, cap):
  arrays = (sampler, trainer, _MASK, response)
  return (
      correction.weights(*arrays, kind=kind, cap=cap),
      correction.gap_metrics(*arrays, _FINISHED, kind=kind, cap=cap),
  )


@pytest.mark.parametrize("fill", [0.0, np.nan, -np.inf])
@pytest.mark.parametrize("kind", correction.KINDS)
def test_weights_and_metrics(kind, fill):
  weights, metrics = _found(kind, fill)
  ratios = _ratios(kind)
  np.testing.assert_allclose(weights, np.minimum(ratios, _CAP), rtol=1e-5)
  assert weights.dtype == jnp.float32
  sampler, trainer = _log_probs()
  gap = sampler - trainer
  right = {
      "gap": gap[_FINISHED].mean(),
      "gap_max": np.abs(gap).max(),
      "kl": np.mean((np.exp(-gap) - 1 + gap)[_MASK]),
      "truncated": np.mean(ratios[_MASK] > _CAP),
  }
  assert metrics.keys() == right.keys()
  for name, value in right.items():
    np.testing.assert_allclose(metrics[name], value, rtol=1e-4)
  assert (0 < metrics["truncated"] < 1) == (kind != "none")
  # The mean over all tokens would be a different number.
  assert abs(gap[_MASK].mean() - metrics["gap"]) > 1e-3


@pytest.mark.parametrize("kind", correction.KINDS)
def test_agreement_weighs_1(kind):
  sampler, _ = _log_probs()
  weights = correction.weights(
      sampler, sampler, _MASK, _RESPONSE, kind=kind, cap=1.0
  )
  np.testing.assert_array_equal(weights, np.float32(_MASK))


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_infinite_cap_is_no_truncation(kind):
  weights, metrics = _found(kind, cap=float("inf"))
  np.testing.assert_allclose(weights, _ratios(kind), rtol=1e-5)
  assert metrics["truncated"] == 0


@pytest.mark.parametrize("gap", [300.0, -300.0])
@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_huge_gaps_stay_finite(kind, gap):
  sampler, _ = _log_probs()
  arrays = (sampler, sampler - gap, _MASK, _RESPONSE)
  weights = correction.weights(*arrays, kind=kind, cap=_CAP)
  expected = np.exp(-20.0) if gap > 0 else _CAP
  np.testing.assert_allclose(weights, expected * _MASK, rtol=1e-5)
  metrics = correction.gap_metrics(*arrays, _FINISHED, kind=kind, cap=_CAP)
  assert metrics["gap"] == np.sign(gap) * 20.0


def test_weights_have_no_gradient():
  sampler, trainer = (jnp.asarray(x, jnp.float32) for x in _log_probs())
  total = lambda trainer: jnp.sum(
      correction.weights(
          sampler, trainer, _MASK, _RESPONSE, kind="sequence", cap=_CAP
      )
  )
  assert not np.any(jax.grad(total)(trainer))


def test_importance_weights_undo_the_mismatch():
  """Weighted tokens of the sampler give an expectation under the trainer."""
  rng = np.random.default_rng(1)
  sampler, trainer = rng.dirichlet(np.ones(8), size=2)
  value = rng.normal(size=8)
  weights = correction.weights(
      np.log(sampler)[None],
      np.log(trainer)[None],
      np.ones((1, 8), bool),
      np.arange(8)[None],
      kind="token",
      cap=float("inf"),
  )[0]
  np.testing.assert_allclose(
      np.sum(sampler * weights * value), np.sum(trainer * value), rtol=1e-5
  )
  assert abs(np.sum((sampler - trainer) * value)) > 1e-2


def test_no_token_at_all():
  sampler, trainer = _log_probs()
  none = np.zeros_like(_MASK)
  arrays = (sampler, trainer, none, _RESPONSE)
  weights = correction.weights(*arrays, kind="sequence", cap=2.0)
  metrics = correction.gap_metrics(*arrays, none, kind="sequence", cap=2.0)
  assert not np.any(weights) and not any(map(float, metrics.values()))


@pytest.mark.parametrize(
    ("kind", "cap", "message"),
    [
        ("tokens", 2.0, "one of none, token, sequence, got 'tokens'"),
        ("token", 0.5, "at least 1, got 0.5"),
        ("token", float("nan"), "at least 1, got nan"),
    ],
)
def test_bad_settings(kind, cap, message):
  with pytest.raises(ValueError, match=message):
    _found(kind, cap=cap)
