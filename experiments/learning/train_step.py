"""One update as a pure function: sketches, probe, step, merge.

gradients = Σ over micro-batches          (sketches add up exactly)
probe     = δlogits of the proposed step  (forward mode, a few responses)
update    = optimizer(gradients, probe)   (scaled to the KL budget)
params    = merge(params, update)
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

import chex
from flax import struct
import jax
import jax.numpy as jnp
import ml_collections
import optax

from experiments import _settings
from experiments.learning import (
    correction,
    likelihood,
    losses,
    optimizers,
    packing,
)
from experiments.learning.objectives import Tokens
from experiments.parallel import sharding
from experiments.rollouts.sampling import Sampling
import logra_jax

Metrics = dict[str, jax.Array]


@struct.dataclass
class TrainState:
  """Everything that an update changes.

  Attributes:
    params: The model's parameters.
    opt_state: The state of the optimizer.
    update: Number of updates done, int32 scalar. The prompts and random keys of
      an update are functions of the config's seeds and of this number.
  """

  params: optax.Params
  opt_state: optax.OptState
  update: jax.Array


@struct.dataclass
class Batch:
  """What one update learns from: M micro-batches of G rows, and a probe.

  Attributes:
    rows: Packed tokens, `[M, G, ...]`.
    tokens: What the loss needs about the generated ones, `[M, G, K]`.
    probe: Rows that the KL is measured on, `[b, ...]`.
    count: Number of micro-batches that hold tokens, int32 scalar; those after
      it are not computed. None means all of them.
    mismatch: The sampler's log-prob less the trainer's, in nats per token,
      float32 scalar; 0 if it is not measured.
  """

  rows: packing.Rows
  tokens: Tokens
  probe: packing.Rows
  count: jax.Array | None
  mismatch: jax.Array


@dataclasses.dataclass(frozen=True)
class UpdateSettings:
  """Everything that an update reads of a config.

  Attributes:
    sampling: How the responses were sampled.
    loss: Which policy loss.
    correction: The kind of importance correction, see `correction.weights`.
    correction_cap: The largest importance weight.
    chunk: Number of tokens whose logits are in memory at once.
    optimizer: What turns gradients into a step.
    budget: How far the step may move the policy; None for no limit.
    measure: Whether to measure the KL of the step after the merge.
    mismatch: Whether to subtract the gap between sampler and trainer from the
      budget.
  """

  sampling: Sampling
  loss: losses.LossSettings
  correction: str
  correction_cap: float
  chunk: int
  optimizer: optimizers.OptimizerSettings
  budget: optimizers.BudgetSettings | None
  measure: bool
  mismatch: bool

  def __post_init__(self) -> None:
    correction.check(self.correction, self.correction_cap)
    _settings.check_least(self, chunk=1)

  @classmethod
  def of_config(cls, config: ml_collections.ConfigDict) -> "UpdateSettings":
    """Reads a config like `configs/quickstart.py`.

    Raises:
      ValueError: If a value is out of range; names the field.
    """
    kl, loss = config.kl, config.loss
    budget = None
    if kl.enabled:
      budget = _settings.read(optimizers.BudgetSettings, kl, "config.kl.")
    return _settings.read(
        cls,
        loss,
        "config.loss.",
        sampling=Sampling.of_config(config.rollout),
        loss=_settings.read(losses.LossSettings, loss, "config.loss: "),
        optimizer=_settings.read(
            optimizers.OptimizerSettings, config.optimizer, "config.optimizer."
        ),
        budget=budget,
        measure=kl.measure,
        mismatch=kl.mismatch,
    )

  def program_key(self) -> "UpdateSettings":
    """The settings that the compiled program depends on.

    They leave out what is an array in the optimizer's state.
    """
    return dataclasses.replace(self, optimizer=self.optimizer.without_state())

  def make_optimizer(self) -> optax.GradientTransformationExtraArgs:
    """The optimizer within its budget, see `optimizers.make_optimizer`."""
    return optimizers.make_optimizer(self.optimizer, self.budget)


def init_state(
    params: optax.Params, tx: optax.GradientTransformation
) -> TrainState:
  """Returns the state before the first update."""
  opt_state = logra_jax.init(tx, params)
  return TrainState(params, opt_state, jnp.zeros((), jnp.int32))


def make_train_step(
    model: packing.Model,
    tx: optax.GradientTransformationExtraArgs,
    settings: UpdateSettings,
    eos_ids: Sequence[int] = (),
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
  """Builds the update; jit it, and donate the state.

  Args:
    model: The policy.
    tx: The optimizer of `settings`.
    settings: What the update reads of a config.
    eos_ids: Tokens that end a response; required by `rollout.min_new_tokens`.

  Returns:
    `train_step(state, batch) -> (state, metrics)`. Metrics are float32 scalars;
    those of KL are in nats per generated token.
  """
  tx = optax.with_extra_args_support(tx)
  policy = _Policy(model, settings, eos_ids)

  def train_step(state, batch):
    grads, metrics = _accumulate(policy, state, batch)
    if not optimizers.skips_by_itself(settings.optimizer, settings.budget):
      return _unless_broken(tx, state, grads, metrics)
    # A non-finite loss poisons the gradients, and the optimizer skips the step.
    finite = jnp.isfinite(metrics["train/loss"])
    grads = jax.tree.map(
        lambda g: jnp.where(finite, g, jnp.nan).astype(g.dtype), grads
    )
    probe = None
    if settings.budget is not None:
      probe = logra_jax.kl_probe(
          policy.features,
          state.params,
          state.opt_state,
          {"rows": batch.probe, "completion_mask": batch.probe.target_mask},
          head_fn=policy.head,
          temperature=settings.sampling.temperature,
          chunk_size=settings.chunk,
      )
    updates, opt_state = tx.update(
        grads,
        state.opt_state,
        state.params,
        probe=probe,
        mismatch=batch.mismatch,
    )
    if probe is not None:
      metrics |= _kl_metrics(opt_state)
    skipped = lambda state: logra_jax.diagnostics(state)["skipped"]
    metrics["train/skipped"] = skipped(opt_state) - skipped(state.opt_state)
    params, measured = _merge(
        state.params, updates, opt_state, probe, settings.measure
    )
    return TrainState(params, opt_state, state.update + 1), metrics | measured

  return train_step


def make_prepare(
    model: packing.Model, settings: UpdateSettings, eos_ids: Sequence[int] = ()
) -> Callable[..., tuple[Batch, Metrics]]:
  """Builds the preparation of a batch for its first step; jit it.

  Args:
    model: The policy.
    settings: What the update reads of a config.
    eos_ids: Tokens that end a response.

  Returns:
    `prepare(params, reference, batch, finished) -> (batch, metrics)`. It takes
    the parameters about to be trained, those of the reference policy (or None),
    and `finished`, `[M, G, K]` bool, True at tokens of responses that ended by
    themselves. The returned batch holds the trainer's own log-probs to measure
    ratios from, weights corrected for the gap between sampler and trainer, the
    gap itself, and the log-probs of the reference policy.
  """
  policy = _Policy(model, settings, eos_ids)

  def log_probs(params, batch):
    def one(i, out):
      rows = _split(jax.tree.map(lambda x: x[i], batch.rows))
      return out.at[i].set(policy.statistics(params, rows)[0])

    out = jnp.zeros(batch.rows.targets.shape, jnp.float32)
    return jax.lax.fori_loop(0, batch.count, one, out)

  def prepare(params, reference, batch, finished):
    tokens = batch.tokens
    trainer = log_probs(params, batch)
    # Treat the rows of all micro-batches as one batch.
    flat = lambda x: x.reshape(-1, x.shape[-1])
    seen = (tokens.old_log_probs, trainer, tokens.mask, tokens.response)
    seen = tuple(map(flat, seen))
    kind, cap = settings.correction, settings.correction_cap
    gap = correction.gap_metrics(*seen, flat(finished), kind=kind, cap=cap)
    weights = correction.weights(*seen, kind=kind, cap=cap)
    weights = weights.reshape(tokens.weights.shape)
    tokens = tokens.replace(
        old_log_probs=trainer,
        weights=tokens.weights * weights,
        reference_log_probs=(
            log_probs(reference, batch) if settings.loss.reference_kl else None
        ),
    )
    mismatch = gap["gap"] if settings.mismatch else batch.mismatch
    batch = batch.replace(tokens=tokens, mismatch=mismatch)
    names = {
        "gap": "train/off_policy_gap",
        "gap_max": "train/off_policy_gap_max",
        "kl": "train/off_policy_kl",
        "truncated": "train/truncated_weights",
    }
    return batch, {name: gap[key] for key, name in names.items()}

  return prepare


class _Policy:
  """The model as functions of packed rows."""

  def __init__(
      self,
      model: packing.Model,
      settings: UpdateSettings,
      eos_ids: Sequence[int],
  ) -> None:
    self._model = model
    self._settings = settings
    self._eos_ids = tuple(eos_ids)

  def features(
      self, params: optax.Params, batch: Mapping[str, Any]
  ) -> jax.Array:
    """The features that predict the generated tokens, `[G, K, D]`."""
    return packing.features(self._model, params, batch["rows"])

  def head(self, params: optax.Params, hidden: jax.Array) -> jax.Array:
    """Logits `[..., V]` of features."""
    return self._model.apply({"params": params}, hidden, method="head")

  def statistics(
      self, params: optax.Params, rows: packing.Rows
  ) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies of the generated tokens, `[G, K]` each."""
    return likelihood.token_statistics(
        self.head,
        params,
        packing.features(self._model, params, rows),
        rows.targets,
        rows.target_mask,
        sampling=self._settings.sampling,
        eos_ids=self._eos_ids,
        steps=rows.target_step,
        chunk_size=self._settings.chunk,
    )

  def loss(
      self, params: optax.Params, micro_batch: tuple[packing.Rows, Tokens]
  ) -> tuple[jax.Array, Metrics]:
    """The loss of a micro-batch, and metrics of its tokens."""
    rows, tokens = micro_batch
    log_probs, entropy = self.statistics(params, rows)
    loss, metrics = losses.policy_loss(self._settings.loss, log_probs, tokens)
    # Entropies are 0 outside the mask.
    mean_entropy = jnp.sum(entropy) / jnp.maximum(metrics["tokens"], 1.0)
    return loss, metrics | {"entropy": mean_entropy}


