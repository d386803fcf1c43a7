"""One update as a pure function: sketches, probe, step, merge.

gradients = Σ over micro-batches          (sketches add up exactly)
probe     = δlogits of the update to come (forward mode, a few responses)
update    = optimizer(gradients, probe)   (scaled to the KL budget)
params    = merge(params, update)
"""

from collections.abc import Callable, Mapping
import functools
from typing import Any

from flax import struct
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from experiments import grpo, packing, sharding
from experiments.rollout import Rollout
import logra_jax

PyTree = Any
Metrics = dict[str, jax.Array]


@struct.dataclass
class TrainState:
  """All that an update changes.

  Attributes:
    params: the model's parameters.
    opt_state: state of the optimizer.
    update: int32 scalar, updates done. The prompts and random keys of an
      update are functions of the config's seeds and of this number.
  """

  params: PyTree
  opt_state: PyTree
  update: jax.Array


@struct.dataclass
class Batch:
  """What the learner sees of one update's rollouts, B responses.

  Attributes:
    rollout: token-aligned arrays `[B, T]`.
    advantages: `[B]` float32.
  """

  rollout: Rollout
  advantages: jax.Array


def init_state(params: PyTree, tx: optax.GradientTransformation) -> TrainState:
  """The state before the first update."""
  opt_state = logra_jax.init(tx, params)
  return TrainState(params, opt_state, jnp.zeros((), jnp.int32))


