"""`value_and_grad`, in which the gradient of a target is its sketch."""

from collections.abc import Callable
from typing import Any

import jax
from jax.tree_util import tree_flatten_with_path
import optax

from logra_jax import _paths, _state


def _check_foreign_states(opt_state: optax.OptState, view: _state.View) -> None:
  """Raises for a state outside `sketch` that does not fit thin updates."""
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
          f"opt_state has a dense array {shape} at {where!r}, but that target"
          " has thin updates; make the state with"
          " logra_jax.init(tx, params), or give the transformation to"
          " sketch(inner=...)"
      )
    # The gradients that MultiSteps accumulates all belong to one basis.
    stale = state.plan.refresh and shape == target.thin
    if stale and "acc_grads" not in where:
      raise ValueError(
          f"opt_state keeps a moment in sketch coordinates at {where!r}, which"
          " a refreshed basis makes stale; use sketch(refresh=False)"
      )


def value_and_grad(
    fun: Callable[..., Any], has_aux: bool = False
) -> Callable[..., tuple[Any, optax.Updates]]:
  """Like `jax.value_and_grad`, but the gradient of a target is its sketch.

  For a target kernel the backward pass computes `S = (X Aᵀ)ᵀ dY` instead of
  the dense gradient `G = Xᵀ dY`, which is never formed. Sketches with the same
  update count are linear in the loss, so they can be added over micro-batches
  as gradients are.

  Args:
    fun: The function to differentiate, `fun(params, *args, **kwargs)`. It
      returns a scalar, or `(scalar, aux)` if `has_aux`. In the tree it is
      given, only `logra_jax.dot_general` (and the layers built on it) can use
      the target kernels. A penalty over `jax.tree.leaves(params)` does not
      reach them; use the `weight_decay` of `sketch` instead.
    has_aux: Whether `fun` returns a pair.

  Returns:
    A function of `(params, opt_state, *args, **kwargs)` that returns the value
    (or `(value, aux)`) and the gradients. The gradients have the structure of
    `params`: the sketch `[*batch, rank, d_out]` float32 for a target, the
    dense gradient for a densely trained parameter, and None for a frozen one.

  Raises:
    ValueError: From the returned function, if `params` is not the tree that
      `opt_state` was made for, or if a state outside `sketch` holds a dense
      array for a target, or a moment in sketch coordinates although the basis
      is refreshed.

  Examples:
    >>> import jax.numpy as jnp, logra_jax
    >>> params = {'q_proj': {'kernel': jnp.ones((8, 6))}}
    >>> opt_state = logra_jax.sketch(rank=4).init(params)
    >>> def loss_fn(params, x):
    ...   return jnp.mean(logra_jax.dense(x, params['q_proj']['kernel']))
    >>> value, grads = logra_jax.value_and_grad(loss_fn)(
    ...     params, opt_state, jnp.ones((2, 8)))
    >>> float(value)
    8.0
    >>> grads['q_proj']['kernel'].shape
    (4, 6)
  """

  def value_and_sketch(params, opt_state, *args, **kwargs):
    view = _state.View(params, opt_state)
    _check_foreign_states(opt_state, view)

    def of_free(free):
      return fun(view.tree(free), *args, **kwargs)

    value, grads = jax.value_and_grad(of_free, has_aux=has_aux)(view.free())
    return value, view.like_params(grads)

  return value_and_sketch