def _unless_broken(
    tx: optax.GradientTransformationExtraArgs,
    state: TrainState,
    grads: optax.Updates,
    metrics: Metrics,
) -> tuple[TrainState, Metrics]:
  """Takes a step of an optimizer that does not skip non-finite ones itself."""
  leaves = [*jax.tree.leaves(grads), metrics["train/loss"]]
  finite = jnp.stack([jnp.all(jnp.isfinite(x)) for x in leaves]).all()

  def step(params, opt_state):
    updates, opt_state = tx.update(grads, opt_state, params)
    return logra_jax.apply_updates(params, updates, opt_state), opt_state

  params, opt_state = jax.lax.cond(
      finite, step, lambda *same: same, state.params, state.opt_state
  )
  metrics["train/skipped"] = 1.0 - finite
  return TrainState(params, opt_state, state.update + 1), metrics


def _merge(
    params: optax.Params,
    updates: optax.Updates,
    opt_state: optax.OptState,
    probe: Any,
    measure: bool,
) -> tuple[optax.Params, Metrics]:
  """The new parameters and, if `measure`, the KL that they turned out to cost.

  `probe` is a `logra_jax.kl_probe` or None.
  """
  if probe is None or not measure:
    return logra_jax.apply_updates(params, updates, opt_state), {}
  # The barrier keeps the merge after the last use of the old weights, so that
  # it can be in place; otherwise there would be two copies of them.
  reference, updates = jax.lax.optimization_barrier(
      (probe.reference(), updates)
  )
  params = logra_jax.apply_updates(params, updates, opt_state)
  realised = logra_jax.realised_kl(probe, params, reference)
  return params, {"kl/realised": realised}


