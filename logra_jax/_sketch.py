"""`sketch`: the optax transformation that turns sketches into thin updates."""

from collections.abc import Mapping
import dataclasses
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from logra_jax import _basis, _finite, _paths, _state, _targets
from logra_jax._row_adam import scale_by_row_adam

Others: TypeAlias = (
    optax.GradientTransformation
    | Mapping[str, optax.GradientTransformation | None]
)


def _is_transformation(x: Any) -> bool:
  """Returns whether `x` has the methods of a gradient transformation."""
  return callable(getattr(x, "init", None)) and callable(
      getattr(x, "update", None)
  )


def _check_others(
    others: Others | None,
) -> dict[str, optax.GradientTransformation | None]:
  """Returns `others` as a dict from pattern to optimizer or None (frozen)."""
  if others is None:
    return {}
  if not isinstance(others, Mapping):
    others = {".*": others}
  _paths.check_patterns("others", others)
  for pattern, optimizer in others.items():
    if optimizer is not None and not _is_transformation(optimizer):
      raise ValueError(
          f"others[{pattern!r}]={optimizer!r} must be an optax optimizer, or"
          " None to freeze what the pattern matches"
      )
    if optimizer is not None and _sign_of(optimizer) > 0:
      raise ValueError(
          f"others[{pattern!r}] keeps the gradient's sign; it must descend:"
          " use an optimizer such as optax.adam(learning_rate)"
      )
  return dict(others)


def _sign_of(transformation: optax.GradientTransformation) -> int:
  """Returns the sign of the update for a gradient of ones, 0 if unknown."""
  ones = {"kernel": jnp.ones((2, 3), jnp.float32)}
  with jax.ensure_compile_time_eval():
    try:
      state = transformation.init(ones)
      out, _ = transformation.update(ones, state, ones)
      return int(jnp.sign(jnp.sum(out["kernel"])))
    except Exception:  # its labels or masks belong to another tree
      return 0


def _check_inner(inner: Any) -> None:
  """Raises ValueError unless `inner` is a transformation that keeps signs."""
  if not _is_transformation(inner):
    raise ValueError(
        f"inner={inner!r} must be an optax transformation, such as"
        " logra_jax.scale_by_row_adam()"
    )
  if _sign_of(inner) < 0:
    raise ValueError(
        "inner turns a gradient into a descent step; it must keep the sign, as"
        " optax.scale_by_adam() does: put the learning rate after sketch in"
        " the chain"
    )


def _check_scalars(**scalars: Any) -> None:
  """Raises ValueError for a value that is not positive and finite, or None."""
  for name, value in scalars.items():
    if value is None or isinstance(value, jax.Array):
      continue
    if not (isinstance(value, (int, float)) and 0 < value < float("inf")):
      raise ValueError(
          f"{name}={value!r} must be a positive finite number, or left out"
      )


def _check_seed(seed: Any) -> None:
  """Raises ValueError unless `seed` is an array or an int of 32 bits."""
  if not isinstance(seed, jax.Array) and not (
      isinstance(seed, (int, np.integer)) and 0 <= seed < 2**32
  ):
    raise ValueError(
        f"seed={seed!r} must be an int in [0, 2**32), for example 42"
    )


