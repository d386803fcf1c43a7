"""Group-relative policy optimisation: advantages, log-probs and the loss.

Axis letters: B responses, C completion tokens, D features, V vocabulary.
Everything is aligned to tokens: entry c belongs to token c of the completion,
whose logits come from the position before it.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero
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


def token_statistics(
    head_fn: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    hidden: jax.Array,
    tokens: jax.Array,
    mask: jax.Array,
    *,
    temperature: float,
    chunk_size: int,
) -> tuple[jax.Array, jax.Array]:
  """Log-probs and entropies of tokens under the policy as sampled from.

  Logits exist for `chunk_size` tokens at a time. Under differentiation a frozen
  head is read once: the derivatives of log-probs by features are made with
  them. A head that is trained computes each chunk again in the backward pass.
  Chunks without a token of the mask are skipped.

  Args:
    head_fn: `(params, [..., D]) -> [..., V]` logits, of each token by itself.
    params: the model's parameters; differentiable.
    hidden: `[B, C, D]`, entry c is the head's input that predicts token c.
    tokens: `[B, C]` int32.
    mask: `[B, C]` bool, True at generated tokens.
    temperature: divides the logits, as in sampling; above 0.
    chunk_size: tokens whose logits are alive at once. A chunk spans the whole
      batch and at least one position, so B where that is more.

  Returns:
    `[B, C]` float32 each, 0 outside the mask: log-probabilities, and entropies
    in nats of the tokens' distributions, these without gradient.

  Raises:
    ValueError: for a temperature that is not above 0 (if it is not traced), a
      `chunk_size` below 1, or shapes that disagree.
  """
  _check_statistics(hidden, tokens, mask, temperature, chunk_size)
  batch, length = tokens.shape
  span = max(1, min(chunk_size // batch, length))
  chunks = -(-length // span)
  pad = chunks * span - length

  def split(x):  # [B, C, ...] -> [chunks, B, span, ...]
    # Chunks run along time, so that a sharded batch stays sharded.
    x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
    x = x.reshape(batch, chunks, span, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  hidden, tokens, mask = split(hidden), split(tokens), split(mask)
  # Those leaves of params that the head reads, as arguments of their own.
  head, weights = jax.closure_convert(
      lambda h: head_fn(params, h).astype(jnp.float32) / temperature,
      jnp.zeros_like(hidden[0]),
  )
  one = _chunk_statistics(head)
  log_probs, entropy = lax.map(
      lambda chunk: one(weights, *chunk), (hidden, tokens, mask)
  )

  def join(x):  # [chunks, B, span] -> [B, C]
    return jnp.moveaxis(x, 0, 1).reshape(batch, -1)[:, :length]

  return join(log_probs), join(entropy)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Trained:
  """Which of the head's weights are differentiated; holds no arrays."""

  flags: tuple[bool, ...]

  def split(self, weights):
    """Trained and frozen ones."""
    pairs = list(zip(self.flags, weights, strict=True))
    return [w for f, w in pairs if f], [w for f, w in pairs if not f]

  def join(self, trained, frozen):
    """The inverse of `split`."""
    trained, frozen = iter(trained), iter(frozen)
    return [next(trained if flag else frozen) for flag in self.flags]


def _unless_empty(mask, fn, *args):
  """`fn(*args)`, or zeros in its place where no token of a chunk counts."""
  zeros = lambda *args: jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(fn, *args)
  )
  return lax.cond(jnp.any(mask), fn, zeros, *args)


def _chunk_statistics(head: Callable[..., jax.Array]) -> Callable[..., Any]:
  """`(weights, h, targets, mask) -> log-probs, entropies` of one chunk.

  Differentiated by hand: autodiff hands the head's weights from the branch of
  the forward pass to that of the backward pass, as a copy in every chunk.
  """

  def compute(weights, h, targets):
    return _chosen_and_entropy(head(h, *weights), targets)

  def compute_and_slope(weights, h, targets):
    of_h = lambda h: compute(weights, h, targets)
    log_probs, pull, entropy = jax.vjp(of_h, h, has_aux=True)
    # A token's log-prob depends on the token's own features only.
    (slope,) = pull(jnp.ones_like(log_probs))
    return (log_probs, entropy), slope

  @jax.custom_vjp
  def one(weights, h, targets, mask):
    outs = _unless_empty(mask, compute, weights, h, targets)
    return tuple(jnp.where(mask, out, 0.0) for out in outs)

  def one_fwd(weights, h, targets, mask):
    trained = _Trained(tuple(w.perturbed for w in weights))
    weights = [w.value for w in weights]
    h, targets, mask = h.value, targets.value, mask.value
    if any(trained.flags):
      kept = (trained, mask, (weights, h, targets))
      return one(weights, h, targets, mask), kept
    outs, slope = _unless_empty(mask, compute_and_slope, weights, h, targets)
    outs = tuple(jnp.where(mask, out, 0.0) for out in outs)
    return outs, (trained, mask, slope)

  def one_bwd(kept, cotangents):
    trained, mask, kept = kept
    none = [None] * len(trained.flags)
    cotangent, _ = cotangents  # None comes from entropies.
    if isinstance(cotangent, SymbolicZero):
      return none, None, None, None
    cotangent = jnp.where(mask, cotangent, 0.0)
    if not any(trained.flags):
      # where, for a slope at a masked token may be anything.
      slope = jnp.where(mask[..., None], kept, 0.0)
      h_bar = (cotangent[..., None] * slope).astype(slope.dtype)
      return none, h_bar, None, None
    weights, h, targets = kept
    own, frozen = trained.split(weights)

    def pull(own, frozen, h, targets, cotangent):
      def log_probs(own, h):
        return compute(trained.join(own, frozen), h, targets)[0]

      return jax.vjp(log_probs, own, h)[1](cotangent)

    bars, h_bar = _unless_empty(mask, pull, own, frozen, h, targets, cotangent)
    return trained.join(bars, [None] * len(frozen)), h_bar, None, None

  one.defvjp(one_fwd, one_bwd, symbolic_zeros=True)
  return one


def _check_statistics(hidden, tokens, mask, temperature, chunk_size):
  """Refuses what `token_statistics` says it refuses."""
  if not isinstance(temperature, jax.core.Tracer) and not temperature > 0:
    raise ValueError(
        f"temperature must be above 0, got {temperature}: greedy decoding has "
        "no gradient"
    )
  if chunk_size < 1:
    raise ValueError(f"chunk_size must be at least 1 token, got {chunk_size}")
  if not hidden.shape[:2] == tokens.shape == mask.shape:
    raise ValueError(
        "hidden [B, C, D], tokens [B, C] and mask [B, C] must agree, got"
        f" {hidden.shape}, {tokens.shape} and {mask.shape}"
    )


def _chosen_and_entropy(logits, targets):
  """Log-softmax at the targets, and H = lse(z) - Σ_v p_v z_v."""
  # Not a look-up, which would gather logits that are split over the vocabulary.
  ids = lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
  hit = ids == targets[..., None]
  chosen = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
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
    log_probs: `[B, C]` float, of the policy being trained.
    old_log_probs: `[B, C]` float, of the policy sampled from.
    advantages: `[B]` float.
    completion_mask: `[B, C]` bool, True at generated tokens. Nothing
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
        f"[B, C], got {log_probs.shape}, {old_log_probs.shape} and {shape}"
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
