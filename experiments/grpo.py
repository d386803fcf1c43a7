"""Group-relative policy optimisation: advantages, log-probs and the loss.

Axis letters: B responses, T tokens of prompt and completion, D features,
V vocabulary. Everything is aligned to tokens: entry t belongs to token t,
whose logits come from position t - 1.
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

# Ratios beyond e^±20 mean that sampler and trainer disagree altogether; the
# clamp keeps the loss and its metrics finite there.
_MAX_LOG_RATIO = 20.0
# Added to the standard deviation of a group's rewards.
_EPS = 1e-4


def group_advantages(rewards: jax.Array, group_size: int) -> jax.Array:
  """Rewards relative to the other responses of the same prompt.

  `(r - mean) / (std + 1e-4)` with the population mean and standard deviation
  of each group; exactly 0 where all rewards of a group are equal.

  Args:
    rewards: `[B]` float; the responses of a prompt are adjacent.
    group_size: responses per prompt, at least 2; divides B.

  Returns:
    `[B]` float32.

  Raises:
    ValueError: if `group_size` is below 2 or does not divide B.
  """
  rewards = jnp.asarray(rewards, jnp.float32)
  if rewards.ndim != 1 or not rewards.size:
    raise ValueError(f"rewards must have shape [B], got {rewards.shape}")
  if group_size < 2 or rewards.size % group_size:
    raise ValueError(
        f"group_size must be at least 2 and divide the {rewards.size} rewards, "
        f"got {group_size}"
    )
  groups = rewards.reshape(-1, group_size)
  # The mean of equal numbers may differ from them in the last bit, which the
  # division would blow up: equality is tested on the rewards themselves.
  equal = jnp.all(groups == groups[:, :1], axis=1, keepdims=True)
  centred = groups - jnp.mean(groups, axis=1, keepdims=True)
  std = jnp.sqrt(jnp.mean(jnp.square(centred), axis=1, keepdims=True))
  return jnp.where(equal, 0.0, centred / (std + _EPS)).reshape(-1)


def token_log_probs(
    hidden_fn: Callable[..., jax.Array],
    head_fn: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    tokens: jax.Array,
    valid: jax.Array,
    completion_mask: jax.Array,
    *,
    temperature: float,
    chunk_size: int,
    start: int = 1,
) -> jax.Array:
  """Log-probabilities of completion tokens under the policy as sampled from.

  Logits exist for `chunk_size` tokens at a time, in the forward and in the
  backward pass, which computes each chunk again. Chunks without a completion
  token are skipped.

  Args:
    hidden_fn: `(params, tokens, valid) -> [B, T, D]`, features for the head.
    head_fn: `(params, [..., D]) -> [..., V]` logits.
    params: the model's parameters; differentiable.
    tokens: `[B, T]` int32.
    valid: `[B, T]` bool, False at padding.
    completion_mask: `[B, T]` bool, True at generated tokens.
    temperature: divides the logits, as in sampling; above 0.
    chunk_size: tokens whose logits are alive at once. A chunk spans the whole
      batch and at least one position, so B where that is more.
    start: first position that can hold a completion token (static): the
      padded prompt length. Positions before it cost no head.

  Returns:
    `[B, T]` float32, 0 outside the completion mask.

  Raises:
    ValueError: for a temperature that is not above 0 (if it is not traced), a
      `chunk_size` below 1, or a `start` outside `[1, T - 1]`.
  """
  return token_statistics(
      hidden_fn,
      head_fn,
      params,
      tokens,
      valid,
      completion_mask,
      temperature=temperature,
      chunk_size=chunk_size,
      start=start,
  )[0]


def token_statistics(
    hidden_fn: Callable[..., jax.Array],
    head_fn: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    tokens: jax.Array,
    valid: jax.Array,
    completion_mask: jax.Array,
    *,
    temperature: float,
    chunk_size: int,
    start: int = 1,
) -> tuple[jax.Array, jax.Array]:
  """Log-probabilities and entropies of completion tokens.

  Args:
    hidden_fn: see `token_log_probs`, as all arguments.
    head_fn: as there.
    params: as there.
    tokens: as there.
    valid: as there.
    completion_mask: as there.
    temperature: as there.
    chunk_size: as there.
    start: as there.

  Returns:
    What `token_log_probs` returns, and the entropy in nats of each completion
    token's distribution, without gradient: `[B, T]` float32 each, 0 outside
    the completion mask.

  Raises:
    ValueError: as there.
  """
  batch, length = tokens.shape
  _check_statistics(temperature, chunk_size, start, length)
  hidden = hidden_fn(params, tokens, valid)[:, start - 1 : -1]
  span = max(1, min(chunk_size // batch, length - start))
  chunks = -(-(length - start) // span)
  pad = chunks * span - (length - start)

  def split(x):  # [B, T - start, ...] -> [chunks, B, span, ...]
    # Chunks run along time, so that a sharded batch stays sharded.
    x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
    x = x.reshape(batch, chunks, span, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  def compute(params, h, targets):
    logits = head_fn(params, h).astype(jnp.float32) / temperature
    return _chosen_and_entropy(logits, targets)

  def nothing(params, h, targets):
    del params, h
    zeros = jnp.zeros(targets.shape, jnp.float32)
    return zeros, zeros

  # The scan of `map` already keeps XLA from undoing the recomputation.
  @functools.partial(jax.checkpoint, prevent_cse=False)
  def one(params, h, targets, mask):
    outs = lax.cond(jnp.any(mask), compute, nothing, params, h, targets)
    return tuple(jnp.where(mask, out, 0.0) for out in outs)

  targets, mask = tokens[:, start:], completion_mask[:, start:]
  chunked = (split(hidden), split(targets), split(mask))
  outs = lax.map(lambda chunk: one(params, *chunk), chunked)

  def join(x):  # [chunks, B, span] -> [B, T]
    x = jnp.moveaxis(x, 0, 1).reshape(batch, chunks * span)
    return jnp.pad(x[:, : length - start], ((0, 0), (start, 0)))

  return tuple(join(x) for x in outs)


def _check_statistics(temperature, chunk_size, start, length):
  """Refuses what `token_log_probs` says it refuses."""
  if not isinstance(temperature, jax.core.Tracer) and not temperature > 0:
    raise ValueError(
        f"temperature must be above 0, got {temperature}: greedy decoding has "
        "no gradient"
    )
  if chunk_size < 1:
    raise ValueError(f"chunk_size must be at least 1 token, got {chunk_size}")
  if not 1 <= start < length:
    raise ValueError(
        f"start must be between 1 and T - 1 = {length - 1}, got {start}"
    )


def _chosen_and_entropy(logits, targets):
  """Log-softmax at the targets, and H = lse(z) - Σ_v p_v z_v."""
  chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  log_normalizer = jax.nn.logsumexp(logits, axis=-1)
  fixed = lax.stop_gradient(logits)
  mean = jnp.sum(jax.nn.softmax(fixed, axis=-1) * fixed, axis=-1)
  return chosen - log_normalizer, lax.stop_gradient(log_normalizer) - mean


def grpo_loss(
    log_probs: jax.Array,
    old_log_probs: jax.Array,
    advantages: jax.Array,
    completion_mask: jax.Array,
    clip_low: float,
    clip_high: float,
    normalizer: float | jax.Array,
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The clipped surrogate, summed over completion tokens.

  With the ratio ρ = exp(log π - log π_old) of each completion token:
  `loss = -Σ min(ρ A, clip(ρ, 1 - clip_low, 1 + clip_high) A) / normalizer`.
  The normalizer is of the whole batch, so the losses (and the gradients) of
  micro-batches add up to those of the batch.

  Args:
    log_probs: `[B, T]` float, of the policy being trained.
    old_log_probs: `[B, T]` float, of the policy sampled from.
    advantages: `[B]` float.
    completion_mask: `[B, T]` bool, True at generated tokens. Nothing
      elsewhere counts, not even a NaN.
    clip_low: how far a ratio may fall below 1 before it earns no more; in
      `[0, 1]`.
    clip_high: how far it may rise above 1; at least 0.
    normalizer: positive, usually the number of completion tokens in the whole
      batch.

  Returns:
    The loss, a float32 scalar, and metrics of the completion tokens as float32
    scalars: `tokens` (their number), `ratio_mean`, `ratio_max`,
    `clip_fraction` (tokens whose clipped branch was taken) and `kl`, the
    estimate k3 = ρ - 1 - log ρ of KL(π_old ‖ π) in nats per token. All are 0
    without a completion token. `merge_metrics` joins those of micro-batches.

  Raises:
    ValueError: if shapes disagree or a clip is out of range.
  """
  _check_loss(log_probs, old_log_probs, advantages, completion_mask)
  if not 0 <= clip_low <= 1 or not clip_high >= 0:
    raise ValueError(
        "clip_low must be in [0, 1] and clip_high at least 0, got "
        f"{clip_low} and {clip_high}"
    )
  mask = completion_mask
  # Masked before exp: the gradient of a `where` around it would keep a NaN.
  log_ratio = jnp.where(mask, log_probs, 0.0) - jnp.where(
      mask, old_log_probs, 0.0
  )
  log_ratio = jnp.clip(
      log_ratio.astype(jnp.float32), -_MAX_LOG_RATIO, _MAX_LOG_RATIO
  )
  ratio = jnp.exp(log_ratio)
  gain = jnp.asarray(advantages, jnp.float32)[:, None]
  free = ratio * gain
  clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * gain
  objective = jnp.where(mask, jnp.minimum(free, clipped), 0.0)
  loss = -jnp.sum(objective) / normalizer

  tokens = jnp.sum(mask, dtype=jnp.float32)

  def mean(x):
    return jnp.sum(jnp.where(mask, x, 0.0)) / jnp.maximum(tokens, 1.0)

  metrics = {
      "tokens": tokens,
      "ratio_mean": mean(ratio),
      "ratio_max": jnp.max(jnp.where(mask, ratio, 0.0)),
      "clip_fraction": mean((clipped < free).astype(jnp.float32)),
      "kl": mean(jnp.expm1(log_ratio) - log_ratio),
  }
  return loss, lax.stop_gradient(metrics)


