"""The programs that decode: read prompts, begin, decode a block, move.

`rollout` decides on the host which response is in which slot.

Axis letters: N prompts, B responses, P padded prompt tokens, C new tokens,
R = C - 1 tokens of a response that are ever read, S slots, K steps of a block,
V vocabulary.
"""

import functools
from typing import Any, NamedTuple

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp
from jax.typing import DTypeLike

from experiments.models import kv_cache
from experiments.models.decoder import Decoder
from experiments.models.kv_cache import Cache
from experiments.parallel.sharding import constrain
from experiments.rollouts import sampling as sampling_lib
from experiments.rollouts.sampling import Sampling

# Steps of a block, after which the host looks what has ended.
STEPS = 64
# Slots are halved so often at most, and not to fewer than this: another
# compiled program would cost more.
HALVINGS, LEAST = 3, 8


class Options(NamedTuple):
  """What is compiled into the programs.

  Attributes:
    sampling: limits and truncation; of the temperature only whether it is 0.
    eos_ids: tokens that end a response.
  """

  sampling: Sampling
  eos_ids: tuple[int, ...]


class Sampler(NamedTuple):
  """What the programs are given and do not change.

  Attributes:
    params: parameter tree of the model.
    key: a `jax.random` key, of the rollout.
    temperature: float32 scalar.
    stops: `[states, V]` int16, a `StopTable`'s, or None.
  """

  params: Any
  key: jax.Array
  temperature: jax.Array
  stops: jax.Array | None


