"""Tests of the policy losses against float64 NumPy oracles.

The oracles loop over responses, from rewards to loss; they do not use rows.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.learning import losses, objectives, reference_kl
from experiments.learning.losses import LossSettings

_NAMES = tuple(losses.LOSSES)
_LOW, _HIGH = 0.2, 0.3
_K, _BUDGET = 10, 8
_GROUP = 2
# Responses to three prompts; the last two are equally good.
_REWARDS = (1.0, 0.0, 0.5, 0.25, 0.75, 0.75)
_LENGTHS = (5, 0, 3, 1, 4, 2)
# Where each response starts: (row, column). "packed" shares rows, with and
# without a gap between neighbours; "alone" gives each response its own row.
_LAYOUTS = {
    "packed": ((0, 0), (0, 9), (0, 5), (1, 5), (1, 1), (1, 7)),
    "alone": tuple((b, b % 3) for b in range(6)),
}


@functools.cache
def _log_probs(scale=0.3):
  """Old, new and reference log-probs of each response."""
  rng = np.random.default_rng(6)

  def draw(center, spread):
    return [x + spread * rng.normal(size=len(x)) for x in center]

  old = [-rng.uniform(0.1, 3.0, size=n) for n in _LENGTHS]
  return old, draw(old, scale), draw(old, 0.5)


def _place(responses, layout, fill=0.0):
  """Places values of each response's tokens into rows `[G, K]`."""
  at = _LAYOUTS[layout]
  rows = np.full((1 + max(row for row, _ in at), _K), fill, np.float32)
  for (row, column), values in zip(at, responses, strict=True):
    rows[row, column : column + len(values)] = values
  return rows


def _spread(values):
  """Repeats the value of each response at each of its tokens."""
  return [np.full(n, x) for n, x in zip(_LENGTHS, values, strict=True)]


def _tokens(name, layout="packed", scale=0.3, fill=0.0, reference=True):
  """The tokens of a batch and new log-probs for them, `[G, K]`."""
  loss = losses.LOSSES[name]
  old, new, of_reference = _log_probs(scale)
  number = range(6) if layout == "packed" else [7] * 6
  tokens = objectives.Tokens(
      mask=_place(_spread([1] * 6), layout) > 0,
      response=np.int32(_place(_spread(number), layout, -1)),
      old_log_probs=_place(old, layout, fill),
      advantages=_place(
          _spread(loss.advantages(np.float32(_REWARDS), _GROUP)), layout, fill
      ),
      weights=_place(
          _spread(loss.weights(np.asarray(_LENGTHS), _BUDGET)), layout, fill
      ),
      reference_log_probs=(
          _place(of_reference, layout, fill) if reference else None
      ),
  )
  return tokens, _place(new, layout, fill)


@functools.partial(jax.jit, static_argnames=("name", "beta", "estimator"))
def _run(name, log_probs, tokens, beta=0.0, estimator="k3"):
  """`(loss, metrics), gradient`."""

  def loss(log_probs):
    return losses.policy_loss(
        LossSettings(
            name,
            clip_low=_LOW,
            clip_high=_HIGH,
            reference_kl=beta,
            reference_estimator=estimator,
        ),
        log_probs,
        tokens,
    )

  return jax.value_and_grad(loss, has_aux=True)(log_probs)


def _oracle_advantages(name):
  groups = np.asarray(_REWARDS).reshape(-1, _GROUP)
  centred = groups - groups.mean(axis=1, keepdims=True)
  if name == "dr_grpo":
    return centred.ravel()
  if name == "rloo":
    # In groups of two, the mean of the others is the other one.
    return (groups - groups[:, ::-1]).ravel()
  if name == "reinforce_pp":
    return (centred / (centred.std() + 1e-4)).ravel()
  return (centred / (groups.std(axis=1, keepdims=True) + 1e-4)).ravel()


def _oracle_weights(name):
  b = len(_LENGTHS)
  return {
      "grpo": [1 / (b * max(n, 1)) for n in _LENGTHS],
      "gspo": [1 / (b * max(n, 1)) for n in _LENGTHS],
      "dr_grpo": [1 / (b * _BUDGET)] * b,
      "rloo": [1 / b] * b,
  }.get(name, [1 / sum(_LENGTHS)] * b)


