"""The compiled programs of decoding: read prompts, begin, decode, move.

`generate` runs them, and decides on the host which response is in which slot.

Axis letters: N prompts, B responses, P padded prompt tokens, C new tokens,
R = C - 1 tokens of a response that are read back, S slots, K steps of a block,
D features, V vocabulary.
"""

import dataclasses
import functools
from typing import NamedTuple

import chex
from flax import struct
import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import DTypeLike

from experiments.models import kv_cache
from experiments.models.config import DecoderConfig
from experiments.models.decoder import Decoder
from experiments.models.kv_cache import Cache
from experiments.parallel.sharding import constrain
from experiments.rollouts import sampling as sampling_lib
from experiments.rollouts.sampling import Sampling

# Steps in a block, after which the host checks which responses have ended.
STEPS = 64
# Slots are halved at most three times and not below eight: beyond that,
# compiling another program costs more than it saves.
HALVINGS, LEAST = 3, 8

# What a program reports to the host; see `decode`.
Record = dict[str, jax.Array]


class Options(NamedTuple):
  """Static options, compiled into the programs.

  Attributes:
    sampling: Limits and truncation. Of the temperature, only whether it is 0
      matters; `DecodeInputs` holds the value.
    eos_ids: Tokens that end a response.
  """

  sampling: Sampling
  eos_ids: tuple[int, ...]


class DecodeInputs(NamedTuple):
  """Inputs that stay the same for a whole rollout.

  Attributes:
    params: Parameters of the model.
    key: The `jax.random` key of the rollout.
    temperature: float32 scalar.
    stops: `[states, V]` int16, the table of a `StopTable`, or None.
  """

  params: chex.ArrayTree
  key: jax.Array
  temperature: jax.Array
  stops: jax.Array | None


@struct.dataclass
class Slots:
  """The responses being decoded.

  In every step, all slots write their keys and values to the same index of the
  cache, in a ring buffer of R tokens after the prompt. The order of a
  response's tokens in the cache does not matter, because keys are already
  rotated by their positions. A response can therefore begin at any step, and a
  write is a single slice.

  Attributes:
    cache: Keys and values of P + R tokens.
    prompt_valid: `[S, P]` bool, False at padding.
    rows: `[S]` int32, index of the response.
    steps: `[S]` int32, number of tokens it has.
    tokens: `[S]` int32, its last token.
    states: `[S]` int32, state of the stop table, 0 without stop strings.
    alive: `[S]` bool, whether it continues.
    finished: `[S]` bool, whether it ended before the length limit.
  """

  cache: Cache
  prompt_valid: jax.Array
  rows: jax.Array
  steps: jax.Array
  tokens: jax.Array
  states: jax.Array
  alive: jax.Array
  finished: jax.Array


@struct.dataclass
class Pool:
  """Prompts that have been read.

  Attributes:
    cache: Keys and values of N prompts.
    hidden: `[N, D]`, features at the last prompt token.
  """

  cache: Cache
  hidden: jax.Array


def least_slots(slots: int) -> int:
  """Returns the smallest number of slots that `slots` is halved to."""
  return max(LEAST, slots >> HALVINGS)


def ring_size(max_new_tokens: int) -> int:
  """Returns R, how many tokens are read back: all but the last."""
  return max(max_new_tokens - 1, 1)


def _split(cache: Cache) -> Cache:
  """Shards the cache over responses and heads."""

  def one(x):
    names = (None, "batch", "heads", None, None)[: x.ndim]
    return constrain(x, *names)

  return jax.tree.map(one, cache)


@functools.partial(jax.jit, static_argnames=("model", "cache_dtype"))
def read_prompts(
    model: Decoder,
    params: chex.ArrayTree,
    tokens: jax.Array,
    valid: jax.Array,
    cache_dtype: DTypeLike,
) -> Pool:
  """Reads prompts `[N, P]`, padded on the left (`valid` is False there)."""
  n, length = tokens.shape
  cache = kv_cache.init_cache(model.config, n, length, cache_dtype)
  positions = jnp.maximum(jnp.cumsum(valid, axis=1) - 1, 0)
  hidden, cache = model.apply(
      {"params": params}, tokens, valid, positions, cache, 0, method="decode"
  )
  return Pool(_split(cache), hidden[:, -1])


