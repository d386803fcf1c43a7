"""The optimizers that a config can name, each with or without a KL budget.

An optimizer is an ordinary optax chain: a direction, the learning rate, and
`logra_jax.kl_budget` as the last link or around the others. All of them train
the same seven projections of every layer; everything else is frozen or trained
by Adam.
"""

from collections.abc import Callable
import dataclasses
import functools
import re

import jax
import optax

from experiments.models import lora
from experiments.parallel import sharding
import logra_jax

Make = Callable[["OptimizerSettings"], optax.GradientTransformation]

_FROZEN = "frozen"


@dataclasses.dataclass(frozen=True)
class OptimizerSettings:
  """What turns gradients into a step: the section `config.optimizer`.

  The fields are explained in docs/config.md.

  Raises:
    ValueError: If no run could use a value; names it and what is allowed.
  """

  name: str
  others: str
  learning_rate: float
  update_ratio: float
  momentum: float
  beta2: float
  eps: float
  weight_decay: float
  rank: int
  seed: int
  lora_alpha: float
  galore_gap: int
  distribution: str
  refresh: bool
  preconditioner: str

  def __post_init__(self) -> None:
    _check_values(self)
    _check_combinations(self)

  def without_state(self) -> "OptimizerSettings":
    """The settings less what the optimizer's state carries.

    The seed and the learning rate are arrays in the state. Runs that differ in
    nothing else share a compiled program.
    """
    rate = float(self.learning_rate > 0)
    return dataclasses.replace(self, seed=0, learning_rate=rate)


@dataclasses.dataclass(frozen=True)
class BudgetSettings:
  """How far an update may move the policy: part of `config.kl`.

  Attributes:
    budget: KL of the first update, in nats per generated token.
    final_budget: KL of the update `anneal_updates` and of those after it.
    anneal_updates: Length of the cosine between the two.
    alpha_max: Largest factor that a step is scaled by.
  """

  budget: float
  final_budget: float
  anneal_updates: int
  alpha_max: float

  def schedule(self) -> float | optax.Schedule:
    """A constant, or a cosine from `budget` to `final_budget`."""
    if self.budget == self.final_budget:
      return self.budget
    return logra_jax.cosine_budget(
        self.budget, self.final_budget, self.anneal_updates
    )


def make_optimizer(
    optimizer: OptimizerSettings, budget: BudgetSettings | None
) -> optax.GradientTransformationExtraArgs:
  """Builds an optimizer.

  Args:
    optimizer: Which one, and its settings.
    budget: The KL budget of an update; None for steps of the learning rate.

  Returns:
    A transformation for parameters of `init_params`. With a budget its update
    takes `probe=` (see `logra_jax.kl_probe`).

  Raises:
    ValueError: If the library refuses a value.
  """
  # The rate is kept in the state: runs that differ in it share a program.
  rate = optax.inject_hyperparams(optax.scale_by_learning_rate)
  # With an update ratio the direction already has its size.
  links = [
      OPTIMIZERS[optimizer.name](optimizer),
      rate(learning_rate=optimizer.learning_rate or 1.0),
  ]
  if budget is None:
    return optax.chain(*links)
  within = functools.partial(
      logra_jax.kl_budget, budget.schedule(), alpha_max=budget.alpha_max
  )
  if optimizer.name == "logra":
    return optax.chain(*links, within())
  # The budget wraps the others, to restore their moments after a skipped step;
  # `sketch` restores its own.
  return within(optax.chain(*links))


def skips_by_itself(
    optimizer: OptimizerSettings, budget: BudgetSettings | None
) -> bool:
  """Whether a non-finite step leaves parameters and state unchanged.

  `logra_jax.sketch` and `logra_jax.kl_budget` see to that; other optimizers do
  not.
  """
  return budget is not None or optimizer.name == "logra"


def init_params(
    optimizer: OptimizerSettings, params: optax.Params
) -> optax.Params:
  """What the optimizer trains: `params`, with adapters in the case of LoRA.

  Args:
    optimizer: Which optimizer.
    params: The model's parameters; abstract ones inside `jax.eval_shape`.

  Returns:
    A tree that stands for `params` in the model. `lora.merge` gives plain
    arrays back.

  Raises:
    ValueError: If there is nothing in `params` for LoRA to adapt.
  """
  if optimizer.name != "lora":
    return params
  return lora.wrap(params, optimizer.rank, optimizer.lora_alpha, optimizer.seed)


