"""Sampling responses: one prefill, then a decode loop with a KV cache.

Axis letters: N prompts, B responses, P padded prompt tokens, C new tokens,
T = P + C, V vocabulary.
"""

from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from experiments import decoder

# Tokens of the vocabulary in one block of `_sample`: about √V.
_BLOCK = 256


@struct.dataclass
class Rollout:
  """Prompts and responses, aligned to tokens.

  Attributes:
    tokens: `[B, T]` int32; prompts end at P, responses begin there.
    valid: `[B, T]` bool, False at padding before the prompt and after the
      response.
    completion_mask: `[B, T]` bool, True at generated tokens, the end-of-turn
      token included.
    log_probs: `[B, T]` float32, of generated tokens under the distribution
      that they were sampled from; 0 elsewhere, and 0 (certain) where decoding
      was greedy.
    finished: `[B]` bool, whether the response ended by an end-of-turn token
      and not by the limit.
  """

  tokens: jax.Array
  valid: jax.Array
  completion_mask: jax.Array
  log_probs: jax.Array
  finished: jax.Array


def pad_prompts(
    prompts: Sequence[Sequence[int]], length: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
  """Pads prompts on the left.

  Args:
    prompts: N lists of token ids.
    length: padded length in tokens, P.
    pad_id: what to pad with.

  Returns:
    Tokens `[N, P]` int32, and which of them are not padding, `[N, P]` bool.

  Raises:
    ValueError: if there is no prompt, or one is empty or longer than `length`.
  """
  if not prompts:
    raise ValueError("prompts must hold at least one prompt, got none")
  tokens = np.full((len(prompts), length), pad_id, np.int32)
  valid = np.zeros((len(prompts), length), bool)
  for row, prompt in enumerate(prompts):
    if not 0 < len(prompt) <= length:
      raise ValueError(
          f"prompt {row} has {len(prompt)} tokens, must have 1 to {length}: "
          "shorten it or raise the prompt length"
      )
    tokens[row, length - len(prompt) :] = prompt
    valid[row, length - len(prompt) :] = True
  return tokens, valid


def generate(
    model: decoder.Decoder,
    params: Any,
    prompt_tokens: jax.Array,
    prompt_valid: jax.Array,
    key: jax.Array,
    *,
    max_new_tokens: int,
    temperature: float,
    eos_ids: Sequence[int],
    pad_id: int,
    group_size: int = 1,
) -> Rollout:
  """Samples `group_size` responses to each prompt.

  Prefill runs once per prompt, whatever the group size. The loop ends when all
  responses have.

  Args:
    model: the decoder; its parameters are `params`.
    params: parameter tree.
    prompt_tokens: `[N, P]` int32, padded on the left (see `pad_prompts`).
    prompt_valid: `[N, P]` bool, False at padding.
    key: a `jax.random` key. The same key gives the same rollout.
    max_new_tokens: limit of a response in tokens, C; at least 1.
    temperature: divides the logits; 0 is greedy decoding.
    eos_ids: token ids that end a response; may be empty.
    pad_id: token after the end of a response.
    group_size: responses per prompt.

  Returns:
    A `Rollout` of B = N · group_size responses; those of a prompt are
    adjacent.

  Raises:
    ValueError: if the prompts leave no room for `max_new_tokens` in the
      model's context, or temperature, `max_new_tokens` or `group_size` is out
      of range.
  """
  if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
    raise ValueError(
        f"max_new_tokens must be an int of at least 1, got {max_new_tokens!r}"
    )
  if group_size < 1:
    raise ValueError(f"group_size must be at least 1, got {group_size}")
  if not 0 <= temperature < float("inf"):
    raise ValueError(
        f"temperature must be finite and at least 0, got {temperature}"
    )
  length, context = prompt_tokens.shape[1], model.config.max_length
  if length + max_new_tokens > context:
    raise ValueError(
        f"prompts padded to {length} tokens and max_new_tokens="
        f"{max_new_tokens} exceed the context of {context} tokens: prompts may "
        f"have at most {context - max_new_tokens}"
    )
  return _generate(
      model,
      params,
      jnp.asarray(prompt_tokens, jnp.int32),
      jnp.asarray(prompt_valid, bool),
      key,
      # Traced, so that another temperature does not compile again.
      jnp.float32(temperature),
      options=_Options(
          greedy=temperature == 0,
          max_new_tokens=max_new_tokens,
          eos_ids=tuple(int(i) for i in eos_ids),
          pad_id=int(pad_id),
          group_size=group_size,
      ),
  )


class _Options(NamedTuple):
  """What is compiled into `_generate`; see `generate`."""

  greedy: bool
  max_new_tokens: int
  eos_ids: tuple[int, ...]
  pad_id: int
  group_size: int


@functools.partial(jax.jit, static_argnames=("model", "options"))
def _generate(
    model, params, prompt_tokens, prompt_valid, key, temperature, *, options
):
  """The compiled part of `generate`."""
  variables = {"params": params}
  repeat = functools.partial(jnp.repeat, repeats=options.group_size)
  hidden, cache, valid = _prefill(
      model, variables, prompt_tokens, prompt_valid, options.max_new_tokens
  )
  hidden, valid = repeat(hidden, axis=0), repeat(valid, axis=0)
  cache = jax.tree.map(functools.partial(repeat, axis=1), cache)
  tokens, prompt_valid = (
      repeat(x, axis=0) for x in (prompt_tokens, prompt_valid)
  )
  length = prompt_tokens.shape[1]
  prompt_lengths = jnp.sum(prompt_valid, axis=1, dtype=jnp.int32)

  def record(out, hidden, step):
    logits = model.apply(variables, hidden, method="head")
    step_key = jax.random.fold_in(key, step)
    return _record(out, logits, temperature, step_key, step, options)

  def body(state):
    step, out, cache = state
    last = lax.dynamic_slice_in_dim(out["tokens"], step - 1, 1, axis=1)
    positions = (prompt_lengths + step - 1)[:, None]
    hidden, cache = model.apply(
        variables,
        last,
        valid,
        positions,
        cache,
        length + step - 1,
        method="decode",
    )
    return step + 1, record(out, hidden[:, 0], step), cache

  def proceed(state):
    step, out, _ = state
    return (step < options.max_new_tokens) & ~jnp.all(out["finished"])

  shape = (tokens.shape[0], options.max_new_tokens)
  out = {
      "tokens": jnp.full(shape, options.pad_id, jnp.int32),
      "mask": jnp.zeros(shape, bool),
      "log_probs": jnp.zeros(shape, jnp.float32),
      "finished": jnp.zeros(shape[0], bool),
  }
  out = record(out, hidden, 0)
  _, out, _ = lax.while_loop(proceed, body, (1, out, cache))
  before = lambda x: jnp.zeros((shape[0], length), x.dtype)
  join = lambda left, right: jnp.concatenate([left, right], axis=1)
  return Rollout(
      tokens=join(tokens, out["tokens"]),
      valid=join(prompt_valid, out["mask"]),
      completion_mask=join(before(out["mask"]), out["mask"]),
      log_probs=join(before(out["log_probs"]), out["log_probs"]),
      finished=out["finished"],
  )


def _record(out, logits, temperature, key, step, options):
  """Chooses token `step` of every row that has not ended."""
  if options.greedy:
    chosen = jnp.argmax(logits, axis=-1)
    log_probs = jnp.zeros(chosen.shape, jnp.float32)
  else:
    chosen, log_probs = _sample(logits / temperature, key)
  alive = ~out["finished"]
  columns = {
      "tokens": jnp.where(alive, chosen, options.pad_id),
      "mask": alive,
      "log_probs": jnp.where(alive, log_probs, 0.0),
  }
  ended = jnp.isin(chosen, jnp.asarray(options.eos_ids, jnp.int32))
  new = {
      name: lax.dynamic_update_slice(out[name], column[:, None], (0, step))
      for name, column in columns.items()
  }
  return new | {"finished": out["finished"] | ended}


def _prefill(model, variables, tokens, valid, max_new_tokens):
  """Reads prompts into a cache.

  Returns the last token's features `[N, D]`, the cache, and which of its slots
  `[N, M]` may be attended. The last new token is never read: M = P + C - 1.
  """
  batch, length = tokens.shape
  slots = length + max_new_tokens - 1
  # Slots of tokens yet to come count as valid: decode attends none after the
  # token's own.
  valid = jnp.pad(valid, ((0, 0), (0, slots - length)), constant_values=True)
  positions = jnp.maximum(jnp.cumsum(valid[:, :length], axis=1) - 1, 0)
  cache = decoder.init_cache(model.config, batch, slots)
  hidden, cache = model.apply(
      variables, tokens, valid, positions, cache, 0, method="decode"
  )
  return hidden[:, -1], cache, valid


def _sample(scaled, key):
  """Draws from softmax(scaled `[B, V]`); returns tokens and log-probs `[B]`.

  In two steps, first a block of the vocabulary and then a token of it: noise
  and argmax over the whole vocabulary would take longer than the head.
  """
  block_key, token_key = jax.random.split(key)
  pad = -scaled.shape[1] % _BLOCK
  scaled = jnp.pad(
      scaled.astype(jnp.float32), ((0, 0), (0, pad)), constant_values=-jnp.inf
  )
  blocks = scaled.reshape(scaled.shape[0], -1, _BLOCK)
  masses = jax.nn.logsumexp(blocks, axis=-1)
  block = jax.random.categorical(block_key, masses)
  inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
  offset = jax.random.categorical(token_key, inside)
  picked = jnp.take_along_axis(inside, offset[:, None], axis=1)[:, 0]
  tokens = (block * _BLOCK + offset).astype(jnp.int32)
  return tokens, picked - jax.nn.logsumexp(masses, axis=-1)