@functools.partial(
    jax.jit,
    static_argnames=("config", "slots", "prompt", "max_new_tokens", "dtype"),
)
def empty(
    config: DecoderConfig,
    slots: int,
    prompt: int,
    max_new_tokens: int,
    dtype: DTypeLike,
) -> Slots:
  """Returns S empty slots, for prompts of P and responses of C tokens."""
  length = prompt + ring_size(max_new_tokens)
  number = lambda: jnp.zeros(slots, jnp.int32)
  return Slots(
      cache=_split(kv_cache.init_cache(config, slots, length, dtype)),
      prompt_valid=jnp.zeros((slots, prompt), bool),
      rows=number(),
      steps=number(),
      tokens=number(),
      states=number(),
      alive=jnp.zeros(slots, bool),
      finished=jnp.zeros(slots, bool),
  )


@functools.partial(
    jax.jit, static_argnames=("model", "options"), donate_argnames=("slots",)
)
def begin(
    model: Decoder,
    options: Options,
    inputs: DecodeInputs,
    slots: Slots,
    pool: Pool,
    fresh: jax.Array,
    source: jax.Array,
    rows: jax.Array,
    prompt_valid: jax.Array,
) -> tuple[Slots, Record]:
  """Starts responses in free slots and samples the first token of each.

  Args:
    model: The decoder.
    options: See `Options`.
    inputs: See `DecodeInputs`.
    slots: The slots; donated.
    pool: Prompts that have been read.
    fresh: `[S]` bool, the slots in which a response starts.
    source: `[S]` int32, index of its prompt in the pool.
    rows: `[S]` int32, index of the response.
    prompt_valid: `[S, P]` bool, False at the prompt's padding.

  Returns:
    The slots, and the record of one step (see `decode`).
  """

  def put(new, old):
    return jnp.where(fresh.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

  def copy(layer, cache):
    # Copy layer by layer, so that no copy of all layers is ever in memory.
    def one(to, prompts):
      start = (layer,) + (0,) * (to.ndim - 1)
      sizes = (1, to.shape[1], *prompts.shape[2:])
      old = lax.dynamic_slice(to, start, sizes)[0]
      new = lax.dynamic_index_in_dim(prompts, layer, keepdims=False)
      new = put(jnp.take(new, source, axis=0), old)
      return lax.dynamic_update_slice(to, new[None], start)

    return jax.tree.map(one, cache, pool.cache)

  zero = jnp.zeros_like(rows)
  slots = Slots(
      cache=_split(lax.fori_loop(0, model.config.n_layers, copy, slots.cache)),
      prompt_valid=put(prompt_valid, slots.prompt_valid),
      rows=put(rows, slots.rows),
      steps=put(zero, slots.steps),
      tokens=slots.tokens,
      states=put(zero, slots.states),
      alive=slots.alive | fresh,
      finished=slots.finished & ~fresh,
  )
  hidden = jnp.take(pool.hidden, source, axis=0)
  slots, column = _sample(model, options, inputs, slots, hidden, fresh)
  record = {name: x[None] for name, x in column.items()}
  return slots, _replicated(record, slots)


@functools.partial(
    jax.jit, static_argnames=("model", "options"), donate_argnames=("slots",)
)
def decode(
    model: Decoder,
    options: Options,
    inputs: DecodeInputs,
    slots: Slots,
    index: jax.Array,
    floor: jax.Array,
) -> tuple[Slots, Record]:
  """Decodes a block: at most `STEPS` tokens, or until few slots are alive.

  Args:
    model: The decoder.
    options: See `Options`.
    inputs: See `DecodeInputs`.
    slots: The slots, at least one of them alive; donated.
    index: int32 scalar, index of the next write in the ring buffer.
    floor: int32 scalar; the block ends when at most this many slots are alive.

  Returns:
    The slots, and a record that is replicated on every device: `tokens`,
    `log_probs` and `mask`, each `[K, S]`, with the mask True where a token was
    drawn; `alive` and `finished`, each `[S]`; and `steps`, a scalar, how many
    of the K steps were taken.
  """
  prompt = slots.prompt_valid.shape[1]
  size = slots.cache.length - prompt
  n_steps = min(STEPS, size)
  lengths = jnp.sum(slots.prompt_valid, axis=1, dtype=jnp.int32)

  def step(carry):
    i, slots, record = carry
    place = (index + i) % size
    age = (place - jnp.arange(size)) % size
    own = age[None] < slots.steps[:, None]
    # Ended rows see nothing: attention reads only what some row sees.
    mask = jnp.concatenate([slots.prompt_valid, own], axis=1)
    mask = (mask & slots.alive[:, None])[:, None]
    hidden, cache = model.apply(
        {"params": inputs.params},
        slots.tokens[:, None],
        (lengths + slots.steps - 1)[:, None],
        mask,
        slots.cache,
        prompt + place,
        method="decode_masked",
    )
    slots = dataclasses.replace(slots, cache=cache)
    slots, column = _sample(
        model, options, inputs, slots, hidden[:, 0], slots.alive
    )
    record = {
        name: lax.dynamic_update_slice(record[name], x[None], (i, 0))
        for name, x in column.items()
    }
    return i + 1, slots, record

  def proceed(carry):
    i, slots, _ = carry
    alive = jnp.sum(slots.alive, dtype=jnp.int32)
    return (i < n_steps) & (alive > floor)

  shape = (n_steps, slots.rows.shape[0])
  record = {
      "tokens": jnp.zeros(shape, jnp.int32),
      "log_probs": jnp.zeros(shape, jnp.float32),
      "mask": jnp.zeros(shape, bool),
  }
  i, slots, record = lax.while_loop(
      proceed, step, (jnp.int32(0), slots, record)
  )
  return slots, _replicated(record | {"steps": i}, slots)


def _replicated(record: Record, slots: Slots) -> Record:
  """Adds what the host reads of the slots; replicates all of it."""
  record = record | {"alive": slots.alive, "finished": slots.finished}
  return {k: constrain(x, *(None,) * x.ndim) for k, x in record.items()}


def _sample(
    model: Decoder,
    options: Options,
    inputs: DecodeInputs,
    slots: Slots,
    hidden: jax.Array,
    acting: jax.Array,
) -> tuple[Slots, Record]:
  """Draws a token from features `[S, D]` in the slots where `acting` `[S]`."""
  sampling = options.sampling
  logits = model.apply({"params": inputs.params}, hidden, method="head")
  logits = sampling_lib.warp(
      logits,
      sampling,
      eos_ids=options.eos_ids,
      step=slots.steps,
      temperature=inputs.temperature,
  )
  if sampling.greedy:
    tokens = sampling_lib.likeliest(logits)
    log_probs = jnp.zeros(tokens.shape, jnp.float32)
  else:
    keys = sampling_lib.row_keys(inputs.key, slots.rows, slots.steps)
    tokens, log_probs = sampling_lib.draw(logits, keys)
  ended = jnp.isin(tokens, jnp.asarray(options.eos_ids, jnp.int32))
  states = slots.states
  if inputs.stops is not None:
    states = inputs.stops[states, tokens].astype(jnp.int32)
    complete = states == inputs.stops.shape[0] - 1
    early = slots.steps < sampling.min_new_tokens
    ended |= complete & ~early
    states = jnp.where(complete & early, 0, states)
  steps = slots.steps + acting
  ended &= acting
  slots = dataclasses.replace(
      slots,
      tokens=jnp.where(acting, tokens, slots.tokens),
      states=jnp.where(acting, states, slots.states),
      steps=steps,
      finished=slots.finished | ended,
      alive=jnp.where(
          acting, ~ended & (steps < sampling.max_new_tokens), slots.alive
      ),
  )
  column = {
      "tokens": tokens,
      "log_probs": jnp.where(acting, log_probs, 0.0),
      "mask": acting,
  }
  return slots, column


@jax.jit
def move(slots: Slots, kept: jax.Array) -> Slots:
  """Returns only the slots with indices `kept`, int32, fewer than S."""
  take = lambda x: jnp.take(x, kept, axis=0)
  moved = {name: take(x) for name, x in vars(slots).items() if name != "cache"}
  cache = jax.tree.map(lambda x: jnp.take(x, kept, axis=1), slots.cache)
  return Slots(cache=_split(cache), **moved)
