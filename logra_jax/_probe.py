"""Predicted and realised KL of an update, from the policy's own logits."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from logra_jax import _state

ApplyFn = Callable[[Any, Any], jax.Array]


def _identity_head(params: Any, hidden: jax.Array) -> jax.Array:
  del params
  return hidden


def _chunked_mean(
    token_fn: Callable[..., jax.Array],
    mask: jax.Array,
    chunk_size: int,
    *per_token: jax.Array,
) -> jax.Array:
  """Mean of `token_fn` over masked tokens, a chunk of tokens at a time.

  Args:
    token_fn: maps chunks `[chunk, ...]` of per_token to `[chunk]`.
    mask: `[..., T]` bool.
    chunk_size: tokens evaluated together.
    *per_token: `[..., T, D]` arrays.

  Returns:
    float32 scalar; NaN if the mask is empty.
  """
  if mask.shape != per_token[0].shape[:-1]:
    raise ValueError(
        f"completion_mask {mask.shape} does not fit what logits_fn returned,"
        f" {per_token[0].shape}; give one bool for each position of it"
    )
  # A chunk is some positions of all sequences, so that sequences sharded over
  # devices are evaluated by all devices at once.
  length = mask.shape[-1]
  n_sequences = mask.size // max(length, 1)
  rows = max(min(n_sequences, chunk_size), 1)
  columns = max(min(length, chunk_size // rows), 1)

  def chunks(x: jax.Array) -> jax.Array:  # [n_chunks, rows · columns, ...]
    x = x.reshape(n_sequences, length, *x.shape[mask.ndim :])
    pad = [(0, -n_sequences % rows), (0, -length % columns)]
    if pad != [(0, 0), (0, 0)]:
      x = jnp.pad(x, pad + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(
        rows, x.shape[0] // rows, x.shape[1] // columns, columns, *x.shape[2:]
    )
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(-1, rows * columns, *x.shape[4:])

  def body(_, xs):
    keep, *rest = xs
    # where, not a product: what stands at masked tokens may be anything.
    return None, jnp.sum(jnp.where(keep, token_fn(*rest), 0.0))

  xs = tuple(chunks(x) for x in (mask.astype(bool), *per_token))
  return jnp.sum(lax.scan(body, None, xs)[1]) / jnp.sum(mask)


def quadratic_kl(
    logits: jax.Array, tangent: jax.Array, temperature: float = 1.0
) -> jax.Array:
  """Second-order KL of the policy along a tangent of its logits.

  `KL(p ‖ p') ≈ ½ Σ_v p_v (δz_v/τ - Σ_u p_u δz_u/τ)²`, p = softmax(z/τ): half
  the variance of the logits' change under the policy.

  Args:
    logits: `[..., V]`.
    tangent: `[..., V]`, the change of the logits.
    temperature: τ, positive.

  Returns:
    `[...]` float32, nats per token.
  """
  p = jax.nn.softmax(logits.astype(jnp.float32) / temperature)
  change = tangent.astype(jnp.float32) / temperature
  change -= jnp.sum(p * change, axis=-1, keepdims=True)
  return 0.5 * jnp.sum(p * jnp.square(change), axis=-1)


def _excess(gap: jax.Array) -> jax.Array:
  """`eᵍ - 1 - g` near 0, where the plain difference cancels."""
  series = 1 + gap / 6
  for n in (5, 4, 3):
    series = 1 + gap / n * series
  return 0.5 * jnp.square(gap) * series


def exact_kl(
    logits: jax.Array, new_logits: jax.Array, temperature: float = 1.0
) -> jax.Array:
  """`KL(softmax(z/τ) ‖ softmax(z'/τ))`, `[...]` float32, nats per token.

  Accurate for nearby policies, whose KL is far below the rounding of their
  log-probabilities, and for distant ones; logits may be -inf.
  """
  z = logits.astype(jnp.float32) / temperature
  new_z = new_logits.astype(jnp.float32) / temperature
  log_p, log_q = jax.nn.log_softmax(z), jax.nn.log_softmax(new_z)
  p, q = jnp.exp(log_p), jnp.exp(log_q)
  # Nearby, log q - log p comes from the change of the logits, not from a
  # difference of logarithms.
  change = jnp.where((p > 0) | (q > 0), new_z - z, 0.0)
  change -= jnp.sum(p * change, axis=-1, keepdims=True)
  near = jnp.max(jnp.abs(change), axis=-1, keepdims=True) < 0.1
  near_change = jnp.where(near, change, 0.0)
  shift = jnp.sum(p * jnp.expm1(near_change), axis=-1, keepdims=True)
  gap = jnp.where(near, near_change - jnp.log1p(shift), log_q - log_p)
  # Σ p (log p - log q), each term made non-negative by q - p (they sum to 0).
  small = jnp.abs(gap) < 0.2
  terms = jnp.where(
      small,
      p * _excess(jnp.where(small, gap, 0.0)),
      q - p - jnp.where(p > 0, p * gap, 0.0),
  )
  return jnp.sum(terms, axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KLProbe:
  """Predicts the KL of an update; made by `kl_probe`, called by `kl_budget`.

  A pytree of arrays (and static functions), so that it may be passed in and
  out of `jit`.
  """

  params: Any
  opt_state: Any
  batch: Any
  logits_fn: ApplyFn = dataclasses.field(metadata={"static": True})
  head_fn: ApplyFn = dataclasses.field(metadata={"static": True})
  temperature: float = dataclasses.field(metadata={"static": True})
  chunk_size: int = dataclasses.field(metadata={"static": True})

  def reference(self) -> jax.Array:
    """What `realised_kl` keeps of the policy before the update."""
    return self.logits_fn(self.params, self.batch)

  def __call__(self, updates: Any) -> jax.Array:
    """Predicted KL of adding `updates` to the parameters.

    Args:
      updates: a tree as `tx.update` returns it: `Update`, array, or None.

    Returns:
      float32 scalar, nats per generated token; NaN if there is none.
    """
    view = _state.View(self.params, self.opt_state)
    tree, primals, tangents = view.perturbation(updates)
    hidden_fn = lambda free: self.logits_fn(tree(free), self.batch)
    hidden, hidden_dot = jax.jvp(hidden_fn, (primals,), (tangents,))

    def token_kl(h, h_dot):
      head_fn = lambda free, h: self.head_fn(tree(free), h)
      return quadratic_kl(
          *jax.jvp(head_fn, (primals, h), (tangents, h_dot)), self.temperature
      )

    mask = self.batch["completion_mask"]
    return _chunked_mean(token_kl, mask, self.chunk_size, hidden, hidden_dot)


def _check(batch: Any, temperature: float, chunk_size: int) -> None:
  if not hasattr(batch, "keys") or "completion_mask" not in batch.keys():
    raise ValueError(
        "probe_batch must be a mapping with 'completion_mask', True where the"
        " logits predict a generated token"
    )
  if not 0 < temperature < float("inf"):
    raise ValueError(
        f"temperature={temperature!r} must be positive and finite; the policy"
        " sampled at temperature 0 has no KL"
    )
  if not isinstance(chunk_size, int) or chunk_size < 1:
    raise ValueError(
        f"chunk_size={chunk_size!r} must be an int of at least 1 token"
    )
  mask = batch["completion_mask"]
  if not isinstance(mask, jax.core.Tracer) and not np.asarray(mask).any():
    raise ValueError(
        f"completion_mask {jnp.shape(mask)} has no generated token; a probe"
        " needs at least one response"
    )


def kl_probe(
    logits_fn: ApplyFn,
    params: Any,
    opt_state: Any,
    batch: Any,
    *,
    head_fn: ApplyFn | None = None,
    temperature: float = 1.0,
    chunk_size: int = 256,
) -> KLProbe:
  """A predictor of how far an update moves the policy, for `kl_budget`.

  One forward-mode pass along the whole update gives the change of the logits
  `δz = J Δθ`; the predicted KL is half its variance under the policy, averaged
  over generated tokens (see `quadratic_kl`). Target layers get their tangent
  from the thin factor: no dense update is formed. The head and the quadratic
  form are evaluated for `chunk_size` tokens at a time.

  Args:
    logits_fn: `logits_fn(params, batch)`, the policy's logits `[..., T, V]`,
      or, with head_fn, the head's input `[..., T, D]`.
    params: the parameters before the update.
    opt_state: the optimizer state before the update.
    batch: a mapping with what logits_fn needs and 'completion_mask'
      `[..., T]`: True where the logits predict a generated token, so False on
      padding and on all but the last token of the prompt.
    head_fn: `head_fn(params, hidden)` maps `[chunk, D]` to logits
      `[chunk, V]`. Without it all logits of the batch are alive at once.
    temperature: τ at which the policy samples.
    chunk_size: tokens whose logits are alive at once.

  Returns:
    A callable pytree to pass to `tx.update(..., probe=probe)`.

  Raises:
    ValueError: no completion_mask, one without a generated token (where its
      values are known; under `jit` the prediction is NaN and the step is
      skipped), temperature or chunk_size not positive.

  Reference: arXiv 2610.06647, the predicted KL.
  """
  _check(batch, temperature, chunk_size)
  return KLProbe(
      params=params,
      opt_state=opt_state,
      batch=batch,
      logits_fn=logits_fn,
      head_fn=head_fn or _identity_head,
      temperature=temperature,
      chunk_size=chunk_size,
  )


def realised_kl(
    probe: KLProbe, new_params: Any, reference: jax.Array | None = None
) -> jax.Array:
  """Exact KL from the probe's policy to that of `new_params`.

  Args:
    probe: made before the update, by `kl_probe`.
    new_params: the parameters after it.
    reference: `probe.reference()`, computed before the merge. Without it the
      old weights have to stay in memory beside the new ones. (Those of the
      head do so in any case, if it is trained.)

  Returns:
    `KL(old ‖ new)`, float32 scalar, nats per generated token of the probe.
  """
  old = probe.reference() if reference is None else reference
  new = probe.logits_fn(new_params, probe.batch)

  def token_kl(h, new_h):
    return exact_kl(
        probe.head_fn(probe.params, h),
        probe.head_fn(new_params, new_h),
        probe.temperature,
    )

  mask = probe.batch["completion_mask"]
  return _chunked_mean(token_kl, mask, probe.chunk_size, old, new)
