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
  return callable(getattr(x, "init", None)) and callable(
      getattr(x, "update", None)
  )


def _check_others(others: Any) -> dict[str, Any]:
  """`others` as a mapping from pattern to optimizer or None (frozen)."""
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
          f"others[{pattern!r}] keeps the gradient's sign; it must descend, as"
          " optax.adam(learning_rate) does"
      )
  return dict(others)


def _sign_of(transformation: Any) -> int:
  """Sign a transformation gives a gradient of ones; 0 if it cannot be told."""
  ones = {"kernel": jnp.ones((2, 3), jnp.float32)}
  with jax.ensure_compile_time_eval():
    try:
      state = transformation.init(ones)
      out, _ = transformation.update(ones, state, ones)
      return int(jnp.sign(jnp.sum(out["kernel"])))
    except Exception:  # made for another tree (labels, masks)
      return 0


def _check_inner(inner: Any) -> None:
  if not _is_transformation(inner):
    raise ValueError(
        f"inner={inner!r} must be an optax transformation, as"
        " logra_jax.scale_by_row_adam()"
    )
  if _sign_of(inner) < 0:
    raise ValueError(
        "inner turns a gradient into a descent step; it must keep the sign, as"
        " optax.scale_by_adam() does: put the learning rate after sketch in"
        " the chain"
    )


def _check_scalars(**scalars: Any) -> None:
  for name, value in scalars.items():
    if value is None or isinstance(value, jax.Array):
      continue
    if not (isinstance(value, (int, float)) and 0 < value < float("inf")):
      raise ValueError(
          f"{name}={value!r} must be a positive finite number, or left out"
      )


@dataclasses.dataclass(frozen=True)
class _Sketch:
  """The two functions of `sketch`; holds configuration, never state."""

  rank: _targets.Rank
  targets: dict[str, str]
  others: dict[Any, Any]
  inner: optax.GradientTransformationExtraArgs
  seed: Any
  distribution: str
  refresh: bool
  weight_decay: Any
  update_ratio: Any
  clip_norm: Any
  factor_dtype: str

  def _make_plan(self, params) -> _state.Plan:
    targets = _targets.resolve(
        params, self.targets, self.rank, self.distribution
    )
    flat, _ = _paths.flatten(params)
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

  def _nested(self, plan: _state.Plan):
    """The optimizer of the densely trained parameters, a dict by path."""
    used = {_paths.first_match(self.others, path) for path in plan.dense}
    return optax.partition(
        {pattern: self.others[pattern] for pattern in used},
        {path: _paths.first_match(self.others, path) for path in plan.dense},
    )

  def init(self, params) -> _state.SketchState:
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

  def update(self, updates, state, params=None, **extra_args):
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
    # The nested optimizer descends; what leaves here is a direction, which a
    # learning rate or the KL budget turns into a descent step.
    out = dict.fromkeys(flat)
    scale = jnp.where(jnp.asarray(self.weight_decay) > 0, 1.0, _state.UNSEEN)
    for path, value in {**thin, **optax.tree.scale(-1, dense)}.items():
      out[path] = _state.Update(value, scale)
    # A finite gradient may still overflow what is made of it.
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

  def _at_ratio(self, thin, state, flat_params):
    """Scales the update so that ‖ΔW‖ = update_ratio · ‖W‖ over all targets."""
    if not flat_params:
      raise ValueError(
          "params=None, but update_ratio needs the weights' norm; call"
          " tx.update(grads, opt_state, params, ...)"
      )
    weights = [flat_params[path].astype(jnp.float32) for path in thin]
    size = _norm(state, thin, {})
    wanted = self.update_ratio * optax.tree.norm(weights)
    return optax.tree.scale(jnp.where(size > 0, wanted / size, 0.0), thin)


def _norm(state: _state.SketchState, thin, dense) -> jax.Array:
  """Norm of all `Aᵀ D` and dense arrays together; no square overflows."""
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


def _basis_norm_squared(target, key_data, factor) -> jax.Array:
  """`‖Aᵀ D‖²` of a stack; one basis of it is alive at a time."""
  stack = (key_data.reshape(-1, 2), factor.reshape(-1, *target.thin[-2:]))
  one = lambda x: _basis.gram_norm_squared(target.basis(x[0]), x[1])
  return jnp.sum(jax.lax.map(one, stack))


def _check_no_thin_moment(inner_state: Any, plan: _state.Plan) -> None:
  shapes = {t.thin for t in plan.targets}
  for leaf in jax.tree.leaves(inner_state):
    if leaf.shape in shapes:
      raise ValueError(
          "refresh=True, but inner keeps a moment of shape"
          f" {tuple(leaf.shape)} indexed by sketch coordinates, which the next"
          " basis makes stale; use sketch(refresh=False), or an inner without"
          " such a moment (logra_jax.scale_by_row_adam)"
      )