def _check_loss(log_probs, old_log_probs, advantages, completion_mask):
  """Refuses arrays that would broadcast into a wrong loss."""
  shape = completion_mask.shape
  if log_probs.shape != shape or old_log_probs.shape != shape:
    raise ValueError(
        "log_probs, old_log_probs and completion_mask must have one shape "
        f"[B, T], got {log_probs.shape}, {old_log_probs.shape} and {shape}"
    )
  if advantages.shape != shape[:1]:
    raise ValueError(
        f"advantages must have shape {shape[:1]}, got {advantages.shape}"
    )
  if completion_mask.dtype != jnp.bool_:
    raise ValueError(
        f"completion_mask must be bool, got {completion_mask.dtype}"
    )


def merge_metrics(stacked: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """Joins `grpo_loss` metrics of micro-batches into those of the batch.

  Args:
    stacked: the metrics with a leading micro-batch axis, as `lax.scan` or
      `jax.tree.map(jnp.stack, ...)` leave them.

  Returns:
    The same names without that axis: the sum of `tokens`, the maximum of
    `ratio_max`, and the mean over tokens of everything else.
  """
  tokens = stacked["tokens"]
  total = jnp.sum(tokens)
  merged = {
      name: jnp.sum(value * tokens) / jnp.maximum(total, 1.0)
      for name, value in stacked.items()
  }
  return merged | {
      "tokens": total,
      "ratio_max": jnp.max(stacked["ratio_max"]),
  }
