"""The optimizer state of `sketch`, and what the other calls read from it."""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from logra_jax import _paths
from logra_jax._dense import SketchedKernel
from logra_jax._targets import Target


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Update:
  """The update of one parameter, as `sketch` emits it.

  A pytree of two arrays, so that whatever scales updates scales all of it: for
  a target `ΔW = Aᵀ · value + weight_decay · scale · W`, and `value` itself for
  a densely trained parameter.

  Attributes:
    value: `[*batch, rank, d_out]` float32 for a target (the factor), else of
      the parameter's shape.
    scale: float32 scalar, 1 as emitted: the product of all that has scaled the
      update since. It makes weight decay decoupled (`learning rate · decay`),
      and its sign tells whether a learning rate has turned the direction into
      a descent step. Without weight decay only the sign counts, and it is
      emitted as `UNSEEN`.
  """

  value: jax.Array
  scale: jax.Array


# A scale too small for norms of updates to notice, far from underflow.
UNSEEN = 2.0**-40


def is_update(x: Any) -> bool:
  """Leaf predicate of update trees: `Update`, or None where frozen."""
  return x is None or isinstance(x, Update)


@dataclasses.dataclass(frozen=True)
class Plan:
  """What `sketch.init` decided; static.

  Attributes:
    targets: the sketched kernels, in the tree's order.
    dense: paths trained by the nested optimizer.
    frozen: paths that are not trained.
    refresh: whether every update has its own basis.
    factor_dtype: name of the dtype factors are rounded to before the merge.
  """

  targets: tuple[Target, ...]
  dense: tuple[str, ...]
  frozen: tuple[str, ...]
  refresh: bool
  factor_dtype: str


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
  """A plan as a pytree without leaves, so that states hold arrays only."""

  plan: Plan


class SketchState(NamedTuple):
  """State of `sketch`. Its leaves are arrays, none of a kernel's shape.

  Attributes:
    count: int32 scalar, updates so far; the basis is a function of it.
    seed: uint32 scalar.
    weight_decay: float32 scalar.
    skipped: int32 scalar, steps skipped for a gradient that was not finite.
    inner: state of the transformation of the thin arrays.
    others: state of the nested optimizer.
    static: what is fixed at `init`; has no leaves.
  """

  count: jax.Array
  seed: jax.Array
  weight_decay: jax.Array
  skipped: jax.Array
  inner: Any
  others: Any
  static: Static

  @property
  def plan(self) -> Plan:
    return self.static.plan

  def keys(self, count: jax.Array) -> dict[str, jax.Array]:
    """Key data of every target's basis at an update count, by path."""
    count = count if self.plan.refresh else jnp.zeros_like(count)
    return {t.path: t.key(self.seed, count) for t in self.plan.targets}


def find_states(opt_state: Any, kind: type | tuple[type, ...]) -> list[Any]:
  """All states of a kind (or several), wherever chains have put them."""
  is_kind = lambda x: isinstance(x, kind)
  return [s for s in jax.tree.leaves(opt_state, is_leaf=is_kind) if is_kind(s)]


class View:
  """A parameter tree split into what is differentiated and what is not.

  `free` holds, by path, what the loss is differentiated by: the slot of a
  target's sketch, zeros, or the parameter itself where it is trained densely.
  `tree(free)` is the tree the model gets.
  """

  def __init__(self, params: Any, opt_state: Any):
    self._flat, self._treedef = _paths.flatten(params)
    self.targets: dict[str, tuple[Target, jax.Array, SketchState]] = {}
    frozen: set[str] = set()
    for state in find_states(opt_state, SketchState):
      keys = state.keys(state.count)
      for t in state.plan.targets:
        self.targets[t.path] = (t, keys[t.path], state)
      frozen.update(state.plan.frozen)
    self._check()
    self.trained = [
        path
        for path, leaf in self._flat.items()
        if path not in frozen and jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]

  def _check(self) -> None:
    for path, (target, _, _) in self.targets.items():
      shape = getattr(self._flat.get(path), "shape", None)
      if shape != target.shape:
        raise ValueError(
            f"params has shape {shape} at {path!r} where opt_state was made"
            f" for {target.shape}; make opt_state by tx.init(params) with the"
            " same parameter tree"
        )

  def owner(self, where: str) -> str | None:
    """The parameter that an optimizer state's path belongs to."""
    return _paths.owner(self._flat, where)

  def free(self) -> dict[str, Any]:
    thin = lambda target: jnp.zeros(target.thin, jnp.float32)
    return {
        path: thin(self.targets[path][0])
        if path in self.targets
        else self._flat[path]
        for path in self.trained
    }

  def tree(self, free: dict[str, Any]) -> Any:
    """The parameter tree for reverse mode, with `free` put in."""

    def node(path):
      target, key, _ = self.targets[path]
      return SketchedKernel(self._flat[path], free[path], key, target)

    return self._tree(free, node)

  def perturbation(
      self, updates: Any
  ) -> tuple[Callable[[dict], Any], dict[str, Any], dict[str, Any]]:
    """The parameters along the direction `updates`, for forward mode.

    Returns:
      A function of values by path that gives the tree for the model, and the
      values' primals and tangents. Of a target the value is only how much of
      its update is taken, so that no second thin array is in memory.
    """
    flat, _ = _paths.flatten(updates, is_leaf=is_update)
    moved = {p: flat[p] for p in self.trained if flat[p] is not None}
    primals, tangents = {}, {}
    for path, update in moved.items():
      if path in self.targets:
        batch = self.targets[path][0].batch
        primals[path] = jnp.zeros(batch, jnp.float32)
        tangents[path] = jnp.ones(batch, jnp.float32)
      else:
        value = update.value if isinstance(update, Update) else update
        primals[path] = self._flat[path]
        tangents[path] = value.astype(self._flat[path].dtype)

    def tree(free):
      def node(path):
        target, key, state = self.targets[path]
        update = moved[path]
        return SketchedKernel(
            self._flat[path],
            update.value,
            key,
            target,
            decay=jnp.broadcast_to(
                state.weight_decay * update.scale, target.batch
            ),
            step=free[path],
        )

      return self._tree(free, node)

    return tree, primals, tangents

  def _tree(self, free: dict[str, Any], node: Callable[[str], Any]) -> Any:
    """The parameters with `free` put in, targets by `node(path)`."""
    leaves = []
    for path, leaf in self._flat.items():
      if path in free:
        leaf = node(path) if path in self.targets else free[path]
      leaves.append(leaf)
    return jax.tree.unflatten(self._treedef, leaves)

  def like_params(self, by_path: dict[str, Any]) -> Any:
    """A tree of the parameters' structure; None where a path is missing."""
    return jax.tree.unflatten(
        self._treedef, [by_path.get(path) for path in self._flat]
    )