def _check_values(c: OptimizerSettings) -> None:
  """Raises ValueError for a value that no optimizer can use."""
  inf = float("inf")
  checks = {
      "name": (c.name in OPTIMIZERS, f"one of {sorted(OPTIMIZERS)}"),
      "learning_rate": (0 <= c.learning_rate < inf, "at least 0"),
      "update_ratio": (0 <= c.update_ratio < inf, "at least 0"),
      "momentum": (0 <= c.momentum < 1, "in [0, 1)"),
      "beta2": (0 <= c.beta2 < 1, "in [0, 1)"),
      "eps": (0 < c.eps < inf, "positive"),
      "weight_decay": (0 <= c.weight_decay < inf, "at least 0"),
      "rank": (c.rank >= 1, "at least 1"),
      "lora_alpha": (0 < c.lora_alpha < inf, "positive"),
      "galore_gap": (c.galore_gap >= 1, "at least 1"),
      "preconditioner": (
          c.preconditioner in PRECONDITIONERS,
          f"one of {sorted(PRECONDITIONERS)}",
      ),
      "others": (c.others in (_FROZEN, "adam"), "'frozen' or 'adam'"),
  }
  for name, (fine, wanted) in checks.items():
    if not fine:
      raise ValueError(f"{name}={getattr(c, name)!r} must be {wanted}")


def _check_combinations(c: OptimizerSettings) -> None:
  """Raises ValueError for values that cannot be combined."""
  if (c.learning_rate > 0) == (c.update_ratio > 0):
    raise ValueError(
        f"learning_rate={c.learning_rate} and update_ratio={c.update_ratio}:"
        " set one of them above 0, and the other to 0"
    )
  if c.name == "logra" and c.preconditioner == "adam" and c.refresh:
    raise ValueError(
        "preconditioner='adam' keeps a moment for each coordinate of a sketch,"
        " which refresh=True makes stale; set refresh=False, or"
        " preconditioner='row_adam'"
    )
  if c.update_ratio and (c.name != "logra" or c.others != _FROZEN):
    raise ValueError(
        f"update_ratio={c.update_ratio} sizes the steps of logra's targets"
        f" alone, not those of name={c.name!r} with others={c.others!r}; give a"
        " learning_rate instead"
    )


def _logra(c: OptimizerSettings) -> optax.GradientTransformation:
  """`logra_jax.sketch`: momentum (fixed basis only), then a preconditioner."""
  inner = PRECONDITIONERS[c.preconditioner](c)
  # `sketch` expects `others` to descend, as at learning rate 1, and negates its
  # updates, because the learning rate of the chain negates them again.
  others = optax.chain(_adam_of_others(c), optax.scale(-1.0))
  try:
    return logra_jax.sketch(
        c.rank,
        targets=logra_jax.DEFAULT_TARGETS,
        others=None if c.others == _FROZEN else others,
        inner=inner,
        seed=c.seed,
        distribution=c.distribution,
        refresh=c.refresh,
        weight_decay=c.weight_decay,
        update_ratio=c.update_ratio or None,
    )
  except ValueError as error:
    raise ValueError(f"config.optimizer: {error}") from error


def _row_adam(
    c: OptimizerSettings, norm_preserving: bool
) -> optax.GradientTransformation:
  """Momentum, then a second moment for each output unit."""
  row_adam = logra_jax.scale_by_row_adam(c.beta2, c.eps, norm_preserving)
  return optax.chain(_momentum(c), row_adam)


def _momentum(c: OptimizerSettings) -> optax.GradientTransformation:
  """A running sum of gradients; stateless if momentum is 0."""
  return optax.trace(c.momentum) if c.momentum else optax.identity()


def _adam(c: OptimizerSettings) -> optax.GradientTransformation:
  """Adam's direction, with the momentum as its first moment."""
  return optax.scale_by_adam(b1=c.momentum, b2=c.beta2, eps=c.eps)


def _dense_sgd(c: OptimizerSettings) -> optax.GradientTransformation:
  """Momentum on the dense gradients of the same kernels."""
  decay = optax.add_decayed_weights(c.weight_decay)
  return _on_targets(c, optax.chain(_momentum(c), decay))


def _dense_adam(c: OptimizerSettings) -> optax.GradientTransformation:
  """`optax.adamw` on the dense gradients of the same kernels."""
  return _on_targets(c, _adamw(c))


def _lora(c: OptimizerSettings) -> optax.GradientTransformation:
  """`optax.adamw` on the adapters of the same kernels."""
  return _on_targets(c, _adamw(c), f"{logra_jax.DEFAULT_TARGETS}/[ab]")


def _galore(c: OptimizerSettings) -> optax.GradientTransformation:
  """`optax.contrib.galore` on the same kernels, layer by layer."""
  scale_by_galore = optax.contrib.scale_by_galore(
      rank=c.rank,
      update_proj_gap=c.galore_gap,
      base_optimizer=_adam(c),
  )
  return _on_targets(
      c,
      optax.chain(
          per_layer(scale_by_galore), optax.add_decayed_weights(c.weight_decay)
      ),
  )


