"""Directions of a step, each made of one dense gradient.

A direction points up the loss, as the gradient does; its size is arbitrary.
"""

from collections.abc import Callable

import jax
import ml_collections
import numpy as np
import optax

from experiments.learning import optimizers
from experiments.studies import gradients
from experiments.studies.gain_per_kl.sweep import Direction
from experiments.studies.gradients import Arrays
import logra_jax

# Columns beyond the rank, and passes over the gradient, in `low_rank`: for
# singular values that fall as slowly as those of noise.
_OVERSAMPLE = 8
_PASSES = 3


def make(
    direction: Direction,
    gradient: Arrays,
    config: ml_collections.ConfigDict,
    seed: int,
) -> Arrays:
  """The direction of a first step with this gradient.

  Args:
    direction: how it is made.
    gradient: by path, `[n_layers, d_in, d_out]` float32.
    config: for the settings of RowAdam and Muon.
    seed: of the basis.

  Returns:
    Arrays like the gradient.
  """
  return KINDS[direction.kind](direction, gradient, config, seed)


def _dense(direction, gradient, config, seed):
  del direction, config, seed
  return gradient


def _sign(direction, gradient, config, seed):
  """Adam's first step."""
  del direction, config, seed
  return {path: np.sign(g) for path, g in gradient.items()}


def _sketch(direction, gradient, config, seed):
  """The plain reconstruction `Aᵀ A G`."""
  del config
  bases = gradients.bases(
      gradient, direction.rank, direction.distribution, seed
  )
  return {
      path: _back(bases[path], bases[path] @ g) for path, g in gradient.items()
  }


def _row_adam(direction, gradient, config, seed):
  return _scaled_sketch(direction, gradient, config, seed, False)


def _row_adam_norm(direction, gradient, config, seed):
  return _scaled_sketch(direction, gradient, config, seed, True)


def _scaled_sketch(direction, gradient, config, seed, norm_preserving):
  """`Aᵀ D`, with D RowAdam's first step for the sketch."""
  bases = gradients.bases(
      gradient, direction.rank, direction.distribution, seed
  )
  tx = logra_jax.scale_by_row_adam(
      b2=config.optimizer.beta2,
      eps=config.optimizer.eps,
      norm_preserving=norm_preserving,
  )
  sketches = {path: bases[path] @ g for path, g in gradient.items()}
  factors = _first_step(tx, sketches)
  return {path: _back(bases[path], d) for path, d in factors.items()}


def _back(basis: np.ndarray, factor: np.ndarray) -> np.ndarray:
  # [L, d_in, d_out] = [L, r, d_in]ᵀ @ [L, r, d_out]
  return basis.swapaxes(-1, -2) @ factor


def _low_rank(direction, gradient, config, seed):
  """The best approximation of a rank, to the accuracy of `low_rank`."""
  del config
  rng = np.random.default_rng(seed)
  return {
      path: low_rank(g, direction.rank, rng) for path, g in gradient.items()
  }


def low_rank(
    matrices: np.ndarray, rank: int, rng: np.random.Generator
) -> np.ndarray:
  """The best approximation of a rank of each `[L, d_in, d_out]`.

  By subspace iteration from a random start.
  """
  columns = min(rank + _OVERSAMPLE, *matrices.shape[-2:])
  start = rng.standard_normal((matrices.shape[-1], columns))
  q, _ = np.linalg.qr(matrices @ start.astype(matrices.dtype))
  for _ in range(_PASSES):
    p, _ = np.linalg.qr(matrices.swapaxes(-1, -2) @ q)
    q, _ = np.linalg.qr(matrices @ p)
  u, s, vt = np.linalg.svd(q.swapaxes(-1, -2) @ matrices, full_matrices=False)
  return (q @ u[..., :rank] * s[..., None, :rank]) @ vt[..., :rank, :]


def _orthogonal(direction, gradient, config, seed):
  """Muon's first step."""
  del direction, seed
  c = ml_collections.ConfigDict(config.optimizer.to_dict())
  c.momentum, c.weight_decay = 0.0, 0.0
  return _first_step(optimizers.OPTIMIZERS["muon"](c), gradient)


def _first_step(tx: optax.GradientTransformation, gradient: Arrays) -> Arrays:
  """What a transformation makes of its first gradient."""
  # Parameters are only asked for by weight decay, which is 0.
  make = lambda g: tx.update(g, tx.init(g), g)[0]
  return jax.tree.map(np.asarray, jax.jit(make)(gradient))


KINDS: dict[str, Callable[..., Arrays]] = {
    "dense": _dense,
    "sign": _sign,
    "sketch": _sketch,
    "row_adam": _row_adam,
    "row_adam_norm": _row_adam_norm,
    "low_rank": _low_rank,
    "orthogonal": _orthogonal,
}
