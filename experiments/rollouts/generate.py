"""Samples responses with a KV cache.

Decoding does not wait for the longest response. A fixed number of slots decode
together, in blocks of steps. Between blocks, the host starts waiting responses
in the slots of those that have ended; when none are waiting, it moves the rest
to half as many slots.

Axis letters: N prompts, B responses, P padded prompt tokens, C new tokens,
T = P + C, S slots, K steps of a block, V vocabulary.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
import numpy as np

from experiments.models import decoder, kv_cache
from experiments.models.config import DecoderConfig
from experiments.rollouts import decode_steps
from experiments.rollouts.rollout import Rollout
from experiments.rollouts.sampling import Sampling
from experiments.rollouts.stop_strings import StopTable


def pad_prompts(
    prompts: Sequence[Sequence[int]], length: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
  """Pads prompts on the left.

  Args:
    prompts: N lists of token ids.
    length: Padded length in tokens, P.
    pad_id: The padding token.

  Returns:
    Tokens `[N, P]` int32, and a mask `[N, P]` bool, False at padding.

  Raises:
    ValueError: If there is no prompt, or one is empty or longer than `length`.
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
    params: chex.ArrayTree,
    prompt_tokens: ArrayLike,
    prompt_valid: ArrayLike,
    key: jax.Array,
    *,
    sampling: Sampling,
    eos_ids: Sequence[int],
    pad_id: int,
    group_size: int = 1,
    slots: int = 0,
    cache_dtype: DTypeLike | None = None,
    stop_table: StopTable | None = None,
) -> Rollout:
  """Samples `group_size` responses to each prompt.

  A prompt is read once for all its responses. A response depends only on the
  weights, its prompt, the key and its index in the rollout, not on `slots` or
  on the other responses (except for the rounding of sums).

  Args:
    model: The decoder.
    params: The parameters of `model`.
    prompt_tokens: `[N, P]` int32, padded on the left (see `pad_prompts`).
    prompt_valid: `[N, P]` bool, False at padding.
    key: A `jax.random` key. The same key gives the same rollout.
    sampling: Limits, temperature, truncation and stop strings.
    eos_ids: Token ids that end a response; may be empty.
    pad_id: Token that fills a row after the end of its response.
    group_size: Number of responses to each prompt.
    slots: Most responses decoded at once, S; 0 means all. `memory_bytes` tells
      how much memory their cache takes.
    cache_dtype: Dtype of keys and values, a float dtype or `'int8'`; None means
      the model's compute dtype.
    stop_table: The result of `stop_strings.make_stop_table` for
      `sampling.stop`; required if there are stop strings.

  Returns:
    A `Rollout` of B = N * group_size responses, replicated in every process.
    Responses to the same prompt are adjacent.

  Raises:
    ValueError: If the prompts leave no room for `max_new_tokens` in the model's
      context, `group_size` or `slots` is out of range, stop strings have no
      table, or `cache_dtype` is neither a float dtype nor int8.
  """
  tokens = np.asarray(prompt_tokens, np.int32)
  valid = np.asarray(prompt_valid, bool)
  _check(model.config, tokens, sampling, eos_ids, group_size, slots, stop_table)
  responses = tokens.shape[0] * group_size
  stop_table = stop_table if sampling.stop else None
  # The temperature is traced, so that changing it does not compile again.
  compiled = dataclasses.replace(
      sampling, temperature=float(not sampling.greedy), stop=()
  )
  inputs = decode_steps.DecodeInputs(
      params=params,
      key=key,
      temperature=jnp.float32(sampling.temperature),
      stops=jnp.asarray(stop_table.table) if stop_table else None,
  )
  options = decode_steps.Options(
      compiled, tuple(sorted({int(i) for i in eos_ids}))
  )
  slots = min(slots or responses, responses)
  dtype = jnp.dtype(model.config.dtype if cache_dtype is None else cache_dtype)
  schedule = _Schedule(responses, slots, sampling.max_new_tokens)
  _run(model, options, inputs, schedule, tokens, valid, group_size, dtype.name)
  return schedule.rollout(tokens, valid, group_size, int(pad_id))