def _muon(c: OptimizerSettings) -> optax.GradientTransformation:
  """`optax.contrib.muon` on the same kernels, layer by layer."""
  # Muon takes axes that are neither input nor output as a stack of matrices.
  axes = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
  muon = optax.contrib.muon(
      1.0,
      beta=c.momentum,
      eps=c.eps,
      weight_decay=c.weight_decay,
      muon_weight_dimension_numbers=lambda p: jax.tree.map(lambda _: axes, p),
      # Steps of Adam's size, so that one learning rate suits every optimizer.
      consistent_rms=0.2,
  )
  return _on_targets(c, optax.chain(muon, optax.scale(-1.0)))


def _adamw(c: OptimizerSettings) -> optax.GradientTransformation:
  """The direction of AdamW, before the learning rate."""
  return optax.chain(
      _adam(c),
      optax.add_decayed_weights(c.weight_decay),
  )


def _adam_of_others(
    c: OptimizerSettings,
) -> optax.GradientTransformation:
  """The direction of parameters that are not targets, for all optimizers."""
  return optax.scale_by_adam(b1=0.9, b2=c.beta2, eps=c.eps)


def per_layer(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Applies a transformation of matrices to stacks of them, one at a time.

  It is a loop instead of a `vmap`, so that a branch within `tx` remains a
  branch, and so that its temporaries exist for one matrix at a time.

  Args:
    tx: A transformation whose update needs no parameters. Scalars in its state
      (counts) must be the same for all layers.

  Returns:
    A transformation of trees whose leaves are `[n_layers, ...]`. What `tx`
    keeps for a matrix is stacked in the same way in its state.
  """

  def init(params):
    return _share_scalars(jax.lax.map(tx.init, params))

  def update(updates, state, params=None):
    del params
    leaves, treedef = jax.tree.flatten(state)
    stacked = [x for x in leaves if x.ndim]

    def one(args):
      grads, own = args
      own = iter(own)
      full = [next(own) if x.ndim else x for x in leaves]
      return tx.update(grads, jax.tree.unflatten(treedef, full))

    out, new_state = jax.lax.map(one, (updates, stacked))
    return out, _share_scalars(new_state)

  return optax.GradientTransformation(init, update)


def _share_scalars(state: optax.OptState) -> optax.OptState:
  """Keeps one value of what is a scalar in the state of every layer."""
  return jax.tree.map(lambda x: x if x.ndim > 1 else x[0], state)


def _on_targets(
    c: OptimizerSettings,
    tx: optax.GradientTransformation,
    targets: str = logra_jax.DEFAULT_TARGETS,
) -> optax.GradientTransformation:
  """Trains the targets by `tx` and the others as `others` of the settings says.

  The update of a frozen parameter is None, as under `logra_jax.sketch`: it is
  neither merged nor part of the probe's perturbation.
  """

  def label(key_path, leaf):
    del leaf
    path = sharding.path_of(key_path)
    if re.fullmatch(targets, path):
      return "targets"
    # The frozen kernel to which adapters belong.
    within_target = re.fullmatch(f"{logra_jax.DEFAULT_TARGETS}/.*", path)
    return _FROZEN if within_target else c.others

  def labels(params):
    by_leaf = jax.tree_util.tree_map_with_path(label, params)
    if "targets" not in jax.tree.leaves(by_leaf):
      raise ValueError(
          f"config.optimizer.name={c.name!r} finds nothing to train: no path"
          f" matches {targets!r}; make the parameters with"
          " optimizers.init_params"
      )
    return by_leaf

  def without_frozen(updates, params):
    del params
    return jax.tree.map(
        lambda label, x: None if label == _FROZEN else x,
        labels(updates),
        updates,
    )

  transforms = {
      "targets": tx,
      "adam": _adam_of_others(c),
      _FROZEN: optax.set_to_zero(),
  }
  return optax.chain(
      optax.partition(transforms, labels), optax.stateless(without_frozen)
  )


# How `logra` turns sketches into a direction.
PRECONDITIONERS: dict[str, Make] = {
    "row_adam": functools.partial(_row_adam, norm_preserving=False),
    "norm_preserving": functools.partial(_row_adam, norm_preserving=True),
    "adam": _adam,
    "none": _momentum,
}

OPTIMIZERS: dict[str, Make] = {
    "logra": _logra,
    "dense_adam": _dense_adam,
    "dense_sgd": _dense_sgd,
    "lora": _lora,
    "galore": _galore,
    "muon": _muon,
}