def _bounded(ratio, advantage):
  """PPO's objective, and whether it is clipped."""
  free = ratio * advantage
  bounded = np.clip(ratio, 1 - _LOW, 1 + _HIGH) * advantage
  return np.minimum(free, bounded), bounded < free


def _oracle(name, new, frozen, scale=0.3, beta=0.0, estimator="k3"):
  """Loss and metrics; terms without gradient are computed from `frozen`."""
  old, _, reference = _log_probs(scale)
  advantages, weights = _oracle_advantages(name), _oracle_weights(name)
  loss, ratios, clipped, kls = 0.0, [], [], []
  for b, n in enumerate(_LENGTHS):
    if not n:
      continue
    a = advantages[b]
    log_ratio = np.clip(new[b] - old[b], -20, 20)
    ratio = np.exp(log_ratio)
    if name == "gspo":
      objective, cut = _bounded(np.exp(log_ratio.mean()), a)
      objective, cut = np.full(n, objective), np.full(n, cut)
    elif name == "rloo":
      total = np.exp(np.clip(log_ratio.sum(), -20, 20))
      objective, cut = _bounded(total, a)
      objective, cut = np.full(n, objective / n), np.full(n, cut)
    elif name == "cispo":
      kept = np.exp(np.clip(frozen[b] - old[b], -20, 20))
      weight = np.clip(kept, 1 - _LOW, 1 + _HIGH)
      objective = weight * a * (old[b] + log_ratio)
      cut = (ratio < 1 - _LOW) | (ratio > 1 + _HIGH)
    else:
      objective, cut = _bounded(ratio, a)
    d, fixed = new[b] - reference[b], frozen[b] - reference[b]
    kl = {
        # Both value and slope are d.
        "k1": fixed + fixed * (d - fixed),
        "k2": d**2 / 2,
        "k3": np.exp(-d) - 1 + d,
    }[estimator]
    loss += np.sum(weights[b] * (beta * kl - objective))
    ratios.extend(ratio)
    clipped.extend(cut)
    kls.extend(kl)
  ratios = np.asarray(ratios)
  return loss, {
      "tokens": len(ratios),
      "ratio_mean": ratios.mean(),
      "ratio_max": ratios.max(),
      "clip_fraction": np.mean(clipped),
      "kl": np.mean(ratios - 1 - np.log(ratios)),
      "reference_kl": np.mean(kls),
  }


def _oracle_gradient(name, new, **kwargs):
  """Central differences with respect to each token's log-prob."""
  grads = [np.zeros(n) for n in _LENGTHS]
  for b, n in enumerate(_LENGTHS):
    for t in range(n):
      ends = []
      for step in (1e-6, -1e-6):
        moved = [x.copy() for x in new]
        moved[b][t] += step
        ends.append(_oracle(name, moved, new, **kwargs)[0])
      grads[b][t] = (ends[0] - ends[1]) / 2e-6
  return grads


def _check_metrics(found, right, rtol=1e-4):
  assert found.keys() == right.keys()
  for name, value in right.items():
    np.testing.assert_allclose(found[name], value, rtol=rtol, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "layout"),
    [(name, "packed") for name in _NAMES]
    + [(name, "alone") for name in ("grpo", "gspo", "rloo")],
)
def test_loss_gradient_and_metrics(name, layout):
  tokens, log_probs = _tokens(name, layout)
  (loss, metrics), grads = _run(name, log_probs, tokens)
  new = _log_probs()[1]
  right, right_metrics = _oracle(name, new, new)
  np.testing.assert_allclose(loss, right, rtol=1e-5)
  _check_metrics(metrics, right_metrics)
  right = _place(_oracle_gradient(name, new), layout)
  np.testing.assert_allclose(grads, right, rtol=1e-4, atol=1e-6)
  # Some tokens are clipped, others are not. Equal rewards give no gradient.
  assert 0 < metrics["clip_fraction"] < 1
  assert np.abs(grads).max() > 1e-2
  at = [_LAYOUTS[layout][b] for b in (4, 5)]
  for (row, column), n in zip(at, _LENGTHS[4:], strict=True):
    assert not np.any(grads[row, column : column + n])


