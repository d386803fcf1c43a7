"""Sampling responses: prefill, then a decode loop with a KV cache.

Decoding does not wait for the longest response. A number of slots decode
together, in blocks of steps; between blocks the host gives the slots of ended
responses to the next ones, and when none are left it moves the rest to half as
many slots.

Axis letters: N prompts, B responses, P padded prompt tokens, C new tokens,
T = P + C, S slots, K steps of a block, V vocabulary.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
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
    sampling: Sampling,
    eos_ids: Sequence[int],
    pad_id: int,
    group_size: int = 1,
    slots: int = 0,
    cache_dtype: DTypeLike | None = None,
    stop_table: StopTable | None = None,
) -> Rollout:
  """Samples `group_size` responses to each prompt.

  A prompt is read once for all its responses. A response depends on the
  weights, its prompt, the key and its own number, and on nothing else: not on
  `slots` and not on the responses beside it (but for the rounding of sums).

  Args:
    model: the decoder; its parameters are `params`.
    params: parameter tree.
    prompt_tokens: `[N, P]` int32, padded on the left (see `pad_prompts`).
    prompt_valid: `[N, P]` bool, False at padding.
    key: a `jax.random` key. The same key gives the same rollout.
    sampling: limits, temperature, truncation and stop strings.
    eos_ids: token ids that end a response; may be empty.
    pad_id: token after the end of a response.
    group_size: responses per prompt.
    slots: responses decoded at once, S; 0 means all. `memory_bytes` states
      what their cache takes.
    cache_dtype: of keys and values, a float or `'int8'`; None means the
      model's compute dtype.
    stop_table: of `stop_strings.make_stop_table(tokenizer, sampling.stop)`;
      needed where there are stop strings.

  Returns:
    A `Rollout` of B = N * group_size responses, whole in every process; those
    of a prompt are adjacent.

  Raises:
    ValueError: if the prompts leave no room for `max_new_tokens` in the
      model's context, `group_size` or `slots` is out of range, stop strings
      have no table, or the cache's dtype is neither a float nor int8.
  """
  tokens = np.asarray(prompt_tokens, np.int32)
  valid = np.asarray(prompt_valid, bool)
  _check(model.config, tokens, sampling, eos_ids, group_size, slots, stop_table)
  responses = tokens.shape[0] * group_size
  stop_table = stop_table if sampling.stop else None
  # Temperature is traced: another does not compile again.
  compiled = dataclasses.replace(
      sampling, temperature=float(not sampling.greedy), stop=()
  )
  sampler = decode_steps.Sampler(
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
  _run(model, options, sampler, schedule, tokens, valid, group_size, dtype.name)
  return schedule.rollout(tokens, valid, group_size, int(pad_id))


def _check(config, tokens, sampling, eos_ids, group_size, slots, stop_table):
  """Raises the errors of `generate`."""
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
        f"{new} exceed the context of {config.max_length} tokens: prompts may "
        f"have at most {config.max_length - new}"
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
  """Bytes of keys and values that `generate` keeps, on all devices together.

  The slots' cache of P + C - 1 tokens (the last one is never read), and that
  of the prompts that its responses begin with. When the responses left move to
  half the slots, both caches exist for a moment, but the prompts' no more.

  Args:
    config: of the model.
    prompts: number of prompts, N.
    group_size: responses per prompt.
    prompt_tokens: padded length of a prompt, P.
    max_new_tokens: limit of a response, C.
    slots: responses decoded at once; 0 means all.
    cache_dtype: as for `generate`.
  """
  slots = min(slots or prompts * group_size, prompts * group_size)
  of = functools.partial(kv_cache.cache_bytes, config, dtype=cache_dtype)
  whole = of(slots, prompt_tokens + decode_steps.circle(max_new_tokens))
  halves = slots // 2 if slots // 2 >= decode_steps.least_slots(slots) else 0
  moved = of(halves, prompt_tokens + decode_steps.circle(max_new_tokens))
  return whole + max(of(_chunk(slots, group_size), prompt_tokens), moved)


def _chunk(slots, group_size):
  """Prompts that are read at once: those of as many responses as slots."""
  return -(-slots // group_size)


class _Schedule:
  """What the host knows: which response is in which slot, and what it is.

  Attributes:
    waiting: the next response to begin; `total` when all have.
    rows: `[S]` int32, the response in each slot.
    alive: `[S]` bool, whether it goes on.
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
    """Gives free slots to responses before `limit`; which slots `[S]` bool."""
    free = np.flatnonzero(~self.alive)[: limit - self.waiting]
    self.rows[free] = self.waiting + np.arange(len(free))
    self.waiting += len(free)
    fresh = np.zeros(len(self.rows), bool)
    fresh[free] = True
    return fresh

  def record(self, found: dict[str, np.ndarray]) -> None:
    """Takes in what the programs of `decoding` report."""
    mask = found["mask"]
    # A row's tokens are the first of a block: none follows its end.
    step, slot = np.nonzero(mask)
    row = self.rows[slot]
    place = self._lengths[row] + step
    self._tokens[row, place] = found["tokens"][step, slot]
    self._log_probs[row, place] = found["log_probs"][step, slot]
    acted = mask.any(axis=0)
    self._lengths[self.rows[acted]] += mask.sum(axis=0)[acted]
    self._finished[self.rows[acted]] = found["finished"][acted]
    self.alive = found["alive"].copy()

  def halve(self) -> np.ndarray | None:
    """The slots `[S / 2]` to move to where half are enough, or None."""
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
    """How many may be alive for a block to end before its last step."""
    slots = len(self.rows)
    if self.waiting < self.total:
      # To begin in each free slot at once would cost a pause each.
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
    """The record, behind its prompts `[N, P]`."""
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


def _run(model, options, sampler, schedule, tokens, valid, group_size, dtype):
  """Decodes all responses to prompts `[N, P]` into the schedule."""
  n_slots, max_new_tokens = len(schedule.rows), options.sampling.max_new_tokens
  slots = decode_steps.empty(
      model.config, n_slots, tokens.shape[1], max_new_tokens, dtype
  )
  size = decode_steps.circle(max_new_tokens)
  chunk = _chunk(n_slots, group_size)
  index, first, last, pool = 0, 0, 0, None  # Prompts `first ... last - 1`.
  while True:
    while schedule.waiting < schedule.total and not schedule.alive.all():
      if schedule.waiting >= last * group_size:
        pool = None  # Before there is another.
        # All chunks are of one shape: the last prompt fills up.
        read = np.minimum(last + np.arange(chunk), len(tokens) - 1)
        pool = decode_steps.read_prompts(
            model, sampler.params, tokens[read], valid[read], dtype
        )
        first, last = last, min(last + chunk, len(tokens))
      fresh = schedule.assign(last * group_size)
      prompts = np.where(fresh, schedule.rows // group_size, first)
      slots, record = decode_steps.begin(
          model,
          options,
          sampler,
          slots,
          pool,
          fresh,
          (prompts - first).astype(np.int32),
          schedule.rows,
          valid[prompts],
      )
      schedule.record(jax.device_get(record))
    if not schedule.alive.any():
      return
    if schedule.waiting == schedule.total:
      pool = None
      while (kept := schedule.halve()) is not None:
        slots = decode_steps.move(slots, kept)
    slots, record = decode_steps.decode(
        model,
        options,
        sampler,
        slots,
        np.int32(index),
        np.int32(schedule.floor()),
    )
    record = jax.device_get(record)
    index = (index + int(record["steps"])) % size
    schedule.record(record)
