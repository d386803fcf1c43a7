"""How a response is sampled, and the distribution that it is sampled from.

The sampler and the learner both call `warp`, so that the log-probs they compare
are of one distribution: heated, truncated, and without an end where none was
allowed. Axis letters: B responses, V vocabulary.
"""

from collections.abc import Sequence
import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_collections

from experiments import _settings

# Tokens of the vocabulary in one block of `draw`: about √V.
_BLOCK = 256


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How responses are sampled; hashable.

  Attributes:
    max_new_tokens: limit of a response in tokens, C; at least 1.
    min_new_tokens: tokens before which a response cannot end, neither by an
      end-of-turn token nor by a stop string.
    temperature: divides the logits; 0 is greedy decoding.
    top_k: how many of the likeliest tokens may be drawn; 0 means all.
    top_p: the likeliest tokens that hold this share of the probability may be
      drawn; 1 means all. Taken after `top_k`.
    stop: strings that end a response; the token that completes one is its last.

  Raises:
    ValueError: a value is out of range; names the value and the range.
  """

  max_new_tokens: int
  min_new_tokens: int = 0
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  stop: tuple[str, ...] = ()

  def __post_init__(self):
    _check_int("max_new_tokens", self.max_new_tokens, 1)
    _check_int("min_new_tokens", self.min_new_tokens, 0)
    _check_int("top_k", self.top_k, 0)
    if self.min_new_tokens > self.max_new_tokens:
      raise ValueError(
          f"min_new_tokens={self.min_new_tokens} must be at most"
          f" max_new_tokens={self.max_new_tokens}"
      )
    if not 0 <= _number("temperature", self.temperature) < math.inf:
      raise ValueError(
          "temperature must be finite and at least 0 (greedy), got"
          f" {self.temperature!r}"
      )
    if not 0 < _number("top_p", self.top_p) <= 1:
      raise ValueError(
          "top_p must be above 0 and at most 1 (off), got"
          f" {self.top_p!r}; for the likeliest token alone set temperature=0"
      )
    if isinstance(self.stop, str):
      raise ValueError(
          f"stop must be a sequence of strings, got {self.stop!r}; give"
          f" ({self.stop!r},)"
      )
    for text in self.stop:
      if not isinstance(text, str) or not text:
        raise ValueError(
            f"stop must hold strings that are not empty, got {text!r}"
        )
    object.__setattr__(self, "stop", tuple(self.stop))

  @property
  def greedy(self) -> bool:
    """Whether the likeliest token is taken."""
    return self.temperature == 0


def of_config(rollout: ml_collections.ConfigDict) -> Sampling:
  """How a run samples, of `config.rollout`.

  Raises:
    ValueError: a value is out of range.
  """
  return _settings.read(Sampling, rollout, "config.rollout.")


def slots(rollout: ml_collections.ConfigDict) -> int:
  """Responses that a run decodes at once, at most, of `config.rollout`."""
  return rollout.slots or rollout.prompts * rollout.responses


def _check_int(name, value, least):
  """Refuses what is no int of at least `least`."""
  if not isinstance(value, int) or isinstance(value, bool) or value < least:
    raise ValueError(
        f"{name} must be an int of at least {least}, got {value!r}"
    )


def _number(name, value):
  """`value`, if it is a number."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise ValueError(f"{name} must be a number, got {value!r}")
  return value


def warp(
    logits: jax.Array,
    sampling: Sampling,
    *,
    eos_ids: Sequence[int] = (),
    step: jax.Array | None = None,
    keep: jax.Array | None = None,
    temperature: jax.Array | float | None = None,
) -> jax.Array:
  """Logits of the distribution that a response's tokens are drawn from.

  An end before `min_new_tokens` is forbidden, then the logits are divided by
  the temperature, then truncated (see `truncate`). With `temperature=0` they
  are only forbidden: greedy decoding takes their argmax.

  Args:
    logits: `[..., V]` float32, of the model.
    sampling: how responses are sampled.
    eos_ids: tokens that end a response.
    step: `[...]` int32, how many tokens of its response stand before each
      token; needed where `min_new_tokens` is above 0.
    keep: `[...]` int32, a token of each place that stays possible: the one
      drawn there under other weights. None keeps none.
    temperature: in place of `sampling.temperature`, where it is traced.

  Returns:
    `[..., V]` float32, -inf at tokens that cannot be drawn.

  Raises:
    ValueError: `min_new_tokens` needs `step`, and there is none.
  """
  logits = logits.astype(jnp.float32)
  if sampling.min_new_tokens and eos_ids:
    if step is None:
      raise ValueError(
          f"min_new_tokens={sampling.min_new_tokens} needs step, each token's"
          " place in its response"
      )
    is_end = (
        jnp.zeros(logits.shape[-1], bool).at[jnp.asarray(eos_ids)].set(True)
    )
    early = (step < sampling.min_new_tokens)[..., None]
    logits = jnp.where(early & is_end, -jnp.inf, logits)
  if sampling.greedy:
    return logits
  logits = logits / (
      sampling.temperature if temperature is None else temperature
  )
  return truncate(logits, sampling.top_k, sampling.top_p, keep)


