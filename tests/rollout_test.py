"""Tests of sampling against full forward passes of the same model."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import decoder, rollout

_VOCAB = 23
_PROMPTS = ([1, 2, 3], [4, 5, 6, 7, 8], [9])


@functools.cache
def _policy():
  config = decoder.DecoderConfig(
      vocab_size=_VOCAB,
      d_model=16,
      n_layers=2,
      n_heads=4,
      n_kv_heads=2,
      head_dim=4,
      d_ff=32,
      tied_head=True,
      max_length=24,
  )
  model = decoder.Decoder(config)
  tokens = jnp.zeros((1, 3), jnp.int32)
  params = model.init(jax.random.key(0), tokens)["params"]
  # Distributions far from uniform.
  params["embed"]["embedding"] *= 15.0
  return model, params


def _generate(prompts=_PROMPTS, length=6, key=1, **options):
  model, params = _policy()
  tokens, valid = rollout.pad_prompts(prompts, length, 0)
  defaults = {
      "max_new_tokens": 8,
      "temperature": 0.7,
      "eos_ids": (3, 11),
      "pad_id": 0,
      "group_size": 4,
  }
  return rollout.generate(
      model,
      params,
      tokens,
      valid,
      jax.random.key(key),
      **(defaults | options),
  )


@jax.jit
def _logits(tokens, valid):
  """One forward pass without a cache; tokens `[B, T]`."""
  model, params = _policy()
  return model.apply({"params": params}, tokens, valid)


def _full_log_probs(out, temperature):
  """Float64 log-probs of all tokens, from one forward pass without cache."""
  logits = np.asarray(_logits(out.tokens, out.valid), np.float64)[:, :-1]
  logits = logits / temperature
  shifted = logits - logits.max(-1, keepdims=True)
  log_softmax = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
  targets = np.asarray(out.tokens)[:, 1:, None]
  chosen = np.take_along_axis(log_softmax, targets, axis=-1)[..., 0]
  return np.pad(chosen, ((0, 0), (1, 0)))


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_log_probs_are_of_the_distribution_sampled_from(temperature):
  out = _generate(temperature=temperature)
  mask = np.asarray(out.completion_mask)
  expected = np.where(mask, _full_log_probs(out, temperature), 0.0)
  np.testing.assert_allclose(out.log_probs, expected, atol=2e-5)
  # The comparison would notice another temperature.
  other = np.where(mask, _full_log_probs(out, 1.0), 0.0)
  assert np.max(np.abs(other - expected)) > 0.05


def test_layout():
  out = _generate()
  tokens, valid = rollout.pad_prompts(_PROMPTS, 6, 0)
  np.testing.assert_array_equal(out.tokens[:, :6], np.repeat(tokens, 4, 0))
  np.testing.assert_array_equal(out.valid[:, :6], np.repeat(valid, 4, 0))
  assert not np.any(out.completion_mask[:, :6])
  np.testing.assert_array_equal(out.valid[:, 6:], out.completion_mask[:, 6:])
  assert out.tokens.shape == (12, 14) and out.tokens.dtype == jnp.int32
  assert out.log_probs.dtype == jnp.float32
  assert out.finished.shape == (12,)


def test_nothing_follows_the_end():
  out = _generate(group_size=64)
  tokens, mask = (
      np.asarray(x)[:, 6:] for x in (out.tokens, out.completion_mask)
  )
  for row, kept, finished in zip(tokens, mask, out.finished, strict=True):
    ends = np.flatnonzero(np.isin(row, (3, 11)) & kept)
    length = kept.sum()
    assert kept[:length].all()
    assert finished == bool(ends.size)
    # The end token itself was generated; it is the last and the only one.
    assert ends.tolist() == ([length - 1] if finished else [])
    assert finished or length == 8
    assert (row[length:] == 0).all()
  # Both kinds of end, and responses of several lengths, occurred.
  assert set(np.asarray(out.finished).tolist()) == {True, False}
  assert len(set(mask.sum(axis=1).tolist())) > 3
  np.testing.assert_array_equal(np.asarray(out.log_probs)[:, 6:] < 0, mask)


def test_every_token_may_be_an_end():
  out = _generate(eos_ids=range(_VOCAB))
  np.testing.assert_array_equal(out.completion_mask.sum(axis=1), 1)
  assert np.all(out.finished)


def test_padding_on_the_left_changes_nothing():
  tight, loose = _generate(), _generate(length=11)
  np.testing.assert_array_equal(tight.tokens, loose.tokens[:, 5:])
  np.testing.assert_array_equal(tight.finished, loose.finished)
  np.testing.assert_allclose(tight.log_probs, loose.log_probs[:, 5:], atol=2e-5)


def test_greedy_is_the_argmax_of_full_forward_passes():
  out = _generate(temperature=0.0, eos_ids=(), group_size=1)
  tokens, valid = rollout.pad_prompts(_PROMPTS, 6, 0)
  tokens = np.pad(tokens, ((0, 0), (0, 8)))
  valid = np.pad(valid, ((0, 0), (0, 8)))
  for step in range(6, 14):
    logits = _logits(tokens, valid)[:, step - 1]
    tokens[:, step], valid[:, step] = np.argmax(logits, axis=-1), True
  np.testing.assert_array_equal(out.tokens, tokens)
  # Greedy tokens are certain, whatever the key.
  assert not np.any(out.log_probs)
  again = _generate(temperature=0.0, eos_ids=(), group_size=1, key=2)
  np.testing.assert_array_equal(out.tokens, again.tokens)


def test_the_key_decides():
  first, same, other = (_generate(key=key) for key in (1, 1, 2))
  jax.tree.map(np.testing.assert_array_equal, first, same)
  assert np.any(first.tokens != other.tokens)


def test_sharing_a_prefill_changes_nothing():
  shared = _generate()
  plain = _generate([p for p in _PROMPTS for _ in range(4)], group_size=1)
  np.testing.assert_array_equal(shared.tokens, plain.tokens)
  np.testing.assert_array_equal(shared.valid, plain.valid)
  np.testing.assert_allclose(shared.log_probs, plain.log_probs, atol=2e-5)
  # Responses of a group are independent draws.
  assert len({tuple(row) for row in shared.tokens[:4].tolist()}) > 1


def _chi_square(counts, probs):
  """Pearson's statistic in standard deviations above its mean."""
  expected = probs * counts.sum()
  used = expected > 5
  terms = np.square(counts - expected)[used] / expected[used]
  degrees = used.sum() - 1
  return (terms.sum() - degrees) / np.sqrt(2 * degrees)