def make_train_step(
    model: Any,
    tx: optax.GradientTransformationExtraArgs,
    config: ml_collections.ConfigDict,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
  """Builds the update; jit it, and donate the state.

  Args:
    model: a `Decoder`.
    tx: of `optimizers.make_optimizer`.
    config: a config like `configs/quickstart.py`.

  Returns:
    `train_step(state, batch) -> (state, metrics)`; metrics are float32
    scalars, KL in nats per generated token.
  """
  tx = optax.with_extra_args_support(tx)
  temperature = config.rollout.temperature

  def features(params: PyTree, batch: Mapping[str, Any]) -> jax.Array:
    return packing.features(model, params, batch["packed"])

  def head_fn(params: PyTree, hidden: jax.Array) -> jax.Array:
    return model.apply({"params": params}, hidden, method="head")

  loss_fn = functools.partial(_loss, features, head_fn, config)

  def train_step(state, batch):
    grads, metrics = _accumulate(loss_fn, state, batch, config)
    probe = None
    if config.kl.enabled:
      probe = logra_jax.kl_probe(
          features,
          state.params,
          state.opt_state,
          _probe_batch(batch.rollout, config),
          head_fn=head_fn,
          temperature=temperature,
          chunk_size=config.loss.chunk,
      )
    updates, opt_state = tx.update(
        grads, state.opt_state, state.params, probe=probe
    )
    if probe is not None:
      metrics |= _kl_metrics(opt_state)
    params, measured = _merge(state.params, updates, opt_state, probe, config)
    return TrainState(params, opt_state, state.update + 1), metrics | measured

  return train_step


def _loss(features, head_fn, config, params, batch, normalizer):
  """The surrogate of a micro-batch, and metrics of its tokens."""
  rollout = batch["completion"]
  log_probs, entropy = grpo.token_statistics(
      head_fn,
      params,
      features(params, batch),
      rollout.tokens,
      rollout.completion_mask,
      temperature=config.rollout.temperature,
      chunk_size=config.loss.chunk,
  )
  loss, metrics = grpo.grpo_loss(
      log_probs,
      rollout.log_probs,
      batch["advantages"],
      rollout.completion_mask,
      config.loss.clip_low,
      config.loss.clip_high,
      normalizer,
  )
  # Entropies are 0 outside the mask.
  mean_entropy = jnp.sum(entropy) / jnp.maximum(metrics["tokens"], 1.0)
  return loss, metrics | {"entropy": mean_entropy}


def _merge(params, updates, opt_state, probe, config):
  """The new parameters, and the KL they turned out to cost if asked for."""
  if probe is None or not config.kl.measure:
    return logra_jax.apply_updates(params, updates, opt_state), {}
  # The barrier keeps the merge, which is in place, behind the last use of the
  # old weights; else there would be two copies of them.
  reference, updates = jax.lax.optimization_barrier(
      (probe.reference(), updates)
  )
  params = logra_jax.apply_updates(params, updates, opt_state)
  realised = logra_jax.realised_kl(probe, params, reference)
  return params, {"kl/realised": realised}


def _kl_metrics(opt_state):
  """Predicted KL of the update in nats per generated token, and its scale."""
  found = logra_jax.diagnostics(opt_state)
  return {
      # KL is quadratic in the step: that of the step as it was scaled.
      "kl/predicted": jnp.square(found["alpha"]) * found["predicted_kl"],
      "kl/proposed": found["predicted_kl"],
      "kl/budget": found["budget"],
      "kl/step_scale": found["alpha"],
      "kl/skipped": found["skipped"],
  }


def probe_rows(config: ml_collections.ConfigDict) -> np.ndarray:
  """Rows of the batch that the KL is measured on, of different prompts first.

  Returns:
    `[config.kl.probe_responses]` int32, distinct.
  """
  prompts, responses = config.rollout.prompts, config.rollout.responses
  rows = np.arange(prompts * responses, dtype=np.int32)
  by_response = rows.reshape(prompts, responses).T.reshape(-1)
  return by_response[: config.kl.probe_responses]


def _probe_batch(rollout, config):
  """The probe's responses, with a mask `[b, C]` of what predicts a token."""
  n_new = config.rollout.max_new_tokens
  rollout = _split(jax.tree.map(lambda x: x[probe_rows(config)], rollout), 0)
  return {
      # Of different prompts: nothing to share.
      "packed": packing.pack(rollout, n_new, 1),
      "completion_mask": rollout.completion_mask[:, -n_new:],
  }


def _micro_batches(batch, config):
  """The batch in the form of `loss_fn`, with a leading micro-batch axis."""
  n_new, k = config.rollout.max_new_tokens, config.loss.pack
  arrays = {
      "packed": packing.pack(batch.rollout, n_new, k),
      "advantages": batch.advantages,
      "completion": jax.tree.map(
          lambda x: x[:, -n_new:] if x.ndim == 2 else x, batch.rollout
      ),
  }
  n = batch.advantages.shape[0] // config.loss.micro_batch
  arrays = jax.tree.map(
      lambda x: x.reshape(n, x.shape[0] // n, *x.shape[1:]), arrays
  )
  return _split(arrays, 1)


def _split(tree, axis):
  """Splits the responses, which lie along `axis`, over the devices."""

  def one(x):
    names = [None] * x.ndim
    names[axis] = "batch"
    return sharding.constrain(x, *names)

  return jax.tree.map(one, tree)


def _accumulate(loss_fn, state, batch, config):
  """Gradients and metrics of the batch, as a sum over micro-batches."""
  normalizer = jnp.maximum(jnp.sum(batch.rollout.completion_mask), 1)
  micro_batches = _micro_batches(batch, config)
  grad_fn = logra_jax.value_and_grad(loss_fn, has_aux=True)

  def gradients(micro_batch):
    value, grads = grad_fn(
        state.params, state.opt_state, micro_batch, normalizer
    )
    # Summed over the devices' responses as sketches, and split at once.
    return value, sharding.constrain_gradients(grads, state.params)

  def add(total, micro_batch):
    (loss, aux), grads = gradients(micro_batch)
    return jax.tree.map(jnp.add, total, grads), (loss, aux)

  first = jax.tree.map(lambda x: x[0], micro_batches)
  _, shapes = jax.eval_shape(gradients, first)
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  zeros = sharding.constrain_gradients(zeros, state.params)
  grads, (losses, aux) = jax.lax.scan(add, zeros, micro_batches)
  metrics = grpo.merge_metrics(aux)
  return grads, {
      "train/loss": jnp.sum(losses),
      "train/entropy": metrics["entropy"],
      "train/clip_fraction": metrics["clip_fraction"],
      "train/ratio_max": metrics["ratio_max"],
  }