def _check_gradients(sketches, dense, plan: _state.Plan) -> None:
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
    seed: int = 42,
    distribution: str = "rademacher",
    refresh: bool = True,
    weight_decay: float = 0.0,
    update_ratio: float | None = None,
    clip_norm: float | None = None,
    factor_dtype: Any = jnp.bfloat16,
) -> optax.GradientTransformationExtraArgs:
  """Full-weight updates from sketched gradients (LoGRA).

  `logra_jax.value_and_grad` gives, for a target kernel `W`, the sketch
  `S = A G` of its gradient. This turns `S` into a thin direction `D` with
  `inner`; `logra_jax.apply_updates` merges `Aᵀ D` into `W`. In between, any
  optax transformation sees the thin arrays; one that keeps an array for each
  coordinate needs `logra_jax.init` for its state, or is given as `inner`.

  Like optax's `scale_by_*` it emits a direction with the sign of the gradient:
  a learning rate turns it into a descent step, and so does
  `logra_jax.kl_budget` where there is no learning rate. Norms that are taken
  after it (`optax.clip_by_global_norm`) are of the thin arrays; `clip_norm` and
  `update_ratio` are of what they stand for. Momentum belongs in `inner`: a link
  after `sketch` would go on moving the weights through a skipped step, and with
  weight decay would gather that too.

  | case | what happens |
  |---|---|
  | gradient or step not finite | zero update, moments kept, `skipped` + 1 |
  | zero sketch | zero update |
  | rank above a kernel's d_in | clipped to d_in |
  | momentum on thin arrays and refresh | ValueError |
  | a pattern that matches nothing | ValueError |

  Args:
    rank: rows of the basis; an int, or a mapping from path patterns to ints
      (first match counts).
    targets: which kernels to sketch, by regular expressions that match whole
      paths, as `'.*/q_proj/kernel'`. A kernel's last two axes are its input
      and output, axes before them stack kernels. For other kernels map the
      pattern to a layout with a letter an axis, `{'.*/query/kernel': 'bioo'}`:
      b batch, i input, o output.
    others: what is done with all other parameters: None freezes them, an optax
      optimizer trains them, a mapping from path patterns to optimizers (or
      None) does either (first match counts, no match is frozen). What scales
      the updates after `sketch` scales these too.
    inner: transformation of the sketches, given as a dict by path; default
      `scale_by_row_adam()`. It must keep the gradient's sign.
    seed: of the bases.
    distribution: 'rademacher' (±1/√rank), 'gaussian' (N(0, 1/rank)), or
      'orthonormal' (orthogonal rows of norm √(d_in / rank)).
    refresh: draw a new basis for every update, or keep the first.
    weight_decay: decoupled: a learning rate lr also takes `lr · weight_decay`
      times itself off each target kernel. (Where it is scheduled by
      `optax.inject_hyperparams`, the probe knows that of the update before.)
    update_ratio: scale the direction so that ‖ΔW‖ / ‖W‖ over all targets is
      this (6e-5 as published), in place of a learning rate.
    clip_norm: clip the gradient to this global norm, that of the
      reconstructions `Aᵀ S` and of the dense gradients together.
    factor_dtype: what `apply_updates` rounds the final factors to, so that a
      copy which is sent them merges the same numbers.

  Returns:
    An optax transformation whose state is a `SketchState`. Its updates have
    the structure of params: an `Update` (thin for a target) where trained,
    None where frozen.

  Raises:
    ValueError: at construction for a bad value of any argument, at `init` for
      patterns, layouts and dtypes that do not fit the parameters.

  Examples:
    >>> import jax.numpy as jnp, logra_jax, optax
    >>> tx = optax.chain(
    ...     logra_jax.sketch(rank=4), optax.scale_by_learning_rate(1e-3))
    >>> params = {'q_proj': {'kernel': jnp.ones((8, 6))}}
    >>> state = tx.init(params)
    >>> def loss(params, x):
    ...   return logra_jax.dense(x, params['q_proj']['kernel']).sum()
    >>> _, grads = logra_jax.value_and_grad(loss)(
    ...     params, state, jnp.ones((2, 8)))
    >>> grads['q_proj']['kernel'].shape
    (4, 6)

  Reference: arXiv 2610.06647.
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
        f"weight_decay={weight_decay!r} goes with a learning rate and"
        f" update_ratio={update_ratio!r} has none; leave one of them out"
    )
  if distribution not in _basis.DISTRIBUTIONS:
    raise ValueError(
        f"distribution={distribution!r} is unknown; use one of"
        f" {sorted(_basis.DISTRIBUTIONS)}"
    )
  if not isinstance(seed, jax.Array) and not (
      isinstance(seed, (int, np.integer)) and 0 <= seed < 2**32
  ):
    raise ValueError(f"seed={seed!r} must be an int in [0, 2**32), as 42")
  if not jnp.issubdtype(factor_dtype, jnp.floating):
    raise ValueError(
        f"factor_dtype={factor_dtype!r} must be a float dtype, as jnp.bfloat16"
    )
  both = _Sketch(
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
  return optax.GradientTransformationExtraArgs(both.init, both.update)
