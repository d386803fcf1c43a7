"""The optimizer state of `sketch`, and the parameter tree it implies."""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

from flax import serialization
import jax
import jax.numpy as jnp
import optax

from logra_jax import _paths
from logra_jax._dense import SketchedKernel
from logra_jax._targets import Target


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Update:
  """The update of one parameter, as emitted by `sketch`.

  It is a pytree of two arrays, so that any transformation that scales updates
  scales both. For a target it represents
  `ΔW = Aᵀ · value + weight_decay · scale · W`, and for a densely trained
  parameter `value` itself.

  Attributes:
    value: The factor `[*batch, rank, d_out]` float32 for a target; otherwise an
      array of the parameter's shape.
    scale: float32 scalar, emitted as 1: the product of all factors that have
      scaled the update since. It makes weight decay decoupled (learning rate
      times decay), and its sign tells whether a learning rate has turned the
      direction into a descent step. Without weight decay only its sign is used,
      and it is emitted as 2⁻⁴⁰ so as not to affect norms of updates.
  """

  value: jax.Array
  scale: jax.Array


# A scale that is too small to affect norms of updates, but far from underflow.
UNSEEN = 2.0**-40


def is_update(x: Any) -> bool:
  """Leaf predicate of update trees: an `Update`, or None if frozen."""
  return x is None or isinstance(x, Update)


@dataclasses.dataclass(frozen=True)
class Plan:
  """Static decisions made by the `init` function of `sketch`.

  Attributes:
    targets: The sketched kernels, in the order of the parameter tree.
    dense: Paths of the parameters trained by the nested optimizer.
    frozen: Paths of the parameters that are not trained.
    refresh: Whether every update has its own basis.
    factor_dtype: Name of the dtype that factors are rounded to in the merge.
  """

  targets: tuple[Target, ...]
  dense: tuple[str, ...]
  frozen: tuple[str, ...]
  refresh: bool
  factor_dtype: str


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Static:
  """A plan as a pytree without leaves, so that states hold only arrays."""

  plan: Plan


# The plan follows from the arguments of `sketch` and the parameters, so a saved
# state need not hold it: the one it is restored into does.
serialization.register_serialization_state(
    Static, lambda static: {}, lambda static, saved: static
)


class SketchState(NamedTuple):
  """State of `sketch`. Its leaves are arrays, none of them a dense kernel.

  Attributes:
    count: Number of updates so far, int32 scalar. It determines the basis.
    seed: Random seed of the bases, uint32 scalar.
    weight_decay: Weight decay of the targets, float32 scalar.
    skipped: Number of steps skipped because a gradient, the update or a moment
      was not finite, int32 scalar.
    inner: State of the transformation of the sketches.
    others: State of the nested optimizer.
    static: The plan that was fixed by `init`; it has no leaves.
  """

  count: jax.Array
  seed: jax.Array
  weight_decay: jax.Array
  skipped: jax.Array
  inner: optax.OptState
  others: optax.OptState
  static: Static

  @property
  def plan(self) -> Plan:
    """What is sketched, trained densely, and frozen."""
    return self.static.plan

  def keys(self, count: jax.Array) -> dict[str, jax.Array]:
    """Returns the key data of every target's basis at `count`, by path."""
    count = count if self.plan.refresh else jnp.zeros_like(count)
    return {t.path: t.key(self.seed, count) for t in self.plan.targets}


def find_states(
    opt_state: optax.OptState, kind: type | tuple[type, ...]
) -> list[Any]:
  """Returns all states of the given types, however deeply nested."""
  is_kind = lambda x: isinstance(x, kind)
  return [s for s in jax.tree.leaves(opt_state, is_leaf=is_kind) if is_kind(s)]


class View:
  """A parameter tree, split into differentiated and constant arrays.

  `free()` returns, by path, the arrays that the loss is differentiated with
  respect to: for a target the zeros in the slot of its sketch, and for a
  densely trained parameter the parameter itself. `tree(free)` returns the tree
  for the model.
  """

  def __init__(self, params: optax.Params, opt_state: optax.OptState):
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
    """Raises ValueError unless the parameters fit the optimizer state."""
    for path, (target, _, _) in self.targets.items():
      shape = getattr(self._flat.get(path), "shape", None)
      if shape != target.shape:
        raise ValueError(
            f"params has shape {shape} at {path!r}, but opt_state was made for"
            f" {target.shape}; make opt_state with tx.init(params) from the"
            " same parameter tree"
        )

  def owner(self, where: str) -> str | None:
    """Returns the parameter to which a path in the optimizer state belongs."""
    return _paths.owner(self._flat, where)

  def free(self) -> dict[str, jax.Array]:
    """Returns the arrays to differentiate with respect to, by path."""
    thin = lambda target: jnp.zeros(target.thin, jnp.float32)
    return {
        path: thin(self.targets[path][0])
        if path in self.targets
        else self._flat[path]
        for path in self.trained
    }

  def tree(self, free: dict[str, jax.Array]) -> optax.Params:
    """Returns the parameter tree for reverse mode, with `free` inserted."""

    def node(path):
      target, key, _ = self.targets[path]
      return SketchedKernel(self._flat[path], free[path], key, target)

    return self._tree(free, node)

  def perturbation(self, updates: optax.Updates) -> tuple[
      Callable[[dict[str, jax.Array]], optax.Params],
      dict[str, jax.Array],
      dict[str, jax.Array],
  ]:
    """Returns the parameters along the direction `updates`, for forward mode.

    Returns:
      A function from values by path to the tree for the model, the primals of
      these values, and their tangents. The value of a target is just the
      fraction of its update that is taken, `[*batch]`, so that no second thin
      array is in memory.
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

  def _tree(
      self,
      free: dict[str, jax.Array],
      node: Callable[[str], SketchedKernel],
  ) -> optax.Params:
    """Returns the parameters with `free` inserted, targets as `node(path)`."""
    leaves = []
    for path, leaf in self._flat.items():
      if path in free:
        leaf = node(path) if path in self.targets else free[path]
      leaves.append(leaf)
    return jax.tree.unflatten(self._treedef, leaves)

  def like_params(self, by_path: dict[str, Any]) -> Any:
    """Returns a tree with the structure of params, None for missing paths."""
    return jax.tree.unflatten(
        self._treedef, [by_path.get(path) for path in self._flat]
    )
