"""Reports about an optimizer state: a table for people, scalars for logs."""

import math

import chex
import jax
import jax.numpy as jnp
import optax

from logra_jax import _paths, _state
from logra_jax._kl_budget import KLBudgetState

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def _bytes(number: float) -> str:
  """Formats a number of bytes, such as `1.5 KiB`."""
  power = 0
  while number >= 1024 and power < len(_UNITS) - 1:
    number, power = number / 1024, power + 1
  return f"{number:.1f} {_UNITS[power]}" if power else f"{number} B"


def _size(tree: chex.ArrayTree) -> int:
  """Returns the size of a tree in bytes."""
  return sum(
      math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
      for leaf in jax.tree.leaves(tree)
  )


def summary(params: optax.Params, opt_state: optax.OptState) -> str:
  """Formats a table of all parameters: how they are trained, and their size.

  Args:
    params: The parameter tree, with arrays or `jax.ShapeDtypeStruct` leaves.
    opt_state: The optimizer state for `params`, likewise.

  Returns:
    A table with one line for each target (shape, rank, bytes of the kernel and
    of its gradient), then one for each densely trained and each frozen
    parameter, and the totals.

  Examples:
    >>> import jax.numpy as jnp, logra_jax
    >>> params = {
    ...     'norm': jnp.ones(8), 'q_proj': {'kernel': jnp.ones((8, 6))}}
    >>> opt_state = logra_jax.sketch(rank=4).init(params)
    >>> print(logra_jax.summary(params, opt_state))
    parameter      shape   trained           bytes  gradient
    q_proj/kernel  [8, 6]  sketched, rank 4  192 B  96 B
    norm           [8]     frozen            32 B   -
    <BLANKLINE>
    sketched  192 B in 1 arrays, gradients 96 B
    densely   0 B in 0 arrays
    frozen    32 B in 1 arrays
    optimizer state 44 B
  """
  flat, _ = _paths.flatten(params)
  states = _state.find_states(opt_state, _state.SketchState)
  targets = [t for s in states for t in s.plan.targets]
  frozen = [p for s in states for p in s.plan.frozen]
  thin = {t.path: 4 * math.prod(t.thin) for t in targets}
  dense = [p for p in flat if p not in thin and p not in frozen]
  rows = [("parameter", "shape", "trained", "bytes", "gradient")]
  for t in targets:
    rows.append(
        (
            t.path,
            str(list(t.shape)),
            f"sketched, rank {t.rank}",
            _bytes(_size(flat[t.path])),
            _bytes(thin[t.path]),
        )
    )
  for kind, paths in (("densely", dense), ("frozen", frozen)):
    for path in paths:
      size = _bytes(_size(flat[path]))
      shape = str(list(flat[path].shape))
      rows.append((path, shape, kind, size, size if kind == "densely" else "-"))
  widths = [max(len(row[i]) for row in rows) for i in range(5)]
  lines = [
      "  ".join(
          cell.ljust(w) for cell, w in zip(row, widths, strict=True)
      ).rstrip()
      for row in rows
  ]
  total = lambda paths: _size([flat[p] for p in paths])
  lines += [
      "",
      f"sketched  {_bytes(total(thin))} in {len(thin)} arrays,"
      f" gradients {_bytes(sum(thin.values()))}",
      f"densely   {_bytes(total(dense))} in {len(dense)} arrays",
      f"frozen    {_bytes(total(frozen))} in {len(frozen)} arrays",
      f"optimizer state {_bytes(_size(opt_state))}",
  ]
  return "\n".join(lines)


def diagnostics(opt_state: optax.OptState) -> dict[str, jax.Array]:
  """Collects scalars about the last update, for logs.

  Args:
    opt_state: The state of a transformation that contains `kl_budget`, `sketch`
      or both.

  Returns:
    A dict with 'skipped', the number of steps skipped so far for any reason.
    With a `kl_budget` it also has 'predicted_kl' (of the update before scaling)
    and 'budget', both in nats per generated token, 'alpha' (the factor that
    scaled the update), and 'mismatch' (nats per token).

  Examples:
    >>> import jax.numpy as jnp, logra_jax
    >>> tx = logra_jax.kl_budget(1e-3)
    >>> updates = {'w': jnp.ones(3)}
    >>> _, opt_state = tx.update(
    ...     updates, tx.init(updates), probe=lambda updates: 4e-3)
    >>> for name, value in logra_jax.diagnostics(opt_state).items():
    ...   print(f'{name}: {value:.4g}')
    predicted_kl: 0.004
    budget: 0.001
    alpha: 0.5
    mismatch: 0
    skipped: 0
  """
  out: dict[str, jax.Array] = {}
  skipped = jnp.zeros([], jnp.int32)
  for state in _state.find_states(
      opt_state, (_state.SketchState, KLBudgetState)
  ):
    skipped += state.skipped
    if isinstance(state, KLBudgetState):
      out |= {
          "predicted_kl": state.predicted,
          "budget": state.budget,
          "alpha": state.alpha,
          "mismatch": state.mismatch,
      }
      skipped += diagnostics(state.inner)["skipped"]
  return out | {"skipped": skipped}
