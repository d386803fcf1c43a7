"""The optimizers that a config can name, each with or without a KL budget.

An optimizer is an ordinary optax chain: a direction, the learning rate, and
`logra_jax.kl_budget` as the last link, or around the others. All of them train
the same seven projections of every layer; everything else is frozen, or trained
by Adam.
"""

from collections.abc import Callable
import functools
import re
from typing import Any

import jax
import ml_collections
import optax

from experiments.models import lora
from experiments.parallel import sharding
import logra_jax

PyTree = Any
Make = Callable[[ml_collections.ConfigDict], optax.GradientTransformation]

_FROZEN = "frozen"


def make_optimizer(
    config: ml_collections.ConfigDict,
) -> optax.GradientTransformationExtraArgs:
  """Builds the optimizer of `config.optimizer` and `config.kl`.

  Args:
    config: a config like `configs/quickstart.py`.

  Returns:
    A transformation for parameters of `init_params`. With `config.kl.enabled`
    its update takes `probe=` (see `logra_jax.kl_probe`).

  Raises:
    ValueError: an unknown name, or a value that no run could use.
  """
  c = config.optimizer
  _check(c)
  # The rate is kept in the state: runs that differ in it share a program.
  rate = optax.inject_hyperparams(optax.scale_by_learning_rate)
  # With an update ratio the direction already has its size.
  links = [OPTIMIZERS[c.name](c), rate(learning_rate=c.learning_rate or 1.0)]
  budget = functools.partial(
      logra_jax.kl_budget, _budget(config.kl), alpha_max=config.kl.alpha_max
  )
  if not config.kl.enabled:
    return optax.chain(*links)
  if c.name == "logra":
    return optax.chain(*links, budget())
  # Moments are as they were after a step that is skipped; `sketch` sees to its
  # own.
  return budget(optax.chain(*links))


def skips_by_itself(config: ml_collections.ConfigDict) -> bool:
  """Whether a step that is not finite leaves parameters and state as they are.

  `logra_jax.sketch` and `kl_budget` see to that; other optimizers do not.
  """
  return config.kl.enabled or config.optimizer.name == "logra"


def init_params(config: ml_collections.ConfigDict, params: PyTree) -> PyTree:
  """What the optimizer of `config` trains: `params`, for LoRA with adapters.

  Args:
    config: a config like `configs/quickstart.py`.
    params: the model's parameters; also within `jax.eval_shape`.

  Returns:
    A tree that stands for `params` in the model. `lora.merge` gives plain
    arrays back.

  Raises:
    ValueError: there is nothing in `params` for LoRA to adapt.
  """
  c = config.optimizer
  if c.name != "lora":
    return params
  return lora.wrap(params, c.rank, c.lora_alpha, c.seed)


def _check(c: ml_collections.ConfigDict) -> None:
  """Raises ValueError for a value that is wrong for any optimizer."""
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
      raise ValueError(f"config.optimizer.{name}={c[name]!r} must be {wanted}")
  if (c.learning_rate > 0) == (c.update_ratio > 0):
    raise ValueError(
        f"config.optimizer.learning_rate={c.learning_rate} and"
        f" .update_ratio={c.update_ratio}: one must be positive, the other 0"
    )
  if c.name == "logra" and c.preconditioner == "adam" and c.refresh:
    raise ValueError(
        "config.optimizer.preconditioner='adam' keeps a moment for each"
        " coordinate of a sketch, which refresh=True makes stale; set"
        " refresh=False, or preconditioner='row_adam'"
    )
  if c.update_ratio and (c.name != "logra" or c.others != _FROZEN):
    raise ValueError(
        f"config.optimizer.update_ratio={c.update_ratio} sizes the steps of"
        f" logra's targets alone, not those of name={c.name!r} with"
        f" others={c.others!r}; give a learning_rate in its place"
    )


def _budget(c: ml_collections.ConfigDict) -> float | optax.Schedule:
  """A constant, or a cosine from `budget` to `final_budget`."""
  if c.budget == c.final_budget:
    return c.budget
  return logra_jax.cosine_budget(c.budget, c.final_budget, c.anneal_updates)


def _logra(c: ml_collections.ConfigDict) -> optax.GradientTransformation:
  """Sketches, with momentum (fixed basis only) before a preconditioner."""
  inner = PRECONDITIONERS[c.preconditioner](c)
  # What `sketch` is given descends, at learning rate 1: it is negated again
  # before the chain's learning rate.
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
    c: ml_collections.ConfigDict, norm_preserving: bool
) -> optax.GradientTransformation:
  """Momentum, then a second moment for each output unit."""
  row_adam = logra_jax.scale_by_row_adam(c.beta2, c.eps, norm_preserving)
  return optax.chain(_momentum(c), row_adam)