def test_each_loss_is_another_one():
  new = _log_probs()[1]
  for name in _NAMES:
    tokens, log_probs = _tokens(name)
    loss = _run(name, log_probs, tokens)[0][0]
    near = [n for n in _NAMES if abs(_oracle(n, new, new)[0] - loss) < 1e-5]
    assert near == [name]


@pytest.mark.parametrize("name", _NAMES)
def test_on_policy_gradient_is_the_policy_gradient(name):
  tokens, _ = _tokens(name)
  grads = _run(name, tokens.old_log_probs, tokens)[1]
  expected = -tokens.weights * tokens.advantages
  np.testing.assert_allclose(grads, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["grpo", "gspo", "rloo"])
def test_micro_batches_add_up(name):
  tokens, log_probs = _tokens(name, "alone")
  (loss, metrics), grads = _run(name, log_probs, tokens)
  cut = lambda i: jax.tree.map(lambda x: x[2 * i : 2 * i + 2], tokens)
  parts = [_run(name, log_probs[2 * i : 2 * i + 2], cut(i)) for i in range(3)]
  np.testing.assert_allclose(sum(p[0][0] for p in parts), loss, rtol=1e-5)
  joined = np.concatenate([p[1] for p in parts])
  np.testing.assert_allclose(joined, grads, rtol=1e-6, atol=1e-8)
  stacked = jax.tree.map(lambda *x: jnp.stack(x), *(p[0][1] for p in parts))
  _check_metrics(losses.merge_metrics(stacked), metrics, rtol=1e-5)
  # A plain mean over micro-batches would be a different number.
  assert abs(np.mean(stacked["kl"]) - metrics["kl"]) > 1e-4


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -1e30])
@pytest.mark.parametrize("name", ["dapo", "gspo", "cispo", "rloo"])
def test_nothing_outside_the_mask_counts(name, garbage):
  tokens, log_probs = _tokens(name)
  dirty, dirty_log_probs = _tokens(name, fill=garbage)
  # Padding can even have the number of an existing response.
  dirty = dirty.replace(response=np.maximum(dirty.response, 0))
  right = _run(name, log_probs, tokens)
  found = _run(name, dirty_log_probs, dirty)
  jax.tree.map(np.testing.assert_array_equal, found, right)
  assert np.isnan(dirty_log_probs).any() == np.isnan(garbage)


@pytest.mark.parametrize("name", _NAMES)
def test_no_token_at_all(name):
  tokens, log_probs = _tokens(name)
  tokens = tokens.replace(mask=np.zeros_like(tokens.mask))
  (loss, metrics), grads = _run(name, log_probs, tokens)
  assert loss == 0.0 and not np.any(grads)
  assert all(value == 0.0 for value in metrics.values())
  merged = losses.merge_metrics(jax.tree.map(lambda x: x[None], metrics))
  assert all(value == 0.0 for value in merged.values())


@pytest.mark.parametrize("gap", [100.0, -100.0])
@pytest.mark.parametrize("name", _NAMES)
def test_huge_ratios_stay_finite(name, gap):
  tokens, _ = _tokens(name)
  log_probs = tokens.old_log_probs + np.float32(gap)
  (loss, metrics), grads = _run(name, log_probs, tokens)
  moved = [x + gap for x in _log_probs()[0]]
  right, right_metrics = _oracle(name, moved, moved)
  np.testing.assert_allclose(loss, right, rtol=1e-5)
  # This one is clamped too, but not that of the oracle.
  assert np.isfinite(metrics["reference_kl"])
  right_metrics["reference_kl"] = metrics["reference_kl"]
  _check_metrics(metrics, right_metrics)
  np.testing.assert_allclose(metrics["ratio_max"], np.exp(np.sign(gap) * 20.0))
  assert np.all(np.isfinite(grads))


@pytest.mark.parametrize("name", ["dapo", "gspo"])
def test_bfloat16_log_probs(name):
  tokens, log_probs = _tokens(name)
  rounded = jnp.asarray(log_probs, jnp.bfloat16)
  (loss, _), grads = _run(name, rounded, tokens)
  (right, _), right_grads = _run(name, rounded.astype(jnp.float32), tokens)
  assert loss == right and loss.dtype == jnp.float32
  np.testing.assert_array_equal(grads, right_grads.astype(jnp.bfloat16))


