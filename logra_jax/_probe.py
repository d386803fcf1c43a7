"""Predicted and realised KL of an update, from the logits of the policy."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import TypeAlias

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from logra_jax import _state

Batch: TypeAlias = Mapping[str, chex.ArrayTree]
LogitsFn: TypeAlias = Callable[[optax.Params, Batch], jax.Array]
HeadFn: TypeAlias = Callable[[optax.Params, jax.Array], jax.Array]


def _identity_head(params: optax.Params, hidden: jax.Array) -> jax.Array:
  del params
  return hidden


def _chunked_mean(
    token_fn: Callable[..., jax.Array],
    mask: jax.Array,
    chunk_size: int,
    *per_token: jax.Array,
) -> jax.Array:
  """Averages `token_fn` over the tokens in the mask, chunk by chunk.

  Args:
    token_fn: Maps chunks `[chunk, ...]` of `per_token` to `[chunk]`.
    mask: `[..., T]`, read as bool.
    chunk_size: Number of tokens evaluated together.
    *per_token: Arrays `[..., T, D]`.

  Returns:
    float32 scalar, NaN if the mask is empty.
  """
  if mask.shape != per_token[0].shape[:-1]:
    raise ValueError(
        f"completion_mask {mask.shape} does not fit the output of logits_fn,"
        f" {per_token[0].shape}; give one bool for each of its positions"
    )
  mask = mask.astype(bool)
  # A chunk takes some positions of every sequence, so that all devices take
  # part in it when the sequences are sharded over devices.
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
    # Not a product: the values outside the mask can be NaN or infinite.
    return None, jnp.sum(jnp.where(keep, token_fn(*rest), 0.0))

  xs = tuple(chunks(x) for x in (mask, *per_token))
  total = jnp.sum(lax.scan(body, None, xs)[1])
  return total / jnp.sum(mask, dtype=jnp.float32)


def quadratic_kl(
    logits: jax.Array, tangent: jax.Array, temperature: float = 1.0
) -> jax.Array:
  """Second-order approximation of the KL when the logits change by a tangent.

  With p = softmax(z/τ), this is half the variance of the change of the logits
  under the policy::

    KL(p ‖ p') ≈ ½ Σ_v p_v (δz_v/τ - Σ_u p_u δz_u/τ)²

  Args:
    logits: Logits z `[..., V]`, any float dtype.
    tangent: Change δz of the logits, `[..., V]`.
    temperature: Positive sampling temperature τ.

  Returns:
    KL in nats per token, `[...]` float32.

  Examples:
    >>> import jax.numpy as jnp, logra_jax
    >>> logits, tangent = jnp.array([0.0, 0.0]), jnp.array([0.2, 0.0])
    >>> print(f'{logra_jax.quadratic_kl(logits, tangent):.5f}')
    0.00500
    >>> print(f'{logra_jax.exact_kl(logits, logits + tangent):.5f}')
    0.00499
  """
  p = jax.nn.softmax(logits.astype(jnp.float32) / temperature)
  change = tangent.astype(jnp.float32) / temperature
  change -= jnp.sum(p * change, axis=-1, keepdims=True)
  return 0.5 * jnp.sum(p * jnp.square(change), axis=-1)


def _excess(gap: jax.Array) -> jax.Array:
  """Computes `eᵍ - 1 - g` near 0, where the plain difference cancels."""
  series = 1 + gap / 6
  for n in (5, 4, 3):
    series = 1 + gap / n * series
  return 0.5 * jnp.square(gap) * series


def exact_kl(
    logits: jax.Array, new_logits: jax.Array, temperature: float = 1.0
) -> jax.Array:
  """Exact `KL(softmax(z/τ) ‖ softmax(z'/τ))`.

  The result is accurate both for distant policies and for nearby ones, whose
  KL can be far below the rounding error of their log-probabilities. Logits can
  be -inf.

  Args:
    logits: Logits z of the old policy, `[..., V]`, any float dtype.
    new_logits: Logits z' of the new policy, `[..., V]`.
    temperature: Positive sampling temperature τ.

  Returns:
    KL in nats per token, `[...]` float32.
  """
  z = logits.astype(jnp.float32) / temperature
  new_z = new_logits.astype(jnp.float32) / temperature
  log_p, log_q = jax.nn.log_softmax(z), jax.nn.log_softmax(new_z)
  p, q = jnp.exp(log_p), jnp.exp(log_q)
  # For nearby policies, compute log q - log p from the change of the logits
  # instead of subtracting two logarithms.
  possible = (p > 0) | (q > 0)
  finite = lambda x: jnp.where(possible, x, 0.0)  # -inf - -inf is NaN
  change = finite(new_z) - finite(z)
  change -= jnp.sum(p * change, axis=-1, keepdims=True)
  near = jnp.max(jnp.abs(change), axis=-1, keepdims=True) < 0.1
  near_change = jnp.where(near, change, 0.0)
  shift = jnp.sum(p * jnp.expm1(near_change), axis=-1, keepdims=True)
  gap = jnp.where(near, near_change - jnp.log1p(shift), log_q - log_p)
  # Σ p (log p - log q). Adding q - p, which sums to 0, makes each term
  # non-negative.
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

  It is a pytree whose functions and settings are static, so that it can be
  passed into and out of `jit`. See `kl_probe` for the fields.
  """

  params: optax.Params
  opt_state: optax.OptState
  batch: Batch
  logits_fn: LogitsFn = dataclasses.field(metadata={"static": True})
  head_fn: HeadFn = dataclasses.field(metadata={"static": True})
  temperature: float = dataclasses.field(metadata={"static": True})
  chunk_size: int = dataclasses.field(metadata={"static": True})

  def reference(self) -> jax.Array:
    """Returns what `realised_kl` needs of the policy before the update."""
    return self.logits_fn(self.params, self.batch)

  def __call__(self, updates: optax.Updates) -> jax.Array:
    """Predicts the KL of applying `updates` to the parameters.

    Args:
      updates: A tree of updates as `tx.update` returns it, with an `Update`, an
        array, or None for each parameter.

    Returns:
      Predicted KL in nats per generated token, float32 scalar. It is NaN if
      the batch has no generated token.
    """
    view = _state.View(self.params, self.opt_state)
    tree, primals, tangents = view.perturbation(updates)
    hidden_fn = lambda free: self.logits_fn(tree(free), self.batch)
    hidden, hidden_dot = jax.jvp(hidden_fn, (primals,), (tangents,))

    def token_kl(h, h_dot):
      head_fn = lambda free, h: self.head_fn(tree(free), h)
      logits, tangent = jax.jvp(head_fn, (primals, h), (tangents, h_dot))
      return quadratic_kl(logits, tangent, self.temperature)

    mask = self.batch["completion_mask"]
    return _chunked_mean(token_kl, mask, self.chunk_size, hidden, hidden_dot)


def _check(batch: Batch, temperature: float, chunk_size: int) -> None:
  """Raises ValueError for arguments of `kl_probe` that cannot work."""
  if not hasattr(batch, "keys") or "completion_mask" not in batch.keys():
    raise ValueError(
        "probe_batch must be a mapping with 'completion_mask', True where the"
        " logits predict a generated token"
    )
  if not 0 < temperature < float("inf"):
    raise ValueError(
        f"temperature={temperature!r} must be positive and finite; a greedy"
        " policy (temperature 0) has no KL"
    )
  if not isinstance(chunk_size, int) or chunk_size < 1:
    raise ValueError(
        f"chunk_size={chunk_size!r} must be an int of at least 1 token"
    )
  mask = batch["completion_mask"]
  if not isinstance(mask, jax.core.Tracer) and not np.asarray(mask).any():
    raise ValueError(
        f"completion_mask {jnp.shape(mask)} has no generated token; give the"
        " probe at least one response"
    )


def kl_probe(
    logits_fn: LogitsFn,
    params: optax.Params,
    opt_state: optax.OptState,
    batch: Batch,
    *,
    head_fn: HeadFn | None = None,
    temperature: float = 1.0,
    chunk_size: int = 256,
) -> KLProbe:
  """Makes a predictor of how far an update moves the policy, for `kl_budget`.

  A single forward-mode pass along the whole update gives the change of the
  logits, `δz = J Δθ`. The predicted KL is half the variance of δz under the
  policy, averaged over generated tokens (see `quadratic_kl`). The tangent of a
  target layer is computed from the thin factor, so no dense update is formed.
  The head and the quadratic form are evaluated for `chunk_size` tokens at a
  time.

  Args:
    logits_fn: `logits_fn(params, batch)` returns the logits of the policy,
      `[..., T, V]`, or, if `head_fn` is given, the input of the head,
      `[..., T, D]`.
    params: The parameters before the update.
    opt_state: The optimizer state before the update.
    batch: A mapping with the inputs of `logits_fn` and 'completion_mask'
      `[..., T]`, which is True where the logits predict a generated token.
      Numbers are read as bools: a mask is no weight.
      It is therefore False on padding and on all prompt tokens but the last.
    head_fn: `head_fn(params, hidden)` maps `[chunk, D]` to logits `[chunk, V]`.
      Without it, the logits of the whole batch are in memory at once.
    temperature: Temperature τ at which the policy samples.
    chunk_size: Number of tokens whose logits are in memory at once.

  Returns:
    A callable pytree to pass to `tx.update(..., probe=probe)`.

  Raises:
    ValueError: If `batch` has no completion mask, if the mask has no generated
      token (under `jit`, where its values are unknown, the prediction is NaN
      and the step is skipped), or if `temperature` or `chunk_size` is not
      positive.

  Examples:
    >>> import jax, jax.numpy as jnp, logra_jax, optax
    >>> def logits_fn(params, batch):
    ...   return logra_jax.dense(batch['x'], params['q_proj']['kernel'])
    >>> def loss_fn(params, batch):
    ...   return -jax.nn.log_softmax(logits_fn(params, batch))[:, 0].mean()
    >>> params = {'q_proj': {'kernel': jnp.eye(3)}}
    >>> batch = {
    ...     'x': jnp.eye(3), 'completion_mask': jnp.array([False, True, True])}
    >>> tx = optax.chain(logra_jax.sketch(rank=3), logra_jax.kl_budget(1e-4))
    >>> opt_state = tx.init(params)
    >>> _, grads = logra_jax.value_and_grad(loss_fn)(params, opt_state, batch)
    >>> probe = logra_jax.kl_probe(logits_fn, params, opt_state, batch)
    >>> updates, opt_state = tx.update(grads, opt_state, params, probe=probe)
    >>> new_params = logra_jax.apply_updates(params, updates, opt_state)
    >>> print(f'{logra_jax.realised_kl(probe, new_params):.1e}')
    1.0e-04

  References:
    LoGRA, arXiv 2610.06647: the predicted KL.
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
    probe: KLProbe, new_params: optax.Params, reference: jax.Array | None = None
) -> jax.Array:
  """Exact KL from the policy of the probe to that of `new_params`.

  Args:
    probe: A probe made by `kl_probe` before the update.
    new_params: The parameters after the update.
    reference: The result of `probe.reference()`, computed before the merge.
      Without it, the old weights must stay in memory along with the new ones.
      (Those of a trained head must do so in any case.)

  Returns:
    `KL(old ‖ new)` in nats per generated token of the probe, float32 scalar.
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
