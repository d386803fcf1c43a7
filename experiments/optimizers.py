"""The optimizers that a config can name, each under the same KL budget.

An optimizer is an ordinary optax chain whose last link is
`logra_jax.kl_budget`. All of them train the same seven projections of every
layer, and leave everything else as it is.
"""

from collections.abc import Callable
import re
from typing import Any

import jax
import ml_collections
import optax

import logra_jax


def make_optimizer(
    config: ml_collections.ConfigDict,
) -> optax.GradientTransformationExtraArgs:
  """Builds the optimizer of `config.optimizer` and `config.kl`.

  Args:
    config: a config like `configs/quickstart.py`.

  Returns:
    A transformation whose update takes `probe=` (see `logra_jax.kl_probe`).

  Raises:
    ValueError: an unknown name, or a value that an optimizer refuses.
  """
  c = config.optimizer
  if c.name not in OPTIMIZERS:
    raise ValueError(
        f"config.optimizer.name={c.name!r} is not one of {sorted(OPTIMIZERS)}"
    )
  if (c.learning_rate > 0) == (c.update_ratio > 0):
    raise ValueError(
        f"config.optimizer.learning_rate={c.learning_rate} and"
        f" .update_ratio={c.update_ratio}: one must be positive, the other 0"
    )
  links = [OPTIMIZERS[c.name](c)]
  if c.learning_rate:
    links.append(optax.scale_by_learning_rate(c.learning_rate))
  links.append(
      logra_jax.kl_budget(_budget(config.kl), alpha_max=config.kl.alpha_max)
  )
  return optax.chain(*links)


def _budget(c: ml_collections.ConfigDict) -> float | optax.Schedule:
  """A constant, or a cosine from `budget` to `final_budget`."""
  if c.budget == c.final_budget:
    return c.budget
  return logra_jax.cosine_budget(c.budget, c.final_budget, c.anneal_updates)


def _logra(c: ml_collections.ConfigDict) -> optax.GradientTransformation:
  """Sketches, with momentum (fixed basis only) before RowAdam."""
  inner = [
      logra_jax.scale_by_row_adam(
          b2=c.beta2, eps=c.eps, norm_preserving=c.norm_preserving
      )
  ]
  if c.momentum:
    inner.insert(0, optax.trace(c.momentum))
  return logra_jax.sketch(
      c.rank,
      targets=logra_jax.DEFAULT_TARGETS,
      inner=optax.chain(*inner),
      seed=c.seed,
      distribution=c.distribution,
      refresh=c.refresh,
      weight_decay=c.weight_decay,
      update_ratio=c.update_ratio or None,
  )


def _dense_adam(c: ml_collections.ConfigDict) -> optax.GradientTransformation:
  """Adam on the dense gradients of the same kernels."""
  if c.update_ratio:
    raise ValueError(
        f"config.optimizer.update_ratio={c.update_ratio} needs the optimizer"
        " 'logra'; give dense_adam a learning_rate"
    )
  adam = optax.chain(
      optax.scale_by_adam(b1=c.momentum, b2=c.beta2, eps=c.eps),
      optax.add_decayed_weights(c.weight_decay),
  )
  return only_targets(adam)


def only_targets(
    tx: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Trains the default targets by `tx`, and nothing else."""
  return optax.partition(
      {"targets": tx, "frozen": optax.set_to_zero()}, _labels
  )


def _labels(params: Any) -> Any:
  """The name of the partition of each parameter."""

  def label(path, leaf):
    del leaf
    name = "/".join(str(key.key) for key in path)
    return (
        "targets" if re.fullmatch(logra_jax.DEFAULT_TARGETS, name) else "frozen"
    )

  return jax.tree_util.tree_map_with_path(label, params)


OPTIMIZERS: dict[
    str, Callable[[ml_collections.ConfigDict], optax.GradientTransformation]
] = {
    "logra": _logra,
    "dense_adam": _dense_adam,
}