def _momentum(c: ml_collections.ConfigDict) -> optax.GradientTransformation:
  """A running sum of gradients; nothing is kept where momentum is 0."""
  return optax.trace(c.momentum) if c.momentum else optax.identity()


def _adam(c: ml_collections.ConfigDict) -> optax.GradientTransformation:
  """Adam's direction, with the momentum as its first moment."""
  return optax.scale_by_adam(b1=c.momentum, b2=c.beta2, eps=c.eps)


def _dense_sgd(c: ml_collections.ConfigDict) -> optax.GradientTransformation:
  """Momentum on the dense gradients of the same kernels."""
  decay = optax.add_decayed_weights(c.weight_decay)
  return _on_targets(c, optax.chain(_momentum(c), decay))


def _dense_adam(c: ml_collections.ConfigDict) -> optax.GradientTransformation:
  """`optax.adamw` on the dense gradients of the same kernels."""
  return _on_targets(c, _adamw(c))


def _lora(c: ml_collections.ConfigDict) -> optax.GradientTransformation:
  """`optax.adamw` on the adapters of the same kernels."""
  return _on_targets(c, _adamw(c), f"{logra_jax.DEFAULT_TARGETS}/[ab]")


def _galore(c: ml_collections.ConfigDict) -> optax.GradientTransformation:
  """`optax.contrib.galore` on the same kernels, each layer by itself."""
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


def _muon(c: ml_collections.ConfigDict) -> optax.GradientTransformation:
  """`optax.contrib.muon` on the same kernels, each layer by itself."""
  # Axes that are neither input nor output stack matrices.
  axes = optax.contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
  muon = optax.contrib.muon(
      1.0,
      beta=c.momentum,
      eps=c.eps,
      weight_decay=c.weight_decay,
      muon_weight_dimension_numbers=lambda p: jax.tree.map(lambda _: axes, p),
      # Steps of Adam's size, for one learning rate is there for all.
      consistent_rms=0.2,
  )
  return _on_targets(c, optax.chain(muon, optax.scale(-1.0)))


def _adamw(c: ml_collections.ConfigDict) -> optax.GradientTransformation:
  """The direction of AdamW, before the learning rate."""
  return optax.chain(
      _adam(c),
      optax.add_decayed_weights(c.weight_decay),
  )


def _adam_of_others(
    c: ml_collections.ConfigDict,
) -> optax.GradientTransformation:
  """The direction of what is no target, the same for all optimizers."""
  return optax.scale_by_adam(b1=0.9, b2=c.beta2, eps=c.eps)


def per_layer(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Applies a transformation of matrices to stacks of them, one at a time.

  A loop, so that a branch within `tx` stays one, and so that what it makes of
  one matrix is gone before the next.

  Args:
    tx: a transformation that needs no parameters to update. Scalars in its
      state (counts) must be the same for all layers.

  Returns:
    A transformation of trees whose leaves are `[n_layers, ...]`; in its state
    what `tx` keeps for a matrix is stacked in the same way.
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


def _share_scalars(state: Any) -> Any:
  """One value for what is a scalar in every layer's state."""
  return jax.tree.map(lambda x: x if x.ndim > 1 else x[0], state)


def _on_targets(
    c: ml_collections.ConfigDict,
    tx: optax.GradientTransformation,
    targets: str = logra_jax.DEFAULT_TARGETS,
) -> optax.GradientTransformation:
  """Trains the targets by `tx` and the others by `config.optimizer.others`.

  What is frozen has the update None, as it has under `logra_jax.sketch`: it
  is neither merged nor part of the probe's perturbation.
  """

  def label(key_path, leaf):
    del leaf
    path = sharding.path_of(key_path)
    if re.fullmatch(targets, path):
      return "targets"
    # The kernel that adapters stand beside.
    within_target = re.fullmatch(f"{logra_jax.DEFAULT_TARGETS}/.*", path)
    return _FROZEN if within_target else c.others

  def labels(params):
    found = jax.tree_util.tree_map_with_path(label, params)
    if "targets" not in jax.tree.leaves(found):
      raise ValueError(
          f"config.optimizer.name={c.name!r} finds nothing to train: no path"
          f" matches {targets!r}; make the parameters with"
          " optimizers.init_params"
      )
    return found

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


# What is made of logra's sketches.
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
