"""`jax.value_and_grad` in which a target's gradient is its sketch."""

from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import tree_flatten_with_path

from logra_jax import _paths, _state


def _check_foreign_states(opt_state: Any, view: _state.View) -> None:
  """Refuses states outside `sketch` that cannot hold what they will get."""
  is_sketch = lambda x: isinstance(x, _state.SketchState)
  is_leaf = lambda x: is_sketch(x) or isinstance(x, _state.Update)
  for path, leaf in tree_flatten_with_path(opt_state, is_leaf=is_leaf)[0]:
    if is_sketch(leaf):
      continue
    where = _paths.path_string(path)
    owner = view.owner(where)
    if owner not in view.targets:
      continue
    target, _, state = view.targets[owner]
    value = leaf.value if isinstance(leaf, _state.Update) else leaf
    shape = value.shape
    if shape == target.shape != target.thin:
      raise ValueError(
          f"opt_state has a dense array {shape} at {where!r}, for a target"
          " whose updates are thin; make the state with"
          " logra_jax.init(tx, params), or give the transformation to"
          " sketch(inner=...)"
      )
    # What MultiSteps adds up is used up within one basis.
    stale = state.plan.refresh and shape == target.thin
    if stale and "acc_grads" not in where:
      raise ValueError(
          f"opt_state keeps a moment of thin coordinates at {where!r}, which"
          " a refreshed basis makes stale; use sketch(refresh=False)"
      )


def value_and_grad(
    fun: Callable[..., Any], has_aux: bool = False
) -> Callable[..., tuple[Any, Any]]:
  """Like `jax.value_and_grad`, with sketches for the targets of `sketch`.

  Args:
    fun: `fun(params, *args, **kwargs)`, a scalar, or `(scalar, aux)` if
      has_aux. It gets the ordinary tree, in which target kernels stand for
      themselves in `logra_jax.dot_general` and in nothing else: a penalty over
      `jax.tree.leaves(params)` does not reach them (use `weight_decay`).
    has_aux: whether `fun` returns a pair.

  Returns:
    A function of `(params, opt_state, *args, **kwargs)` that returns the value
    (or `(value, aux)`) and the gradients. These have the structure of
    `params`: a target's leaf is its sketch `[*batch, rank, d_out]` float32,
    a densely trained leaf its gradient, a frozen leaf None. Sketches of one
    update count are linear in the loss: add them over micro-batches as you
    would add gradients.

  Raises:
    ValueError: params is not the tree that opt_state was made for; a state
      outside `sketch` has a dense array for a target, or a moment of thin
      coordinates although the basis is refreshed.
  """

  def value_and_sketch(params, opt_state, *args, **kwargs):
    view = _state.View(params, opt_state)
    _check_foreign_states(opt_state, view)

    def of_free(free):
      return fun(view.tree(free), *args, **kwargs)

    value, grads = jax.value_and_grad(of_free, has_aux=has_aux)(view.free())
    return value, view.like_params(grads)

  return value_and_sketch