def test_frequencies_follow_the_softmax():
  out = _generate([[4, 5]], 2, group_size=4000, max_new_tokens=1)
  assert out.tokens.shape == (4000, 3)
  np.testing.assert_array_equal(out.completion_mask.sum(axis=1), 1)
  counts = np.bincount(np.asarray(out.tokens)[:, -1], minlength=_VOCAB)
  prompt = np.asarray([[4, 5]])
  logits = np.asarray(_logits(prompt, np.ones_like(prompt, bool)))[0, -1]
  softmax = lambda z: np.exp(z - z.max()) / np.exp(z - z.max()).sum()
  assert abs(_chi_square(counts, softmax(logits / 0.7))) < 5
  assert _chi_square(counts, softmax(logits)) > 20


@pytest.mark.parametrize("vocab", [1, 256, 600])
def test_sampling_in_blocks(vocab):
  logits = 2.0 * jax.random.normal(jax.random.key(0), (vocab,))
  # A token that cannot be drawn, as a truncated distribution would have.
  logits = logits.at[vocab // 2].set(-jnp.inf) if vocab > 1 else logits
  rows = jnp.broadcast_to(logits, (20_000, vocab))
  tokens, log_probs = jax.jit(rollout._sample)(rows, jax.random.key(1))
  expected = jax.nn.log_softmax(logits)
  np.testing.assert_allclose(log_probs, expected[tokens], atol=1e-5)
  counts = np.bincount(np.asarray(tokens), minlength=vocab)
  assert counts.size == vocab
  if vocab > 1:
    assert counts[vocab // 2] == 0
    assert abs(_chi_square(counts, np.exp(expected))) < 5


def test_steps_and_rows_are_drawn_independently():
  flat = jnp.zeros((1000, 256))
  first, second = (
      np.asarray(rollout._sample(flat, jax.random.key(i))[0]) for i in (0, 1)
  )
  # Independent draws agree by chance once in 256.
  assert np.mean(first[1:] == first[:-1]) < 0.05
  assert np.mean(first == second) < 0.05
  out = _generate(group_size=64)
  rows = {tuple(row) for row in np.asarray(out.tokens)[:64].tolist()}
  assert len(rows) > 16


def test_prefill_computes_no_logits_of_the_prompt():
  model, params = _policy()
  tokens, valid = rollout.pad_prompts(_PROMPTS, 6, 0)
  text = rollout._generate.lower(
      model,
      params,
      tokens,
      valid,
      jax.random.key(0),
      jnp.float32(0.7),
      options=rollout._Options(
          greedy=False, max_new_tokens=8, eos_ids=(3,), pad_id=0, group_size=2
      ),
  ).as_text()
  assert "tensor<6x23xf32>" in text  # [B, V]
  assert "x6x23xf32>" not in text  # [.., P, V]


def test_another_temperature_does_not_compile_again():
  _generate()
  before = rollout._generate._cache_size()
  _generate(temperature=0.95)
  assert rollout._generate._cache_size() == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature must be .* got -0.1"),
        ({"temperature": float("nan")}, "temperature must be .* got nan"),
        ({"temperature": float("inf")}, "temperature must be .* got inf"),
        ({"max_new_tokens": 0}, "max_new_tokens must be .* got 0"),
        ({"max_new_tokens": 1.5}, "max_new_tokens must be .* got 1.5"),
        ({"group_size": 0}, "group_size must be .* got 0"),
        ({"max_new_tokens": 19}, "context of 24 .* may have at most 5"),
    ],
)
def test_bad_arguments(options, message):
  with pytest.raises(ValueError, match=message):
    _generate(**options)


def test_the_context_may_be_filled():
  out = _generate(max_new_tokens=18, eos_ids=(), group_size=1)
  assert out.tokens.shape == (3, 24)
  np.testing.assert_array_equal(out.completion_mask.sum(axis=1), 18)
  assert not np.any(out.finished)
  mask = np.asarray(out.completion_mask)
  expected = np.where(mask, _full_log_probs(out, 0.7), 0.0)
  np.testing.assert_allclose(out.log_probs, expected, atol=2e-5)


def test_pad_prompts():
  tokens, valid = rollout.pad_prompts([[5, 6], [7, 8, 9]], 3, 1)
  np.testing.assert_array_equal(tokens, [[1, 5, 6], [7, 8, 9]])
  np.testing.assert_array_equal(valid, [[False, True, True], [True] * 3])
  assert tokens.dtype == np.int32


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], [1, 2, 3, 4]], "prompt 1 has 4 tokens, must have 1 to 3"),
        ([[]], "prompt 0 has 0 tokens"),
        ([], "at least one prompt"),
    ],
)
def test_bad_prompts(prompts, message):
  with pytest.raises(ValueError, match=message):
    rollout.pad_prompts(prompts, 3, 0)