@dataclasses.dataclass(frozen=True)
class _Sketch:
  """The `init` and `update` of `sketch`; holds settings but no state."""

  rank: _targets.Rank
  targets: dict[str, str]
  others: dict[str, optax.GradientTransformation | None]
  inner: optax.GradientTransformationExtraArgs
  seed: int | jax.Array
  distribution: str
  refresh: bool
  weight_decay: float | jax.Array
  update_ratio: float | jax.Array | None
  clip_norm: float | jax.Array | None
  factor_dtype: str

  def _make_plan(self, params: optax.Params) -> _state.Plan:
    """Decides what is sketched, trained densely, and frozen."""
    flat, _ = _paths.flatten(params)
    for path, leaf in flat.items():
      if not hasattr(leaf, "dtype"):
        raise ValueError(
            f"params has {leaf!r} at {path!r}, which is not an array; make it"
            " one, as in jnp.asarray(x)"
        )
    targets = _targets.resolve(
        params, self.targets, self.rank, self.distribution
    )
    sketched = {t.path for t in targets}
    rest = [path for path in flat if path not in sketched]
    if list(self.others) != [".*"]:
      _paths.check_all_match("others", self.others, rest)
    dense = []
    for path in rest:
      pattern = _paths.first_match(self.others, path)
      inexact = jnp.issubdtype(flat[path].dtype, jnp.inexact)
      if pattern is not None and self.others[pattern] and inexact:
        dense.append(path)
    return _state.Plan(
        targets=targets,
        dense=tuple(dense),
        frozen=tuple(path for path in rest if path not in dense),
        refresh=self.refresh,
        factor_dtype=self.factor_dtype,
    )

  def _nested(self, plan: _state.Plan) -> optax.GradientTransformation:
    """Returns the optimizer of the dense parameters, given as dict by path."""
    labels = {p: _paths.first_match(self.others, p) for p in plan.dense}
    used = {pattern for pattern in labels.values() if pattern is not None}
    return optax.partition({p: self.others[p] for p in used}, labels)

  def init(self, params: optax.Params) -> _state.SketchState:
    """Makes the state; the `init` function of the transformation."""
    plan = self._make_plan(params)
    flat, _ = _paths.flatten(params)
    thin = {t.path: jnp.zeros(t.thin, jnp.float32) for t in plan.targets}
    inner = self.inner.init(thin)
    if plan.refresh:
      _check_no_thin_moment(inner, plan)
    return _state.SketchState(
        count=jnp.zeros([], jnp.int32),
        seed=jnp.asarray(self.seed, jnp.uint32),
        weight_decay=jnp.asarray(self.weight_decay, jnp.float32),
        skipped=jnp.zeros([], jnp.int32),
        inner=inner,
        others=self._nested(plan).init({p: flat[p] for p in plan.dense}),
        static=_state.Static(plan),
    )

  def update(
      self,
      updates: optax.Updates,
      state: _state.SketchState,
      params: optax.Params | None = None,
      **extra_args: Any,
  ) -> tuple[optax.Updates, _state.SketchState]:
    """Turns gradients into directions; the `update` of the transformation."""
    plan = state.plan
    flat, treedef = _paths.flatten(updates, is_leaf=lambda x: x is None)
    sketches = {t.path: flat.get(t.path) for t in plan.targets}
    dense = {path: flat.get(path) for path in plan.dense}
    _check_gradients(sketches, dense, plan)
    ok = _finite.all_finite((sketches, dense))
    sketches, dense = _finite.zero_unless(ok, (sketches, dense))
    if self.clip_norm is not None:
      norm = _norm(state, sketches, dense)
      factor = jnp.where(norm > self.clip_norm, self.clip_norm / norm, 1.0)
      sketches, dense = jax.tree.map(
          lambda g: (factor * g).astype(g.dtype), (sketches, dense)
      )
    thin, inner = self.inner.update(sketches, state.inner, None, **extra_args)
    flat_params = {} if params is None else _paths.flatten(params)[0]
    if self.update_ratio is not None:
      thin = self._at_ratio(thin, state, flat_params)
    dense, others = self._nested(plan).update(
        dense,
        state.others,
        {p: flat_params[p] for p in plan.dense} if flat_params else None,
        **extra_args,
    )
    # The nested optimizer returns a descent step, but `sketch` emits a
    # direction, which a learning rate or the KL budget will negate.
    out = dict.fromkeys(flat)
    scale = jnp.where(jnp.asarray(self.weight_decay) > 0, 1.0, _state.UNSEEN)
    for path, value in {**thin, **optax.tree.scale(-1, dense)}.items():
      out[path] = _state.Update(value, scale)
    # Even for finite gradients, the update or the moments can overflow.
    ok &= _finite.all_finite(out)
    ok &= _finite.none_lost((inner, others), (state.inner, state.others))
    inner, others = _finite.select(
        ok, (inner, others), (state.inner, state.others)
    )
    new_state = state._replace(
        weight_decay=jnp.asarray(self.weight_decay, jnp.float32),
        count=optax.safe_increment(state.count),
        skipped=jnp.where(
            ok, state.skipped, optax.safe_increment(state.skipped)
        ),
        inner=inner,
        others=others,
    )
    out = jax.tree.unflatten(treedef, list(out.values()))
    return _finite.zero_unless(ok, out), new_state

  def _at_ratio(
      self,
      thin: dict[str, jax.Array],
      state: _state.SketchState,
      flat_params: dict[str, jax.Array],
  ) -> dict[str, jax.Array]:
    """Scales the update so that ‖ΔW‖ = update_ratio · ‖W‖ over all targets."""
    if not flat_params:
      raise ValueError(
          "params=None, but update_ratio needs the norm of the weights; call"
          " tx.update(grads, opt_state, params, ...)"
      )
    weights = [flat_params[path].astype(jnp.float32) for path in thin]
    size = _norm(state, thin, {})
    wanted = self.update_ratio * optax.tree.norm(weights)
    return optax.tree.scale(jnp.where(size > 0, wanted / size, 0.0), thin)


