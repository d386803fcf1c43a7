"""Tests of log-probs and entropies against a float64 NumPy oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.learning import likelihood
from experiments.rollouts.sampling import Sampling

_B, _T, _D, _V = 3, 11, 5, 37
_START = 4
_LENGTHS = (7, 0, 3)  # A full, an empty and a short completion.


@functools.cache
def _batch():
  """Three responses to prompts of `_START` tokens."""
  rng = np.random.default_rng(0)
  positions = np.arange(_T)[None]
  lengths = np.asarray(_LENGTHS)[:, None]
  mask = (positions >= _START) & (positions < _START + lengths)
  valid = (positions >= np.asarray([[0], [2], [1]])) & (
      positions < _START + lengths
  )
  return {
      "tokens": rng.integers(_V, size=(_B, _T)).astype(np.int32),
      "valid": valid,
      "completion_mask": mask,
  }


@functools.cache
def _params():
  rng = np.random.default_rng(1)
  return {
      "embedding": rng.normal(size=(_V, _D)).astype(np.float32),
      "head": rng.normal(size=(_D, _V)).astype(np.float32),
  }


def _hidden(params, tokens, valid):
  """A causal sum of the embeddings of the valid tokens, squashed by tanh."""
  x = params["embedding"][tokens] * valid[..., None]
  return jnp.tanh(jnp.cumsum(x, axis=1))


def _head(params, hidden):
  return hidden @ params["head"]


def _statistics(
    params,
    temperature=0.7,
    chunk_size=8,
    start=_START,
    mask=None,
    head_fn=_head,
):
  """Statistics of the tokens from `start` on, `[B, T]`; zeros before it."""
  batch = _batch()
  mask = batch["completion_mask"] if mask is None else mask
  found = likelihood.token_statistics(
      head_fn,
      params,
      _hidden(params, batch["tokens"], batch["valid"])[:, start - 1 : -1],
      batch["tokens"][:, start:],
      jnp.asarray(mask[:, start:]),
      sampling=Sampling(_T, temperature=temperature),
      chunk_size=chunk_size,
  )
  return [jnp.pad(x, ((0, 0), (start, 0))) for x in found]


def _log_softmax(logits):
  shifted = logits - logits.max(axis=-1, keepdims=True)
  return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def _oracle_statistics(params, temperature):
  """Log-probs and entropies in float64, from a loop over generated tokens."""
  params = {name: np.float64(value) for name, value in params.items()}
  batch = _batch()
  log_probs, entropy = np.zeros((2, _B, _T))
  for b, t in zip(*np.nonzero(batch["completion_mask"]), strict=True):
    seen = batch["tokens"][b, :t][batch["valid"][b, :t]]
    hidden = np.tanh(params["embedding"][seen].sum(axis=0))
    log_p = _log_softmax(hidden @ params["head"] / temperature)
    log_probs[b, t] = log_p[batch["tokens"][b, t]]
    entropy[b, t] = -np.sum(np.exp(log_p) * log_p)
  return log_probs, entropy


@pytest.mark.parametrize("temperature", [0.7, 1.3])
@pytest.mark.parametrize("chunk_size", [1, 6, 7, 1000])
@pytest.mark.parametrize("start", [1, _START])
def test_statistics(temperature, chunk_size, start):
  found = _statistics(_params(), temperature, chunk_size, start)
  expected = _oracle_statistics(_params(), temperature)
  for one, right in zip(found, expected, strict=True):
    assert one.shape == (_B, _T) and one.dtype == jnp.float32
    np.testing.assert_allclose(one, right, atol=3e-6)
  # Another temperature would give different numbers.
  assert np.max(np.abs(found[0] - _oracle_statistics(_params(), 1.0)[0])) > 0.1


@pytest.mark.parametrize("chunk_size", [6, 1000])
def test_gradient_of_log_probs(chunk_size):
  weights = np.random.default_rng(2).normal(size=(_B, _T))

  def loss(params):
    log_probs, entropy = _statistics(params, chunk_size=chunk_size)
    # The entropy must not contribute to the gradient.
    return jnp.sum(weights * log_probs) + jnp.sum(entropy)

  def oracle(params):
    return np.sum(weights * _oracle_statistics(params, 0.7)[0])

  params = _params()
  grads = jax.grad(loss)(params)
  for name, value in params.items():
    # Test the slope along the gradient and along a random direction.
    rng = np.random.default_rng(3)
    for direction in (np.float64(grads[name]), rng.normal(size=value.shape)):
      direction = direction / np.linalg.norm(direction)
      step = 1e-5
      ends = [
          oracle(params | {name: np.float64(value) + sign * step * direction})
          for sign in (1, -1)
      ]
      slope = (ends[0] - ends[1]) / (2 * step)
      found = np.sum(np.float64(grads[name]) * direction)
      np.testing.assert_allclose(found, slope, rtol=1e-4, atol=1e-4)
      assert abs(slope) > 1e-2


def test_chunks_without_completion_tokens_are_skipped():
  calls = []

  def head(params, hidden):
    jax.debug.callback(lambda: calls.append(1))
    return _head(params, hidden)

  def count(mask):
    calls.clear()
    out = _statistics(
        _params(), chunk_size=2 * _B, start=1, mask=mask, head_fn=head
    )
    jax.block_until_ready(out)
    jax.effects_barrier()
    return len(calls)

  # Chunks of two positions start at 1, 3, 5, 7, 9; tokens are at 4 to 10.
  assert count(_batch()["completion_mask"]) == 4
  short = _batch()["completion_mask"] & (np.asarray(_LENGTHS) < 7)[:, None]
  assert count(short) == 2  # Tokens are at 4 to 6.
  assert count(np.zeros((_B, _T), bool)) == 0


def _two_heads(params, hidden):
  return hidden @ params["head"] + (hidden @ params["down"]) @ params["up"]


def _features_and_heads():
  rng = np.random.default_rng(4)
  draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
  heads = {"head": draw(_D, _V), "down": draw(_D, 2), "up": draw(2, _V)}
  return draw(_B, _T, _D), heads


def _weighted(hidden, heads, head_fn=_two_heads, chunk_size=6):
  batch = _batch()
  log_probs, _ = likelihood.token_statistics(
      head_fn,
      heads,
      hidden,
      batch["tokens"],
      jnp.asarray(batch["completion_mask"]),
      sampling=Sampling(_T, temperature=0.7),
      chunk_size=chunk_size,
  )
  return jnp.sum(np.random.default_rng(5).normal(size=(_B, _T)) * log_probs)


@pytest.mark.parametrize("trained", [(), ("up",), ("up", "head")])
def test_gradients_do_not_depend_on_what_is_frozen(trained):
  hidden, heads = _features_and_heads()
  frozen = {name: w for name, w in heads.items() if name not in trained}

  @jax.jit
  @functools.partial(jax.grad, argnums=(0, 1))
  def gradients(hidden, own, frozen):
    return _weighted(hidden, own | frozen)

  own = {name: heads[name] for name in trained}
  h_bar, own_bar = gradients(hidden, own, frozen)
  h_right, right = gradients(hidden, heads, {})
  np.testing.assert_allclose(h_bar, h_right, rtol=1e-5, atol=1e-6)
  assert np.abs(h_bar).max() > 0.1 and own_bar.keys() == own.keys()
  for name in trained:
    np.testing.assert_allclose(own_bar[name], right[name], rtol=1e-4, atol=1e-5)


def test_a_frozen_head_is_read_once_and_never_copied():
  hidden, heads = _features_and_heads()
  hidden = np.resize(hidden, (_B, _T, _D))
  heads = {"head": heads["head"]}

  def compiled(argnums):
    loss = lambda hidden, heads: _weighted(hidden, heads, _head)
    program = jax.jit(jax.grad(loss, argnums)).lower(hidden, heads).compile()
    return program.as_text().splitlines()

  kernel = f"f32[{_D},{_V}]", f"f32[{_V},{_D}]"

  def made(lines, operation):
    return [
        line
        for line in lines
        if f" {operation}(" in line and line.split(" = ")[-1].startswith(kernel)
    ]

  frozen = compiled(0)
  assert not made(frozen, "dot") and not made(frozen, "copy")
  assert sum(" dot(" in line for line in frozen) == 2
  # As a control, the search finds the gradient of a trained head.
  assert made(compiled(1), "dot")


def test_what_stands_at_masked_tokens_may_be_anything():
  hidden, heads = _features_and_heads()
  bad = np.where(_batch()["completion_mask"][..., None], hidden, np.nan)
  right = jax.grad(_weighted)(hidden, heads)
  found = jax.grad(_weighted)(bad, heads)
  np.testing.assert_array_equal(found, right)


def test_no_buffer_holds_all_logits():
  def loss(params):
    return jnp.sum(_statistics(params, chunk_size=_B)[0])

  text = jax.jit(jax.grad(loss)).lower(_params()).compile().as_text()
  # The logits of one position of the batch exist, in either layout.
  assert "f32[3,37]" in text or "f32[3,1,37]" in text
  for shape in ("3,7,37", "7,3,37", "7,3,1,37", "21,37", "3,10,37", "3,11,37"):
    assert f"f32[{shape}]" not in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature must be above 0, got 0"),
        ({"temperature": float("nan")}, "temperature must be .* got nan"),
        ({"chunk_size": 0}, "chunk_size must be at least 1 token, got 0"),
        ({"mask": np.ones((_B, _T - 1), bool)}, "must agree, got .*3, 6"),
    ],
)
def test_bad_statistics_arguments(options, message):
  with pytest.raises(ValueError, match=message):
    _statistics(_params(), **options)
