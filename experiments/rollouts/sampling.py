"""Sampling options, and the distribution that tokens are drawn from.

The sampler and the learner both call `warp`, so the log-probs that they compare
belong to the same distribution: with temperature and truncation applied, and
end tokens forbidden where a response was too short to end.

Axis letters: B responses, V vocabulary.
"""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections

from experiments import _settings

# Number of tokens in each block of the vocabulary in `draw`: about √V.
_BLOCK = 256


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How responses are sampled; hashable.

  Attributes:
    max_new_tokens: Longest response in tokens, C; at least 1.
    min_new_tokens: Number of tokens before which a response cannot end, neither
      by an end-of-turn token nor by a stop string.
    temperature: Divides the logits; 0 means greedy decoding.
    top_k: Draw from the k likeliest tokens only; 0 means all.
    top_p: Draw from the smallest set of likeliest tokens that holds this share
      of the probability; 1 means all. Applied after `top_k`.
    stop: Strings that end a response. The token that completes one is the last
      of the response.

  Raises:
    ValueError: If a value is out of range; names the value and the range.
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

  @classmethod
  def of_config(cls, rollout: ml_collections.ConfigDict) -> "Sampling":
    """Reads the section `config.rollout`.

    Raises:
      ValueError: If a value is out of range; names the field.
    """
    return _settings.read(cls, rollout, "config.rollout.")

  @property
  def greedy(self) -> bool:
    """Whether decoding always takes the likeliest token."""
    return self.temperature == 0


def slots(rollout: ml_collections.ConfigDict) -> int:
  """Most responses decoded at once, from the section `config.rollout`."""
  return rollout.slots or rollout.prompts * rollout.responses


def _check_int(name: str, value: Any, least: int) -> None:
  """Refuses a value that is not an int of at least `least`."""
  if not isinstance(value, int) or isinstance(value, bool) or value < least:
    raise ValueError(
        f"{name} must be an int of at least {least}, got {value!r}"
    )


def _number(name: str, value: Any) -> float:
  """Returns `value`, or refuses it if it is not a number."""
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
  """Returns the logits of the distribution that tokens are drawn from.

  Forbids end tokens before `min_new_tokens`, then divides by the temperature,
  then truncates (see `truncate`). With `temperature=0` it only forbids end
  tokens: greedy decoding takes the argmax of the result.

  Args:
    logits: The model's logits, `[..., V]`.
    sampling: How responses are sampled.
    eos_ids: Tokens that end a response.
    step: `[...]` int32, how many tokens of the response precede each position;
      required if `min_new_tokens` is above 0.
    keep: `[...]` int32, a token at each position that truncation never removes,
      such as the one that was drawn there under other weights. None keeps no
      such token.
    temperature: Overrides `sampling.temperature`, for a traced value.

  Returns:
    `[..., V]` float32, -inf at tokens that cannot be drawn.

  Raises:
    ValueError: If `min_new_tokens` is above 0 and `step` is None.
  """
  logits = logits.astype(jnp.float32)
  if sampling.min_new_tokens and eos_ids:
    if step is None:
      raise ValueError(
          f"min_new_tokens={sampling.min_new_tokens} needs step: pass each"
          " token's position in its response"
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
  """Keeps the likeliest tokens and sets the logits of all others to -inf.

  Keeps the `top_k` likeliest tokens, then the smallest set of the likeliest of
  these that holds a share of at least `top_p` of their probability. Tokens as
  likely as the last one kept are kept too, so the result does not depend on the
  order of equal logits. Both cutoffs are found by bisection over the bits of
  the logits instead of a sort; they are exact up to the rounding of float32
  sums.

  No gradient flows through the choice of tokens or to tokens removed.

  Args:
    logits: `[..., V]` float32, already divided by the temperature.
    top_k: Number of tokens to keep; 0 keeps all.
    top_p: Share of the probability to keep; 1 keeps all.
    keep: `[...]` int32, a token that is always kept, or None.

  Returns:
    `[..., V]` float32, -inf at tokens removed.
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


def _ordered(x: jax.Array) -> jax.Array:
  """Maps float32 `x` to uint32 with the same order."""
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  sign = jnp.uint32(1 << 31)
  return jnp.where(bits & sign != 0, ~bits, bits | sign)


def _level(levels: jax.Array, weights: jax.Array, target: float) -> jax.Array:
  """The highest level such that weights at or above it sum to `target`.

  levels uint32 and weights float32, both `[..., V]`; returns `[..., 1]` uint32,
  0 where even the sum of all weights is below the target.
  """

  def bit(i, level):
    probe = level | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
    mass = jnp.sum(
        jnp.where(levels >= probe, weights, 0.0), axis=-1, keepdims=True
    )
    return jnp.where(mass >= target, probe, level)

  start = jnp.zeros((*levels.shape[:-1], 1), jnp.uint32)
  return jax.lax.fori_loop(0, 32, bit, start)


def row_keys(key: jax.Array, rows: jax.Array, steps: jax.Array) -> jax.Array:
  """Returns a key for each response and step.

  A key does not depend on what else is sampled at the same time.

  Args:
    key: The `jax.random` key of the rollout.
    rows: `[B]` int32, index of each response.
    steps: `[B]` int32, number of tokens each response has.

  Returns:
    `[B]` keys.
  """
  fold = jax.vmap(jax.random.fold_in, (0, 0))
  return fold(jax.vmap(jax.random.fold_in, (None, 0))(key, rows), steps)


def likeliest(logits: jax.Array) -> jax.Array:
  """Returns the first argmax of each row of `[B, V]`, as `[B]` int32.

  It works in blocks, as `draw` does: XLA's argmax on a CPU scans a row one
  element at a time.
  """
  blocks = _blocks(logits)
  block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
  inside = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
  return (block * _BLOCK + jnp.argmax(inside, axis=-1)).astype(jnp.int32)


def _blocks(logits: jax.Array) -> jax.Array:
  """Reshapes `[B, V]` to `[B, ⌈V / _BLOCK⌉, _BLOCK]`, padded with -inf."""
  pad = -logits.shape[1] % _BLOCK
  logits = jnp.pad(
      logits.astype(jnp.float32), ((0, 0), (0, pad)), constant_values=-jnp.inf
  )
  return logits.reshape(logits.shape[0], -1, _BLOCK)


def draw(logits: jax.Array, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Draws a token from softmax(logits) in each row.

  First draws a block of the vocabulary, then a token of the block: noise and
  argmax over the whole vocabulary would take longer than computing the logits.

  Args:
    logits: `[B, V]` float32; a token with -inf is never drawn.
    keys: `[B]` keys, one per row.

  Returns:
    Tokens `[B]` int32 and their log-probs `[B]` float32.
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