def _norm(
    state: _state.SketchState,
    thin: dict[str, jax.Array],
    dense: dict[str, jax.Array],
) -> jax.Array:
  """Norm of all `Aᵀ D` and dense arrays together, without overflow."""
  leaves = jax.tree.leaves((thin, dense))
  peaks = [jnp.max(jnp.abs(x), initial=0).astype(jnp.float32) for x in leaves]
  peak = jnp.max(jnp.stack(peaks))
  unit = lambda x: x.astype(jnp.float32) / jnp.where(peak > 0, peak, 1.0)
  keys = state.keys(state.count)
  squares = [
      _basis_norm_squared(t, keys[t.path], unit(thin[t.path]))
      for t in state.plan.targets
  ]
  squares += [jnp.sum(jnp.square(unit(x))) for x in dense.values()]
  return peak * jnp.sqrt(sum(squares))


def _basis_norm_squared(
    target: _targets.Target, key_data: jax.Array, factor: jax.Array
) -> jax.Array:
  """Computes `‖Aᵀ D‖²` of a stack, with one basis in memory at a time."""
  stack = (key_data.reshape(-1, 2), factor.reshape(-1, *target.thin[-2:]))
  one = lambda x: _basis.gram_norm_squared(target.basis(x[0]), x[1])
  return jnp.sum(jax.lax.map(one, stack))


def _check_no_thin_moment(
    inner_state: optax.OptState, plan: _state.Plan
) -> None:
  """Raises ValueError for a moment that a refreshed basis would make stale."""
  thin = {t.path: t.thin for t in plan.targets}
  for path, leaf in jax.tree_util.tree_leaves_with_path(inner_state):
    owner = _paths.owner(thin, _paths.path_string(path))
    if owner is not None and leaf.shape == thin[owner]:
      raise ValueError(
          "refresh=True, but inner keeps a moment of shape"
          f" {tuple(leaf.shape)} in sketch coordinates, which the next basis"
          " makes stale; use sketch(refresh=False), or an inner without such"
          " a moment (logra_jax.scale_by_row_adam)"
      )


def _check_gradients(
    sketches: dict[str, jax.Array | None],
    dense: dict[str, jax.Array | None],
    plan: _state.Plan,
) -> None:
  """Raises ValueError for gradients that are missing or of a wrong shape."""
  thin = {t.path: t.thin for t in plan.targets}
  for path, leaf in {**sketches, **dense}.items():
    shape = getattr(leaf, "shape", None)
    if shape is None or shape != thin.get(path, shape):
      raise ValueError(
          f"the gradient at {path!r} has shape {shape}"
          + (f", not the sketch's {thin[path]}" if path in thin else "")
          + "; make gradients with logra_jax.value_and_grad"
      )