def _check(
    config: DecoderConfig,
    tokens: np.ndarray,
    sampling: Sampling,
    eos_ids: Sequence[int],
    group_size: int,
    slots: int,
    stop_table: StopTable | None,
) -> None:
  """Checks the arguments of `generate`."""
  for name, value, least in (
      ("group_size", group_size, 1),
      ("slots", slots, 0),
  ):
    if not isinstance(value, int) or value < least:
      raise ValueError(
          f"{name} must be an int of at least {least}, got {value!r}"
      )
  length, new = tokens.shape[1], sampling.max_new_tokens
  if length + new > config.max_length:
    raise ValueError(
        f"prompts padded to {length} tokens and max_new_tokens="
        f"{new} exceed the context of {config.max_length} tokens: prompts may"
        f" have at most {config.max_length - new}"
    )
  if sampling.min_new_tokens and set(range(config.vocab_size)) <= set(eos_ids):
    raise ValueError(
        f"min_new_tokens={sampling.min_new_tokens} cannot be kept: eos_ids"
        " holds the whole vocabulary"
    )
  if sampling.stop and (stop_table is None or stop_table.stop != sampling.stop):
    raise ValueError(
        f"stop strings {sampling.stop!r} need stop_table="
        "make_stop_table(tokenizer, sampling.stop, vocab_size)"
    )


def memory_bytes(
    config: DecoderConfig,
    *,
    prompts: int,
    group_size: int,
    prompt_tokens: int,
    max_new_tokens: int,
    slots: int = 0,
    cache_dtype: DTypeLike | None = None,
) -> int:
  """Returns the peak size of the KV caches of `generate`, in bytes.

  That is the cache of the slots, with P + C - 1 tokens each (the last token is
  never read back), plus the cache of the prompts that fill them. When the
  remaining responses move to half as many slots, the old and the new cache
  exist together, but the prompts' cache is gone by then.

  Args:
    config: Configuration of the model.
    prompts: Number of prompts, N.
    group_size: Number of responses to each prompt.
    prompt_tokens: Padded length of a prompt, P.
    max_new_tokens: Longest response, C.
    slots: Most responses decoded at once; 0 means all.
    cache_dtype: See `generate`.

  Returns:
    Bytes, summed over all devices.
  """
  slots = min(slots or prompts * group_size, prompts * group_size)
  of = functools.partial(kv_cache.cache_bytes, config, dtype=cache_dtype)
  whole = of(slots, prompt_tokens + decode_steps.ring_size(max_new_tokens))
  halves = slots // 2 if slots // 2 >= decode_steps.least_slots(slots) else 0
  moved = of(halves, prompt_tokens + decode_steps.ring_size(max_new_tokens))
  return whole + max(of(_chunk(slots, group_size), prompt_tokens), moved)


