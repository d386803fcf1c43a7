"""Directions of a step, each made from one dense gradient.

A direction points uphill in the loss, as the gradient does. Its size is
arbitrary.
"""

from collections.abc import Callable
import dataclasses

import jax
import ml_collections
import numpy as np
import optax

from experiments.learning import optimizers
from experiments.learning.train_step import UpdateSettings
from experiments.studies import gradients
from experiments.studies.gain_per_kl.sweep import Direction
from experiments.studies.gradients import TargetArrays
import logra_jax

# Columns beyond the rank, and passes over the gradient, in `low_rank`. They are
# enough for singular values that fall as slowly as those of noise.
_OVERSAMPLE = 8
_PASSES = 3


def make(
    direction: Direction,
    gradient: TargetArrays,
    config: ml_collections.ConfigDict,
    seed: int,
) -> TargetArrays:
  """Makes the direction of a first step from a gradient.

  Args:
    direction: How it is made.
    gradient: Gradient by path, `[n_layers, d_in, d_out]` float32.
    config: Config of the run, with the settings of RowAdam and Muon.
    seed: Random seed of the basis.

  Returns:
    Arrays of the gradient's shapes.
  """
  return KINDS[direction.kind](direction, gradient, config, seed)


def _dense(direction, gradient, config, seed):
  """Returns the gradient itself."""
  del direction, config, seed
  return gradient


def _sign(direction, gradient, config, seed):
  """Returns Adam's first step."""
  del direction, config, seed
  return {path: np.sign(g) for path, g in gradient.items()}


def _sketch(direction, gradient, config, seed):
  """Returns the plain reconstruction `Aᵀ A G`."""
  del config
  bases = gradients.draw_bases(
      gradient, direction.rank, direction.distribution, seed
  )
  return {
      path: _back(bases[path], bases[path] @ g) for path, g in gradient.items()
  }


def _row_adam(direction, gradient, config, seed):
  """Returns the first step of RowAdam."""
  return _scaled_sketch(direction, gradient, config, seed, False)


def _row_adam_norm(direction, gradient, config, seed):
  """Returns the first step of RowAdam that keeps the sketch's norm."""
  return _scaled_sketch(direction, gradient, config, seed, True)


def _scaled_sketch(direction, gradient, config, seed, norm_preserving):
  """Returns `Aᵀ D`, where D is RowAdam's first step for the sketch."""
  bases = gradients.draw_bases(
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
  """Returns `Aᵀ D`."""
  # [L, d_in, d_out] = [L, r, d_in]ᵀ @ [L, r, d_out]
  return basis.swapaxes(-1, -2) @ factor


def _low_rank(direction, gradient, config, seed):
  """Returns nearly the best approximation of the gradient of some rank."""
  del config
  rng = np.random.default_rng(seed)
  return {
      path: low_rank(g, direction.rank, rng) for path, g in gradient.items()
  }


def low_rank(
    matrices: np.ndarray, rank: int, rng: np.random.Generator
) -> np.ndarray:
  """Approximates matrices by ones of lower rank, nearly as well as possible.

  Args:
    matrices: `[L, d_in, d_out]`.
    rank: Rank of the approximations.
    rng: Draws the random start of the subspace iteration.

  Returns:
    `[L, d_in, d_out]`.
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
  """Returns Muon's first step."""
  del direction, seed
  settings = dataclasses.replace(
      UpdateSettings.of_config(config).optimizer,
      momentum=0.0,
      weight_decay=0.0,
  )
  return _first_step(optimizers.OPTIMIZERS["muon"](settings), gradient)


def _first_step(
    tx: optax.GradientTransformation, gradient: TargetArrays
) -> TargetArrays:
  """Returns what a transformation makes of its first gradient."""
  # Only weight decay, which is 0, would read the parameters.
  make_step = lambda g: tx.update(g, tx.init(g), g)[0]
  return jax.tree.map(np.asarray, jax.jit(make_step)(gradient))


KINDS: dict[str, Callable[..., TargetArrays]] = {
    "dense": _dense,
    "sign": _sign,
    "sketch": _sketch,
    "row_adam": _row_adam,
    "row_adam_norm": _row_adam_norm,
    "low_rank": _low_rank,
    "orthogonal": _orthogonal,
}