def truncate(
    logits: jax.Array,
    top_k: int,
    top_p: float,
    keep: jax.Array | None = None,
) -> jax.Array:
  """Keeps the likeliest tokens and makes the others impossible.

  First the `top_k` likeliest; of these then the smallest set of the likeliest
  whose share of what is left is at least `top_p`. Tokens as likely as the last
  one kept are kept too, so that the result does not depend on an order of equal
  logits. Both limits are levels of the logits that a bisection of their bits
  finds, exactly but for the rounding of float32 sums; no sort.

  No gradient flows through the choice of tokens, and none to tokens left out.

  Args:
    logits: `[..., V]` float32, divided by the temperature.
    top_k: number of tokens; 0 keeps all.
    top_p: share of the probability; 1 keeps all.
    keep: `[...]` int32, a token that is kept in any case, or None.

  Returns:
    `[..., V]` float32: the logits kept, and -inf.
  """
  kept = jnp.ones(logits.shape, bool)
  fixed = jax.lax.stop_gradient(logits)
  levels = _ordered(fixed)
  if top_k:
    kept &= levels >= _level(levels, jnp.ones_like(fixed), float(top_k))
  if top_p < 1:
    probs = jax.nn.softmax(jnp.where(kept, fixed, -jnp.inf), axis=-1)
    kept &= levels >= _level(levels, probs, top_p)
  if not top_k and top_p >= 1:
    return logits
  if keep is not None:
    kept |= jnp.arange(logits.shape[-1]) == keep[..., None]
  return jnp.where(kept, logits, -jnp.inf)


def _ordered(x):
  """Unsigned integers in the order of float32 `x`."""
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  sign = jnp.uint32(1 << 31)
  return jnp.where(bits & sign != 0, ~bits, bits | sign)


def _level(levels, weights, target):
  """The highest level at and above which the weights sum to `target`.

  levels uint32 and weights `[..., V]`; returns `[..., 1]`, 0 where all of the
  weights do not reach the target.
  """

  def bit(i, found):
    probe = found | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
    mass = jnp.sum(
        jnp.where(levels >= probe, weights, 0.0), axis=-1, keepdims=True
    )
    return jnp.where(mass >= target, probe, found)

  start = jnp.zeros((*levels.shape[:-1], 1), jnp.uint32)
  return jax.lax.fori_loop(0, 32, bit, start)


def row_keys(key: jax.Array, rows: jax.Array, steps: jax.Array) -> jax.Array:
  """A key for every response and step, whatever is sampled beside it.

  Args:
    key: a `jax.random` key, of the rollout.
    rows: `[B]` int32, the responses' numbers.
    steps: `[B]` int32, how many tokens each has.

  Returns:
    `[B]` keys.
  """
  fold = jax.vmap(jax.random.fold_in, (0, 0))
  return fold(jax.vmap(jax.random.fold_in, (None, 0))(key, rows), steps)


def likeliest(logits: jax.Array) -> jax.Array:
  """The first token of each row `[B, V]` with the largest logit, `[B]` int32.

  By blocks, as `draw`: XLA's argmax goes through a row one by one on a CPU.
  """
  blocks = _blocks(logits)
  block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
  inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
  return (block * _BLOCK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def _blocks(logits):
  """`[B, V]` to `[B, V / _BLOCK, _BLOCK]`, filled up with -inf."""
  pad = -logits.shape[1] % _BLOCK
  logits = jnp.pad(
      logits.astype(jnp.float32), ((0, 0), (0, pad)), constant_values=-jnp.inf
  )
  return logits.reshape(logits.shape[0], -1, _BLOCK)


def draw(logits: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Draws a token of each row from softmax(logits).

  In two steps, first a block of the vocabulary and then a token of it: noise
  and argmax over the whole vocabulary would take longer than the head.

  Args:
    logits: `[B, V]` float32; -inf is never drawn.
    keys: `[B]` keys, one per row.

  Returns:
    Tokens `[B]` int32, and their log-probs `[B]` float32.
  """
  blocks = _blocks(logits)
  masses = jax.nn.logsumexp(blocks, axis=-1)
  pairs = jax.vmap(jax.random.split)(keys)
  categorical = jax.vmap(jax.random.categorical)
  block = categorical(pairs[:, 0], masses)
  inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
  offset = categorical(pairs[:, 1], inside)
  picked = jnp.take_along_axis(inside, offset[:, None], axis=1)[:, 0]
  tokens = (block * _BLOCK + offset).astype(jnp.int32)
  return tokens, picked - jax.nn.logsumexp(masses, axis=-1)