def _chunk(slots: int, group_size: int) -> int:
  """Number of prompts read at once: enough to fill all slots."""
  return -(-slots // group_size)


class _Schedule:
  """The host's record of a rollout: the slots and all responses so far.

  Attributes:
    total: Number of responses, B.
    waiting: Index of the next response to start; `total` when all have started.
    rows: `[S]` int32, index of the response in each slot.
    alive: `[S]` bool, whether that response continues.
  """

  def __init__(self, total: int, slots: int, max_new_tokens: int):
    self.total, self.waiting = total, 0
    self._least = decode_steps.least_slots(slots)
    self.rows = np.zeros(slots, np.int32)
    self.alive = np.zeros(slots, bool)
    shape = (total, max_new_tokens)
    self._tokens = np.zeros(shape, np.int32)
    self._log_probs = np.zeros(shape, np.float32)
    self._lengths = np.zeros(total, np.int64)
    self._finished = np.zeros(total, bool)

  def assign(self, limit: int) -> np.ndarray:
    """Assigns waiting responses below `limit` to free slots.

    Returns:
      `[S]` bool, the slots in which a response starts.
    """
    free = np.flatnonzero(~self.alive)[: limit - self.waiting]
    self.rows[free] = self.waiting + np.arange(len(free))
    self.waiting += len(free)
    fresh = np.zeros(len(self.rows), bool)
    fresh[free] = True
    return fresh

  def add(self, record: Mapping[str, np.ndarray]) -> None:
    """Adds the record of a block, as `decode_steps.decode` returns it."""
    mask = record["mask"]
    # A slot's tokens come first in the block: nothing follows its end.
    step, slot = np.nonzero(mask)
    row = self.rows[slot]
    place = self._lengths[row] + step
    self._tokens[row, place] = record["tokens"][step, slot]
    self._log_probs[row, place] = record["log_probs"][step, slot]
    acted = mask.any(axis=0)
    self._lengths[self.rows[acted]] += mask.sum(axis=0)[acted]
    self._finished[self.rows[acted]] = record["finished"][acted]
    self.alive = record["alive"].copy()

  def halve(self) -> np.ndarray | None:
    """Keeps half of the slots if that is enough.

    Returns:
      `[S / 2]` int32, indices of the slots kept; None if all are needed.
    """
    half = len(self.rows) // 2
    if (
        self.waiting < self.total
        or half < self._least
        or self.alive.sum() > half
    ):
      return None
    kept = np.argsort(~self.alive, kind="stable")[:half].astype(np.int32)
    self.rows, self.alive = self.rows[kept], self.alive[kept]
    return kept

  def floor(self) -> int:
    """A block ends early once at most this many slots are alive."""
    slots = len(self.rows)
    if self.waiting < self.total:
      # Refilling every free slot at once would interrupt decoding too often.
      return slots - max(slots // 8, 1)
    half = slots // 2
    return half if half >= self._least and self.alive.sum() > half else 0

  def rollout(
      self,
      tokens: np.ndarray,
      valid: np.ndarray,
      group_size: int,
      pad_id: int,
  ) -> Rollout:
    """Returns all responses, each after its prompt from `tokens [N, P]`."""
    mask = np.arange(self._tokens.shape[1]) < self._lengths[:, None]
    repeat = lambda x: np.repeat(x, group_size, axis=0)
    join = lambda left, right: jnp.asarray(np.concatenate([left, right], 1))
    before = lambda dtype: np.zeros((self.total, tokens.shape[1]), dtype)
    return Rollout(
        tokens=join(repeat(tokens), np.where(mask, self._tokens, pad_id)),
        valid=join(repeat(valid), mask),
        completion_mask=join(before(bool), mask),
        log_probs=join(before(np.float32), self._log_probs),
        finished=jnp.asarray(self._finished),
    )


def _run(
    model: decoder.Decoder,
    options: decode_steps.Options,
    inputs: decode_steps.DecodeInputs,
    schedule: _Schedule,
    tokens: np.ndarray,
    valid: np.ndarray,
    group_size: int,
    dtype: str,
) -> None:
  """Decodes all responses to prompts `[N, P]` into the schedule."""
  n_slots, max_new_tokens = len(schedule.rows), options.sampling.max_new_tokens
  slots = decode_steps.empty(
      model.config, n_slots, tokens.shape[1], max_new_tokens, dtype
  )
  size = decode_steps.ring_size(max_new_tokens)
  chunk = _chunk(n_slots, group_size)
  # The pool holds prompts `first ... last - 1`.
  index, first, last, pool = 0, 0, 0, None
  while True:
    while schedule.waiting < schedule.total and not schedule.alive.all():
      if schedule.waiting >= last * group_size:
        pool = None  # Free it before the next one is made.
        # Repeat the last prompt so that all chunks have the same shape.
        read = np.minimum(last + np.arange(chunk), len(tokens) - 1)
        pool = decode_steps.read_prompts(
            model, inputs.params, tokens[read], valid[read], dtype
        )
        first, last = last, min(last + chunk, len(tokens))
      fresh = schedule.assign(last * group_size)
      prompts = np.where(fresh, schedule.rows // group_size, first)
      slots, record = decode_steps.begin(
          model,
          options,
          inputs,
          slots,
          pool,
          fresh,
          (prompts - first).astype(np.int32),
          schedule.rows,
          valid[prompts],
      )
      schedule.add(jax.device_get(record))
    if not schedule.alive.any():
      return
    if schedule.waiting == schedule.total:
      pool = None
      while (kept := schedule.halve()) is not None:
        slots = decode_steps.move(slots, kept)
    slots, record = decode_steps.decode(
        model,
        options,
        inputs,
        slots,
        np.int32(index),
        np.int32(schedule.floor()),
    )
    record = jax.device_get(record)
    index = (index + int(record["steps"])) % size
    schedule.add(record)