@struct.dataclass
class Slots:
  """What is being decoded.

  A new token's keys and values go to the same place of the cache in all rows,
  one after the other in a circle of R behind the prompt: in what order a row's
  tokens lie does not matter, since a key was rotated by its position. So a row
  may begin at any time, and a write is one slice.

  Attributes:
    cache: of P + R tokens.
    prompt_valid: `[S, P]` bool, False at padding.
    rows: `[S]` int32, number of the response.
    steps: `[S]` int32, tokens it has.
    tokens: `[S]` int32, its last token.
    states: `[S]` int32, how much of a stop string it ends in.
    alive: `[S]` bool, whether it goes on.
    finished: `[S]` bool, whether it ended otherwise than by the limit.
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
  """Prompts that were read: their cache, and last features `[N, D]`."""

  cache: Cache
  hidden: jax.Array


def least_slots(slots: int) -> int:
  """The fewest slots that `slots` are halved to."""
  return max(LEAST, slots >> HALVINGS)


def circle(max_new_tokens: int) -> int:
  """Tokens of a response that are read again, R: all but the last."""
  return max(max_new_tokens - 1, 1)


def _split(cache):
  """The cache, split over responses and heads."""

  def one(x):
    names = (None, "batch", "heads", None, None)[: x.ndim]
    return constrain(x, *names)

  return jax.tree.map(one, cache)


@functools.partial(jax.jit, static_argnames=("model", "cache_dtype"))
def read_prompts(
    model: Decoder,
    params: Any,
    tokens: jax.Array,
    valid: jax.Array,
    cache_dtype: DTypeLike,
) -> Pool:
  """Reads prompts `[N, P]`, padded on the left."""
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
    config: Any, slots: int, prompt: int, max_new_tokens: int, dtype: DTypeLike
) -> Slots:
  """Slots in which nothing is alive."""
  length = prompt + circle(max_new_tokens)
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
    sampler: Sampler,
    slots: Slots,
    pool: Pool,
    fresh: jax.Array,
    source: jax.Array,
    rows: jax.Array,
    prompt_valid: jax.Array,
) -> tuple[Slots, dict[str, jax.Array]]:
  """Gives slots to responses, and samples the first token of each.

  Args:
    model: the decoder.
    options: see `Options`.
    sampler: see `Sampler`.
    slots: before.
    pool: prompts that were read.
    fresh: `[S]` bool, which slots are given away.
    source: `[S]` int32, each one's prompt in the pool.
    rows: `[S]` int32, number of the response.
    prompt_valid: `[S, P]` bool, of the prompt.

  Returns:
    The slots, and the record of one step (see `decode`).
  """

  def put(new, old):
    return jnp.where(fresh.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

  def copy(layer, cache):
    # One layer after the other: a copy of all prompts is never in memory.
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
  slots, column = _sample(model, options, sampler, slots, hidden, fresh)
  record = {name: x[None] for name, x in column.items()}
  return slots, _whole(record, slots)


@functools.partial(
    jax.jit, static_argnames=("model", "options"), donate_argnames=("slots",)
)
def decode(
    model: Decoder,
    options: Options,
    sampler: Sampler,
    slots: Slots,
    index: jax.Array,
    floor: jax.Array,
) -> tuple[Slots, dict[str, jax.Array]]:
  """Decodes a block: until few are alive, at most `STEPS` tokens each.

  Args:
    model: the decoder.
    options: see `Options`.
    sampler: see `Sampler`.
    slots: before; at least one is alive.
    index: int32 scalar, place in the circle of the next write.
    floor: int32 scalar; the block ends when no more than that are alive.

  Returns:
    The slots, and a record, whole on every device: `tokens`, `log_probs` and
    `mask` `[K, S]` of the steps, mask True where a token was drawn; `alive` and
    `finished` `[S]`; `steps` scalar, how many of K were done.
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
    # A row that has ended sees nothing: what only it would see is not read.
    mask = jnp.concatenate([slots.prompt_valid, own], axis=1)
    mask = (mask & slots.alive[:, None])[:, None]
    hidden, cache = model.apply(
        {"params": sampler.params},
        slots.tokens[:, None],
        (lengths + slots.steps - 1)[:, None],
        mask,
        slots.cache,
        prompt + place,
        method="decode_masked",
    )
    slots = slots.replace(cache=cache)
    slots, column = _sample(
        model, options, sampler, slots, hidden[:, 0], slots.alive
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
  return slots, _whole(record | {"steps": i}, slots)


def _whole(record, slots):
  """The record and what the host must know of the slots, on every device."""
  record = record | {"alive": slots.alive, "finished": slots.finished}
  return {k: constrain(x, *(None,) * x.ndim) for k, x in record.items()}


def _sample(model, options, sampler, slots, hidden, acting):
  """Draws a token in the slots `acting` `[S]`, from features `[S, D]`."""
  sampling = options.sampling
  logits = model.apply({"params": sampler.params}, hidden, method="head")
  logits = sampling_lib.warp(
      logits,
      sampling,
      eos_ids=options.eos_ids,
      step=slots.steps,
      temperature=sampler.temperature,
  )
  if sampling.greedy:
    tokens = sampling_lib.likeliest(logits)
    log_probs = jnp.zeros(tokens.shape, jnp.float32)
  else:
    keys = sampling_lib.row_keys(sampler.key, slots.rows, slots.steps)
    tokens, log_probs = sampling_lib.draw(logits, keys)
  ended = jnp.isin(tokens, jnp.asarray(options.eos_ids, jnp.int32))
  states = slots.states
  if sampler.stops is not None:
    states = sampler.stops[states, tokens].astype(jnp.int32)
    found = states == sampler.stops.shape[0] - 1
    early = slots.steps < sampling.min_new_tokens
    ended |= found & ~early
    states = jnp.where(found & early, 0, states)
  steps = slots.steps + acting
  ended &= acting
  slots = slots.replace(
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
  """The slots `kept` (int32, fewer than S) alone."""
  take = lambda x: jnp.take(x, kept, axis=0)
  moved = {name: take(x) for name, x in vars(slots).items() if name != "cache"}
  cache = jax.tree.map(lambda x: jnp.take(x, kept, axis=1), slots.cache)
  return Slots(cache=_split(cache), **moved)