@pytest.mark.parametrize("estimator", reference_kl.ESTIMATORS)
def test_reference_kl(estimator):
  kwargs = {"beta": 0.7, "estimator": estimator}
  tokens, log_probs = _tokens("grpo")
  (loss, metrics), grads = _run("grpo", log_probs, tokens, 0.7, estimator)
  new = _log_probs()[1]
  right, right_metrics = _oracle("grpo", new, new, **kwargs)
  np.testing.assert_allclose(loss, right, rtol=1e-5)
  _check_metrics(metrics, right_metrics)
  right = _place(_oracle_gradient("grpo", new, **kwargs), "packed")
  np.testing.assert_allclose(grads, right, rtol=1e-4, atol=1e-6)
  without = _run("grpo", log_probs, tokens)[1]
  assert np.abs(grads - without).max() > 1e-2


def _policy_loss(tokens, log_probs, name="grpo", **options):
  options = {"clip_low": _LOW, "clip_high": _HIGH} | options
  return losses.policy_loss(LossSettings(name, **options), log_probs, tokens)


@pytest.mark.parametrize(
    "field", [f.name for f in dataclasses.fields(objectives.Tokens)][1:]
)
def test_arrays_must_have_one_shape(field):
  tokens, log_probs = _tokens("grpo")
  tokens = tokens.replace(**{field: getattr(tokens, field)[:, :1]})
  with pytest.raises(ValueError, match=rf"tokens.{field} must .*got \(2, 1\)"):
    _policy_loss(tokens, log_probs)


def test_bad_arrays():
  tokens, log_probs = _tokens("grpo")
  with pytest.raises(ValueError, match=r"log_probs must .*got \(2, 1\)"):
    _policy_loss(tokens, log_probs[:, :1])
  bad = tokens.replace(mask=np.float32(tokens.mask))
  with pytest.raises(ValueError, match=r"mask must be bool .*got float32"):
    _policy_loss(bad, log_probs)
  bad = tokens.replace(response=np.float32(tokens.response))
  with pytest.raises(ValueError, match="response must be integers"):
    _policy_loss(bad, log_probs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "drgrpo"}, "got 'drgrpo', did you mean 'dr_grpo'"),
        ({"name": 3}, "must be one of grpo, .* got 3"),
        ({"clip_low": -0.1}, "got -0.1 and 0.3"),
        ({"clip_low": 1.1}, "got 1.1 and 0.3"),
        ({"clip_high": -0.1}, "got 0.2 and -0.1"),
        ({"clip_high": float("nan")}, "got 0.2 and nan"),
        ({"reference_kl": -1.0}, "reference_kl must be .*got -1.0"),
        ({"reference_kl": float("inf")}, "reference_kl must be .*got inf"),
        ({"reference_estimator": "k4"}, "one of k1, k2, k3, got 'k4'"),
    ],
)
def test_bad_settings(options, message):
  tokens, log_probs = _tokens("grpo")
  with pytest.raises(ValueError, match=message):
    _policy_loss(tokens, log_probs, **options)
  options = {"name": "grpo", "clip_low": _LOW, "clip_high": _HIGH} | options
  with pytest.raises(ValueError, match=message):
    LossSettings(options.pop("name"), **options)


def test_a_reference_kl_needs_a_reference():
  tokens, log_probs = _tokens("grpo", reference=False)
  with pytest.raises(ValueError, match=r"needs tokens.reference_log_probs"):
    _policy_loss(tokens, log_probs, reference_kl=0.1)
  assert "reference_kl" not in _policy_loss(tokens, log_probs)[1]


@pytest.mark.parametrize("name", _NAMES)
def test_group_size_1_needs_a_loss_without_a_group_baseline(name):
  options = {"clip_low": _LOW, "clip_high": _HIGH}
  LossSettings(name, **options)
  losses.check_group_size(name, 2)
  if name == "reinforce_pp":
    losses.check_group_size(name, 1)
    return
  with pytest.raises(ValueError, match=r"got 1: .* use the loss reinforce_pp"):
    losses.check_group_size(name, 1)