def sketch(
    rank: _targets.Rank = 256,
    *,
    targets: _targets.Targets = _targets.DEFAULT_TARGETS,
    others: Others | None = None,
    inner: optax.GradientTransformation | None = None,
    seed: int | jax.Array = 42,
    distribution: str = "rademacher",
    refresh: bool = True,
    weight_decay: float | jax.Array = 0.0,
    update_ratio: float | jax.Array | None = None,
    clip_norm: float | jax.Array | None = None,
    factor_dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> optax.GradientTransformationExtraArgs:
  """Full-weight updates from sketched gradients (LoGRA).

  For a target kernel `W`, `logra_jax.value_and_grad` computes the sketch
  `S = A G` of its gradient. This transformation turns `S` into a thin direction
  `D` by means of `inner`, and `logra_jax.apply_updates` merges `Aᵀ D` into `W`.
  Any optax transformation can be chained in between; it sees the thin arrays.
  If it keeps an array of the updates' shape, either make the state with
  `logra_jax.init` or pass the transformation as `inner`.

  Like the `scale_by_*` transformations of optax, `sketch` emits a direction
  with the sign of the gradient. A learning rate turns it into a descent step;
  without one, `logra_jax.kl_budget` does. Norms taken after `sketch` (as in
  `optax.clip_by_global_norm`) are those of the thin arrays, whereas `clip_norm`
  and `update_ratio` refer to the full matrices that they represent. Momentum
  belongs in `inner`: after `sketch`, it would keep moving the weights during a
  skipped step and would accumulate weight decay as well.

  | case | result |
  |---|---|
  | a gradient or step is not finite | no update, moments kept, `skipped` + 1 |
  | the sketch is zero | zero update |
  | the rank exceeds the d_in of a kernel | it is clipped to d_in |
  | momentum of thin arrays, with `refresh` | ValueError |
  | a pattern matches nothing | ValueError |

  Args:
    rank: Number of rows of the basis: an int, or a mapping from path patterns
      to ints, of which the first match applies.
    targets: The kernels to sketch, as regular expressions that match whole
      paths, such as `'.*/q_proj/kernel'`. By default the last two axes of a
      kernel are its input and output, and the axes before them stack kernels.
      For other kernels, map the pattern to a layout with one letter per axis
      (b batch, i input, o output), such as `{'.*/query/kernel': 'bioo'}`.
    others: How to treat all other parameters. None freezes them, an optax
      optimizer trains them, and a mapping from path patterns to optimizers or
      None does either; its first match applies, and parameters without a match
      are frozen. Transformations after `sketch` scale these updates too.
    inner: Transformation of the sketches, which it receives as a dict by path.
      It must keep the sign of the gradient. None means `scale_by_row_adam()`.
    seed: Random seed of the bases.
    distribution: Distribution of the basis: 'rademacher' (±1/√rank), 'gaussian'
      (N(0, 1/rank)), or 'orthonormal' (orthogonal rows of norm √(d_in / rank)).
    refresh: Whether to draw a new basis for every update or keep the first.
    weight_decay: Decoupled weight decay of the targets: an update with learning
      rate lr also subtracts `lr · weight_decay · W`. If
      `optax.inject_hyperparams` schedules it, the probe uses the value of the
      previous update.
    update_ratio: If given, the direction is scaled so that ‖ΔW‖ / ‖W‖ over all
      targets has this value (6e-5 as published). It replaces a learning rate.
    clip_norm: If given, gradients are clipped to this global norm, taken over
      the reconstructions `Aᵀ S` and the dense gradients together.
    factor_dtype: Dtype to which `apply_updates` rounds the final factors, so
      that a remote copy that receives them merges the same numbers.

  Returns:
    An optax transformation whose state is a `SketchState`. Its updates have the
    structure of the parameters, with an `Update` for each trained parameter
    (thin for a target) and None for each frozen one.

  Raises:
    ValueError: If an argument has an invalid value, or, from `init`, if
      patterns, layouts or dtypes do not fit the parameters.

  Examples:
    >>> import jax.numpy as jnp, logra_jax, optax
    >>> tx = optax.chain(
    ...     logra_jax.sketch(rank=4), optax.scale_by_learning_rate(1e-3))
    >>> params = {'q_proj': {'kernel': jnp.ones((8, 6))}}
    >>> opt_state = tx.init(params)
    >>> def loss_fn(params, x):
    ...   return logra_jax.dense(x, params['q_proj']['kernel']).sum()
    >>> _, grads = logra_jax.value_and_grad(loss_fn)(
    ...     params, opt_state, jnp.ones((2, 8)))
    >>> grads['q_proj']['kernel'].shape
    (4, 6)
    >>> updates, opt_state = tx.update(grads, opt_state, params)
    >>> params = logra_jax.apply_updates(params, updates, opt_state)

  References:
    LoGRA, arXiv 2610.06647.
  """
  _targets.check_rank(rank)
  if inner is None:
    inner = scale_by_row_adam()
  else:
    _check_inner(inner)
  _check_scalars(update_ratio=update_ratio, clip_norm=clip_norm)
  no_decay = isinstance(weight_decay, (int, float)) and weight_decay == 0
  if not no_decay:
    _check_scalars(weight_decay=weight_decay)
  if update_ratio is not None and not no_decay:
    raise ValueError(
        f"weight_decay={weight_decay!r} needs a learning rate, which"
        f" update_ratio={update_ratio!r} replaces; leave one of them out"
    )
  if distribution not in _basis.DISTRIBUTIONS:
    raise ValueError(
        f"distribution={distribution!r} is unknown; use one of"
        f" {sorted(_basis.DISTRIBUTIONS)}"
    )
  _check_seed(seed)
  if not jnp.issubdtype(factor_dtype, jnp.floating):
    raise ValueError(
        f"factor_dtype={factor_dtype!r} must be a float dtype, such as"
        " jnp.bfloat16"
    )
  transformation = _Sketch(
      rank=rank,
      targets=_targets.layouts(targets),
      others=_check_others(others),
      inner=optax.with_extra_args_support(inner),
      seed=seed,
      distribution=distribution,
      refresh=bool(refresh),
      weight_decay=weight_decay,
      update_ratio=update_ratio,
      clip_norm=clip_norm,
      factor_dtype=jnp.dtype(factor_dtype).name,
  )
  return optax.GradientTransformationExtraArgs(
      transformation.init, transformation.update
  )
