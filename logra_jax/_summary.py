"""What an optimizer state trains and how, for people and for logs."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from logra_jax import _paths, _state
from logra_jax._kl_budget import KLBudgetState

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def _bytes(number: float) -> str:
  power = 0
  while number >= 1024 and power < len(_UNITS) - 1:
    number, power = number / 1024, power + 1
  return f"{number:.1f} {_UNITS[power]}" if power else f"{number} B"


def _size(tree: Any) -> int:
  return sum(
      math.prod(leaf.shape) * jnp.dtype(leaf.dtype).itemsize
      for leaf in jax.tree.leaves(tree)
  )


def summary(params: Any, opt_state: Any) -> str:
  """A table of what is sketched, trained densely and frozen, with bytes.

  Args:
    params: the parameter tree, of arrays or of `jax.ShapeDtypeStruct`.
    opt_state: made for it, likewise.

  Returns:
    A line for each target (shape, rank, bytes of kernel and gradient), the
    other parameters by how they are trained, and totals.
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


def diagnostics(opt_state: Any) -> dict[str, jax.Array]:
  """Scalars of the last update, for logs.

  Args:
    opt_state: with a `kl_budget`, a `sketch`, or both in it.

  Returns:
    'predicted_kl' and 'budget' (nats per generated token, before scaling),
    'alpha' (the step's scale), 'mismatch' (nats per token), if there is a
    budget; 'skipped' (steps skipped so far, for any reason).
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
