"""Tests of sampling against forward passes without a cache."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks import rollout_speed
from experiments.configs import quickstart
from experiments.models import decoder, kv_cache, load, tiny
from experiments.rollouts import decode_steps, generate, stop_strings
from experiments.rollouts.sampling import Sampling
from tests.experiments.rollouts.sampling_test import chi_square

_VOCAB = 23
_PROMPTS = ([1, 2, 3], [4, 5, 6, 7, 8], [9])
_GREEDY = Sampling(8, temperature=0.0)
_REAL = pathlib.Path(quickstart.get_config().model)


@functools.cache
def _policy():
  config = dataclasses.replace(
      tiny.CONFIG,
      vocab_size=_VOCAB,
      d_model=16,
      head_dim=4,
      d_ff=32,
      max_length=24,
  )
  model = decoder.Decoder(config)
  tokens = jnp.zeros((1, 3), jnp.int32)
  params = model.init(jax.random.key(0), tokens)["params"]
  # Make the distributions far from uniform.
  params["embed"]["embedding"] *= 15.0
  return model, params


def _generate(prompts=_PROMPTS, length=6, key=1, sampling=None, **options):
  model, params = _policy()
  tokens, valid = generate.pad_prompts(prompts, length, 0)
  defaults = {"eos_ids": (3, 11), "pad_id": 0, "group_size": 5}
  out = generate.generate(
      model,
      params,
      tokens,
      valid,
      jax.random.key(key),
      sampling=sampling or _sampling(),
      **(defaults | options),
  )
  return jax.tree.map(np.asarray, out)


def _sampling(new=8, temperature=0.7, **options):
  return Sampling(new, temperature=temperature, **options)


def _programs():
  """How many programs have been compiled so far, by name."""
  names = ("read_prompts", "empty", "begin", "decode", "move")
  return {name: vars(decode_steps)[name]._cache_size() for name in names}


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
  out = _generate(sampling=_sampling(temperature=temperature))
  mask = np.asarray(out.completion_mask)
  expected = np.where(mask, _full_log_probs(out, temperature), 0.0)
  np.testing.assert_allclose(out.log_probs, expected, atol=2e-5)
  # The comparison is strict enough to notice another temperature.
  other = np.where(mask, _full_log_probs(out, 1.0), 0.0)
  assert np.max(np.abs(other - expected)) > 0.05


def test_layout():
  out = _generate()
  tokens, valid = generate.pad_prompts(_PROMPTS, 6, 0)
  np.testing.assert_array_equal(out.tokens[:, :6], np.repeat(tokens, 5, 0))
  np.testing.assert_array_equal(out.valid[:, :6], np.repeat(valid, 5, 0))
  assert not np.any(out.completion_mask[:, :6])
  np.testing.assert_array_equal(out.valid[:, 6:], out.completion_mask[:, 6:])
  assert out.tokens.shape == (15, 14) and out.tokens.dtype == jnp.int32
  assert out.log_probs.dtype == jnp.float32
  assert out.finished.shape == (15,)


def test_nothing_follows_the_end():
  outs = [_generate(key=key) for key in range(8)]
  out = jax.tree.map(lambda *x: np.concatenate(x), *outs)
  tokens, mask = out.tokens[:, 6:], out.completion_mask[:, 6:]
  for row, kept, finished in zip(tokens, mask, out.finished, strict=True):
    ends = np.flatnonzero(np.isin(row, (3, 11)) & kept)
    length = kept.sum()
    assert kept[:length].all()
    assert finished == bool(ends.size)
    # The end token is generated, once, as the last token.
    assert ends.tolist() == ([length - 1] if finished else [])
    assert finished or length == 8
    assert (row[length:] == 0).all()
  # Both kinds of end occur, and responses of several lengths.
  assert set(out.finished.tolist()) == {True, False}
  assert len(set(mask.sum(axis=1).tolist())) > 3
  np.testing.assert_array_equal(out.log_probs[:, 6:] < 0, mask)


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
  out = _generate(sampling=_GREEDY, eos_ids=(), group_size=1)
  tokens, valid = generate.pad_prompts(_PROMPTS, 6, 0)
  tokens = np.pad(tokens, ((0, 0), (0, 8)))
  valid = np.pad(valid, ((0, 0), (0, 8)))
  for step in range(6, 14):
    logits = _logits(tokens, valid)[:, step - 1]
    tokens[:, step], valid[:, step] = np.argmax(logits, axis=-1), True
  np.testing.assert_array_equal(out.tokens, tokens)
  # Greedy decoding is certain and does not depend on the key.
  assert not np.any(out.log_probs)
  again = _generate(sampling=_GREEDY, eos_ids=(), group_size=1, key=2)
  np.testing.assert_array_equal(out.tokens, again.tokens)


def test_the_key_decides():
  first, same, other = (_generate(key=key) for key in (1, 1, 2))
  jax.tree.map(np.testing.assert_array_equal, first, same)
  assert np.any(first.tokens != other.tokens)


def test_sharing_a_prefill_changes_nothing():
  shared = _generate()
  plain = _generate([p for p in _PROMPTS for _ in range(5)], group_size=1)
  np.testing.assert_array_equal(shared.tokens, plain.tokens)
  np.testing.assert_array_equal(shared.valid, plain.valid)
  np.testing.assert_allclose(shared.log_probs, plain.log_probs, atol=2e-5)
  # Responses of a group are independent draws.
  assert len({tuple(row) for row in shared.tokens[:5].tolist()}) > 1


@pytest.mark.slow
def test_frequencies_follow_the_softmax():
  out = _generate([[4, 5]], 2, group_size=4000, sampling=_sampling(1))
  assert out.tokens.shape == (4000, 3)
  np.testing.assert_array_equal(out.completion_mask.sum(axis=1), 1)
  counts = np.bincount(np.asarray(out.tokens)[:, -1], minlength=_VOCAB)
  prompt = np.asarray([[4, 5]])
  logits = np.asarray(_logits(prompt, np.ones_like(prompt, bool)))[0, -1]
  softmax = lambda z: np.exp(z - z.max()) / np.exp(z - z.max()).sum()
  assert abs(chi_square(counts, softmax(logits / 0.7))) < 5
  assert chi_square(counts, softmax(logits)) > 20


def test_rows_are_drawn_independently():
  rows = [_generate(key=key).tokens[:5] for key in range(4)]
  assert len({tuple(row) for row in np.concatenate(rows).tolist()}) > 12


def test_slots_change_no_response():
  """24 slots and then 12, or five slots that are refilled 19 times."""
  _generate()  # Reads all three prompts.
  before = _programs()
  options = {"group_size": 8, "eos_ids": (2, 7, 9)}
  many = _generate(**options)
  few = _generate(slots=5, **options)
  for name in ("tokens", "valid", "completion_mask", "finished"):
    np.testing.assert_array_equal(vars(few)[name], vars(many)[name])
  np.testing.assert_allclose(few.log_probs, many.log_probs, atol=2e-5)
  assert len(set(np.sum(many.completion_mask, 1).tolist())) > 3
  # Decoding compiles for 24, 12 and 5 slots, and not again for other keys.
  after = _programs()
  new = {name: after[name] - before[name] for name in after}
  assert new == {
      "read_prompts": 1,  # The prompt that the first five responses share.
      "empty": 2,
      "begin": 2,
      "decode": 3,
      "move": 1,
  }
  heated = _sampling(temperature=0.95)
  _generate(key=5, sampling=heated, **options)
  _generate(key=5, sampling=heated, slots=5, **options)
  assert _programs() == after


def test_the_memory_stated_is_that_of_the_caches():
  config = _policy()[0].config
  stated = generate.memory_bytes(
      config,
      prompts=3,
      group_size=4,
      prompt_tokens=6,
      max_new_tokens=8,
      slots=5,
      cache_dtype="int8",
  )
  slots = decode_steps.empty(config, 5, 6, 8, "int8").cache
  # Two prompts are read at a time: enough for the responses in five slots.
  pool = kv_cache.init_cache(config, 2, 6, "int8")
  caches = jax.tree.leaves((slots, pool))
  assert stated == sum(x.nbytes for x in caches)


def test_log_probs_are_of_the_truncated_distribution():
  """End tokens are also forbidden among the first tokens."""
  sampling = _sampling(top_k=9, top_p=0.9, min_new_tokens=3)
  out = _generate(sampling=sampling)
  mask = out.completion_mask[:, 6:]
  logits = np.asarray(_logits(out.tokens, out.valid), np.float64)[:, 5:-1] / 0.7
  logits[:, :3, [3, 11]] = -np.inf
  assert mask.sum(axis=1).min() in (4, 5)
  for row, step in np.argwhere(mask):
    logit = logits[row, step]
    order = np.argsort(-logit)[:9]
    probs = np.exp(logit[order] - logit[order[0]])
    probs /= probs.sum()
    n = np.searchsorted(np.cumsum(probs), 0.9) + 1
    probs = probs[:n] / probs[:n].sum()
    (rank,) = np.flatnonzero(order[:n] == out.tokens[row, 6 + step])
    np.testing.assert_allclose(
        np.exp(out.log_probs[row, 6 + step]), probs[rank], atol=2e-5
    )


def test_a_stop_string_ends_at_the_token_that_completes_it():
  # Token i decodes to its last digit: "12" is 1, 11 or 21, then 2, 12 or 22.
  pieces = [str(i % 10).encode() for i in range(_VOCAB)]
  stop = ("12", "9")
  table = stop_strings.table_of_pieces(stop, pieces, _VOCAB)
  options = {"eos_ids": (), "group_size": 8, "slots": 5}
  free = _generate(**options)
  out = _generate(
      sampling=_sampling(stop=stop, min_new_tokens=1),
      stop_table=table,
      **options,
  )
  lengths = np.sum(out.completion_mask, axis=1)
  for row, tokens in enumerate(free.tokens[:, 6:]):
    text = "".join(str(token % 10) for token in tokens)
    # The first token cannot end a response, but it can begin a stop string.
    ends = [n for n in range(2, 9) if text[:n].endswith(stop)]
    assert lengths[row] == (ends[0] if ends else 8), text
    assert out.finished[row] == bool(ends)
  assert 0 < np.sum(out.finished) < 24
  kept = out.completion_mask
  np.testing.assert_array_equal(out.tokens[kept], free.tokens[kept])


@pytest.mark.slow
def test_an_int8_cache_draws_nearly_the_same():
  exact, close = _generate(), _generate(cache_dtype="int8")
  same = np.asarray(exact.tokens == close.tokens)
  assert same.mean() > 0.9
  np.testing.assert_allclose(
      close.log_probs[:, 6], exact.log_probs[:, 6], atol=0.05
  )
  assert np.any(close.log_probs != exact.log_probs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": -1}, "slots must be .* got -1"),
        ({"cache_dtype": "int32"}, "float or int8, got 'int32'"),
        ({"sampling": _sampling(stop=("a",))}, "need stop_table="),
        (
            {"sampling": _sampling(min_new_tokens=1), "eos_ids": range(23)},
            "min_new_tokens=1 cannot be kept",
        ),
        ({"group_size": 0}, "group_size must be .* got 0"),
        ({"sampling": _sampling(19)}, "context of 24 .* may have at most 5"),
    ],
)
def test_bad_arguments(options, message):
  with pytest.raises(ValueError, match=message):
    _generate(**options)


@pytest.mark.slow
def test_the_context_may_be_filled():
  out = _generate(sampling=_sampling(18), eos_ids=(), group_size=1)
  assert out.tokens.shape == (3, 24)
  np.testing.assert_array_equal(out.completion_mask.sum(axis=1), 18)
  assert not np.any(out.finished)
  mask = np.asarray(out.completion_mask)
  expected = np.where(mask, _full_log_probs(out, 0.7), 0.0)
  np.testing.assert_allclose(out.log_probs, expected, atol=2e-5)


def test_pad_prompts():
  tokens, valid = generate.pad_prompts([[5, 6], [7, 8, 9]], 3, 1)
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
    generate.pad_prompts(prompts, 3, 0)


@pytest.mark.slow
@pytest.mark.skipif(not _REAL.exists(), reason=f"no model at {_REAL}")
def test_an_int8_cache_of_a_real_model_chooses_the_same_tokens():
  config, params, tokenizer = load.from_path(_REAL)
  tokens, valid = rollout_speed.prompts(tokenizer, 8, 64)

  def greedy(dtype):
    out = generate.generate(
        decoder.Decoder(config),
        params,
        tokens,
        valid,
        jax.random.key(0),
        sampling=Sampling(32, temperature=0.0),
        eos_ids=(),
        pad_id=0,
        cache_dtype=dtype,
    )
    return np.asarray(out.tokens)[:, 64:]

  exact, close = greedy("float32"), greedy("int8")
  # Count the tokens before the first difference.
  same = np.cumprod(exact == close, axis=1)
  print(same.mean(), same.sum(axis=1))
  assert same.mean() > 0.75