def _kl_metrics(opt_state: optax.OptState) -> Metrics:
  """Predicted KL of the update in nats per generated token, and its scale."""
  values = logra_jax.diagnostics(opt_state)
  return {
      # KL is quadratic in the step, so this is that of the scaled step.
      "kl/predicted": jnp.square(values["alpha"]) * values["predicted_kl"],
      "kl/proposed": values["predicted_kl"],
      "kl/budget": values["budget"],
      "kl/step_scale": values["alpha"],
      "kl/skipped": values["skipped"],
      "kl/mismatch": values["mismatch"],
  }


def _split(tree: chex.ArrayTree) -> chex.ArrayTree:
  """Splits the rows over the devices."""
  return jax.tree.map(
      lambda x: sharding.constrain(x, "batch", *[None] * (x.ndim - 1)), tree
  )


def _accumulate(
    policy: _Policy, state: TrainState, batch: Batch
) -> tuple[optax.Updates, Metrics]:
  """Gradients and metrics of the batch, summed over its micro-batches."""
  grad_fn = logra_jax.value_and_grad(policy.loss, has_aux=True)

  def gradients(i):
    micro_batch = jax.tree.map(lambda x: x[i], (batch.rows, batch.tokens))
    value, grads = grad_fn(state.params, state.opt_state, _split(micro_batch))
    # The sketches are summed over the devices, and the sum is split at once.
    return value, sharding.constrain_gradients(grads, state.params)

  def add(i, carry):
    total, stacked = carry
    (loss, aux), grads = gradients(i)
    total = jax.tree.map(jnp.add, total, grads)
    aux |= {"loss": loss}
    return total, jax.tree.map(lambda s, x: s.at[i].set(x), stacked, aux)

  (_, aux), shapes = jax.eval_shape(gradients, 0)
  zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
  zeros = sharding.constrain_gradients(zeros, state.params)
  n = batch.rows.tokens.shape[0]
  stacked = {name: jnp.zeros(n) for name in (*aux, "loss")}
  count = n if batch.count is None else batch.count
  grads, stacked = jax.lax.fori_loop(0, count, add, (zeros, stacked))
  loss = jnp.sum(stacked.pop("loss"))
  metrics = losses.merge_metrics(stacked)
  del metrics["tokens"], metrics["ratio_mean"], metrics["kl"]
  named = {f"train/{name}": value for name, value in metrics.items()}
  return grads, {"train/loss": loss, **named}
