"""Log-probs and entropies of given tokens, without holding all logits at once.

Axis letters: B rows, C tokens of a row, D features, V vocabulary. Everything is
aligned to tokens: entry c belongs to token c, whose logits come from the
position before it.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
from typing import Any

import chex
import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero
import jax.numpy as jnp
import optax

from experiments.rollouts import sampling as sampling_lib
from experiments.rollouts.sampling import Sampling


def token_statistics(
    head_fn: Callable[[optax.Params, jax.Array], jax.Array],
    params: optax.Params,
    hidden: jax.Array,
    tokens: jax.Array,
    mask: jax.Array,
    *,
    sampling: Sampling,
    chunk_size: int,
    eos_ids: Sequence[int] = (),
    steps: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Log-probs and entropies of tokens under the distribution sampled from.

  Logits exist for only `chunk_size` tokens at a time. When differentiated, a
  frozen head is read once: the derivatives of log-probs with respect to
  features are computed in the forward pass. With a trained head, each chunk is
  computed again in the backward pass. Chunks without any token in the mask are
  skipped.

  Args:
    head_fn: Maps `(params, [..., D])` to logits `[..., V]`, each token by
      itself.
    params: The model's parameters; differentiable.
    hidden: Inputs of the head, `[B, C, D]`; entry c predicts token c.
    tokens: `[B, C]` int32.
    mask: True at generated tokens, `[B, C]` bool.
    sampling: How the tokens were sampled. Log-probs are those of the
      distribution that `sampling.warp` makes, in which these tokens always
      remain possible.
    chunk_size: Number of tokens whose logits are in memory at once. A chunk
      spans the whole batch and at least one position, so it has B tokens if
      that is more.
    eos_ids: Tokens that end a response.
    steps: Number of tokens of its response that precede each token, `[B, C]`
      int32; required if `sampling.min_new_tokens` is above 0.

  Returns:
    Log-probabilities, and entropies in nats of the tokens' distributions: each
    `[B, C]` float32, 0 outside the mask. Entropies have no gradient.

  Raises:
    ValueError: If the temperature is 0, `chunk_size` is below 1, shapes
      disagree, or `min_new_tokens` is used without steps.
  """
  _check_statistics(hidden, tokens, mask, sampling, chunk_size)
  batch, length = tokens.shape
  span = max(1, min(chunk_size // batch, length))
  chunks = -(-length // span)
  pad = chunks * span - length

  def split(x):  # [B, C, ...] -> [chunks, B, span, ...]
    # Chunks run along the tokens, so that a sharded batch stays sharded.
    x = jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2))
    x = x.reshape(batch, chunks, span, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  if steps is None and sampling.min_new_tokens:
    raise ValueError(
        f"sampling.min_new_tokens={sampling.min_new_tokens} needs steps"
    )
  # Each token with its step, by which `warp` knows the early ones.
  targets = jnp.stack([tokens, tokens if steps is None else steps], axis=-1)
  hidden, targets, mask = split(hidden), split(targets), split(mask)
  # The leaves of params that the head reads, as explicit arguments.
  head, weights = jax.closure_convert(
      lambda h: head_fn(params, h).astype(jnp.float32),
      jnp.zeros_like(hidden[0]),
  )

  def compute(weights, h, targets):
    tokens, steps = targets[..., 0], targets[..., 1]
    logits = sampling_lib.warp(
        head(h, *weights), sampling, eos_ids=eos_ids, step=steps, keep=tokens
    )
    return _chosen_and_entropy(logits, tokens)

  one = _chunk_statistics(compute)
  log_probs, entropy = lax.map(
      lambda chunk: one(weights, *chunk), (hidden, targets, mask)
  )

  def join(x):  # [chunks, B, span] -> [B, C]
    return jnp.moveaxis(x, 0, 1).reshape(batch, -1)[:, :length]

  return join(log_probs), join(entropy)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Trained:
  """Which of the head's weights are differentiated; holds no arrays."""

  flags: tuple[bool, ...]

  def split(self, weights: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Splits weights into the trained and the frozen ones."""
    pairs = list(zip(self.flags, weights, strict=True))
    return [w for f, w in pairs if f], [w for f, w in pairs if not f]

  def join(self, trained: Iterable[Any], frozen: Iterable[Any]) -> list[Any]:
    """Inverts `split`."""
    trained, frozen = iter(trained), iter(frozen)
    return [next(trained if flag else frozen) for flag in self.flags]


def _unless_empty(
    mask: jax.Array, fn: Callable[..., chex.ArrayTree], *args: Any
) -> chex.ArrayTree:
  """`fn(*args)`, or zeros instead if the chunk has no token in the mask."""
  zeros = lambda *args: jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(fn, *args)
  )
  return lax.cond(jnp.any(mask), fn, zeros, *args)


def _chunk_statistics(compute: Callable[..., Any]) -> Callable[..., Any]:
  """Makes `(weights, h, targets, mask) -> log-probs, entropies` of one chunk.

  `compute(weights, h, targets)` gives them for all tokens, masked or not. The
  derivative is written by hand: autodiff would pass the head's weights from
  the branch of the forward pass to that of the backward pass, with a copy in
  every chunk.
  """

  def compute_and_slope(weights, h, targets):
    of_h = lambda h: compute(weights, h, targets)
    log_probs, pull, entropy = jax.vjp(of_h, h, has_aux=True)
    # A token's log-prob depends only on its own features.
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
    cotangent, _ = cotangents  # Entropies have no gradient.
    if isinstance(cotangent, SymbolicZero):
      return none, None, None, None
    cotangent = jnp.where(mask, cotangent, 0.0)
    if not any(trained.flags):
      # `where`, because a slope outside the mask can be NaN.
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


def _check_statistics(
    hidden: jax.Array,
    tokens: jax.Array,
    mask: jax.Array,
    sampling: Sampling,
    chunk_size: int,
) -> None:
  """Raises ValueError for bad arguments of `token_statistics`."""
  if sampling.greedy:
    raise ValueError(
        "temperature must be above 0, got 0: greedy decoding has no gradient"
    )
  if chunk_size < 1:
    raise ValueError(f"chunk_size must be at least 1 token, got {chunk_size}")
  if not hidden.shape[:2] == tokens.shape == mask.shape:
    raise ValueError(
        "hidden [B, C, D], tokens [B, C] and mask [B, C] must agree, got"
        f" {hidden.shape}, {tokens.shape} and {mask.shape}"
    )


def _chosen_and_entropy(
    logits: jax.Array, targets: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Log-softmax at the targets, and H = lse(z) - Σ_v p_v z_v.

  Logits of -inf contribute to neither.
  """
  # Not an indexed read, which would gather logits that are sharded over the
  # vocabulary.
  ids = lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
  hit = ids == targets[..., None]
  chosen = jnp.sum(jnp.where(hit, logits, 0.0), axis=-1)
  log_normalizer = jax.nn.logsumexp(logits, axis=-1)
  fixed = lax.stop_gradient(logits)
  probs = jax.nn.softmax(fixed, axis=-1)
  mean = jnp.sum(jnp.where(probs > 0, probs * fixed, 0.0), axis=-1)
  return chosen - log_normalizer, lax.stop_gradient(log_normalizer) - mean
