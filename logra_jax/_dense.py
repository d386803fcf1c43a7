"""The dense operation whose backward pass emits a sketch.

Inside `logra_jax.value_and_grad` and `logra_jax.kl_probe`, each target kernel
in the parameter tree is a `SketchedKernel`: the kernel, a thin slot, and the
key of its basis. `dot_general` is the only operation that accepts one. With an
ordinary array it is `jax.lax.dot_general`, so the same model runs inference.
"""

import dataclasses
import functools
from typing import Any, NoReturn

import jax
from jax import lax
import jax.numpy as jnp

from logra_jax import _basis
from logra_jax._targets import Target

_STATIC = {"static": True}


class Kernel:
  """Base class of pytrees that replace a kernel in the parameter tree.

  `logra_jax.dot_general`, and with it the layers in `logra_jax.linen` and
  `logra_jax.nnx`, calls the `dot_general` method of such an object with the
  input of the layer. Subclasses are frozen dataclasses, registered as pytrees,
  and the leading axes of every leaf are the batch axes.

  Attributes:
    kernel: The parameter `[*batch, *in, *out]`.
    dtype: The dtype to compute in, or None for that of the kernel.
  """

  kernel: jax.Array
  dtype: jax.typing.DTypeLike | None

  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the parameter."""
    return self.kernel.shape

  @property
  def ndim(self) -> int:
    """Number of axes of the parameter."""
    return self.kernel.ndim

  def with_dtype(self, dtype: jax.typing.DTypeLike | None) -> "Kernel":
    """Returns a copy that computes in another dtype."""
    fields: Any = self
    return dataclasses.replace(fields, dtype=dtype)

  def dot_general(
      self,
      x: jax.Array,
      dimension_numbers: lax.DotDimensionNumbers,
      precision: lax.PrecisionLike = None,
      preferred_element_type: jax.typing.DTypeLike | None = None,
  ) -> jax.Array:
    """Multiplies `x` by the kernel; arguments as in `jax.lax.dot_general`."""
    raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SketchedKernel(Kernel):
  """A target kernel, as the model receives it while being differentiated.

  The leading axes of every leaf are the batch axes of the kernel, so that
  `scan`, `vmap` and `jax.checkpoint` slice all leaves alike.

  Attributes:
    kernel: The parameter `[*batch, *in, *out]`.
    factor: `[*batch, rank, d_out]` float32. In reverse mode it is zeros, and
      its cotangent is the sketch; in forward mode it is the proposed thin
      update D.
    key: Key data of the basis, `[*batch, 2]` uint32.
    target: Path, axes and rank of the kernel.
    decay: In forward mode, `[*batch]` float32: the coefficient c of the kernel
      in the proposed update `Aᵀ D + c W`. None in reverse mode.
    step: In forward mode, `[*batch]` float32 zeros: the fraction of the
      proposed update that is taken. The probe differentiates with respect to
      it. None in reverse mode.
    dtype: The dtype to compute in, or None for that of the kernel.
  """

  kernel: jax.Array
  factor: jax.Array
  key: jax.Array
  target: Target = dataclasses.field(metadata=_STATIC)
  decay: jax.Array | None = None
  step: jax.Array | None = None
  dtype: jax.typing.DTypeLike | None = dataclasses.field(
      default=None, metadata=_STATIC
  )

  def dot_general(
      self,
      x: jax.Array,
      dimension_numbers: lax.DotDimensionNumbers,
      precision: lax.PrecisionLike = None,
      preferred_element_type: jax.typing.DTypeLike | None = None,
  ) -> jax.Array:
    call = _Call(
        target=self.target,
        dimension_numbers=_check_axes(self, dimension_numbers),
        precision=precision,
        preferred=preferred_element_type,
        dtype=self.dtype,
        x_dtype=x.dtype,
    )
    if self.step is not None:
      return _perturbed_dot(
          call, x, self.kernel, self.factor, self.decay, self.key, self.step
      )
    factor = _varying_as(self.factor, x, self.kernel)
    return _sketched_dot(call, x, self.kernel, factor, self.key)

  def __getitem__(self, index: Any) -> "SketchedKernel":
    if index is Ellipsis:  # Flax NNX reads the value of a variable as x[...]
      return self
    return self._refuse()

  def _refuse(self, *unused: Any) -> NoReturn:
    raise TypeError(self._misuse())

  __jax_array__ = __neg__ = __pow__ = __matmul__ = __rmatmul__ = _refuse
  __add__ = __radd__ = __sub__ = __rsub__ = _refuse
  __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse

  def __getattr__(self, name: str) -> Any:
    if name.startswith("_"):  # a look-up that tests for a protocol
      raise AttributeError(name)
    raise AttributeError(f"{name!r}: {self._misuse()}")

  def _misuse(self) -> str:
    return (
        f"the LoGRA target {self.target.path!r} is used by an operation that"
        " emits no sketch; use it through logra_jax.dot_general (as"
        " logra_jax.linen.Dense and logra_jax.nnx.Linear do), or leave it out"
        " of targets"
    )


def cast_in_place(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
  """Computes `x.astype(dtype)` without letting XLA move the cast.

  XLA tends to cast the whole stack of weights before a loop over layers rather
  than one matrix inside it, which holds a second copy of all of them.
  """
  return x if x.dtype == dtype else lax.optimization_barrier(x).astype(dtype)


def accumulation_dtype(dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
  """The dtype for sums of numbers of a dtype: float64 for its own, or float32.

  Unlike `jnp.promote_types` it also works with strict dtype promotion.
  """
  return jnp.float64 if dtype == jnp.float64 else jnp.float32


@dataclasses.dataclass(frozen=True)
class _Call:
  """The static arguments of one application of a sketched kernel."""

  target: Target
  dimension_numbers: lax.DotDimensionNumbers
  precision: lax.PrecisionLike
  preferred: jax.typing.DTypeLike | None
  dtype: jax.typing.DTypeLike | None
  x_dtype: jax.typing.DTypeLike

  def dot(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Computes the plain product."""
    if self.dtype is not None:
      kernel = cast_in_place(kernel, self.dtype)
    return lax.dot_general(
        x,
        kernel,
        self.dimension_numbers,
        precision=self.precision,
        preferred_element_type=self.preferred,
    )

  def rows(self, x: jax.Array) -> jax.Array:
    """Transposes and reshapes `x` to `[*batch, N, d_in]`."""
    (contract, _), (batch, _) = self.dimension_numbers
    free = [a for a in range(x.ndim) if a not in (*contract, *batch)]
    sizes = [x.shape[a] for a in batch]
    x = x.transpose(*batch, *free, *contract)
    return x.reshape(*sizes, -1, self.target.d_in)

  def project(self, x: jax.Array, key: jax.Array) -> jax.Array:
    """Computes `X Aᵀ [*batch, N, rank]`."""
    target = self.target
    return _basis.project(
        self.rows(x), key, target.rank, target.distribution, self.precision
    )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Type:
  """Shape, dtype and sharding of an array, as a residual without leaves."""

  aval: jax.core.AbstractValue


def _sketch_sharding(
    kernel: jax.Array, target: Target
) -> jax.sharding.NamedSharding | None:
  """Returns the sharding of a sketch on a mesh with explicit axes, or None."""
  sharding = jax.typeof(kernel).sharding
  if sharding.mesh.empty or sharding.mesh.are_all_axes_auto:
    return None
  n_in, n_out = len(target.inputs), len(target.outputs)
  batch = sharding.spec[: kernel.ndim - n_in - n_out]
  # The output axes of the kernel are a single axis of the sketch.
  out = sharding.spec[-1] if n_out == 1 else None
  spec = jax.sharding.PartitionSpec(*batch, None, out)
  return jax.sharding.NamedSharding(sharding.mesh, spec)


def _varying_as(x: jax.Array, *others: jax.Array) -> jax.Array:
  """Under `shard_map`, casts `x` to vary over the same mesh axes as `others`.

  The transpose of the cast sums over shards, as for any replicated parameter.
  """
  axes = lambda a: jax.typeof(a).manual_axis_type.varying
  missing = frozenset().union(*map(axes, others)) - axes(x)
  return lax.pcast(x, tuple(missing), to="varying") if missing else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sketched_dot(call, x, kernel, factor, key):
  del factor, key
  return call.dot(x, kernel)


def _sketched_dot_fwd(call, x, kernel, factor, key):
  del factor
  # The residual is [*batch, N, rank]; a dense gradient would keep [N, d_in].
  type_of_x = _Type(jax.typeof(x))
  return call.dot(x, kernel), (call.project(x, key), kernel, type_of_x)


def _sketched_dot_bwd(call, residuals, cotangent):
  projected, kernel, type_of_x = residuals
  transpose = jax.linear_transpose(
      lambda x: call.dot(x, kernel), type_of_x.aval
  )
  (x_bar,) = transpose(cotangent)
  rows = cotangent.reshape(*projected.shape[:-1], call.target.d_out)
  # [*batch, rank, d_out] = [*batch, N, rank]ᵀ @ [*batch, N, d_out]
  sketch = jnp.einsum(
      "...nr,...no->...ro",
      projected,
      rows,
      precision=call.precision,
      preferred_element_type=jnp.float32,
      out_sharding=_sketch_sharding(kernel, call.target),
  )
  return x_bar, None, sketch, None


_sketched_dot.defvjp(_sketched_dot_fwd, _sketched_dot_bwd)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _perturbed_dot(call, x, kernel, factor, decay, key, step):
  del factor, decay, key, step
  return call.dot(x, kernel)


@_perturbed_dot.defjvp
def _perturbed_dot_jvp(call, primals, tangents):
  x, kernel, factor, decay, key, _ = primals
  x_dot, step_dot = tangents[0], tangents[-1]
  y = call.dot(x, kernel)
  # [*batch, N, d_out] = [*batch, N, rank] @ [*batch, rank, d_out]
  moved = jnp.einsum(
      "...nr,...ro->...no",
      call.project(x, key),
      factor.astype(call.x_dtype),
      precision=call.precision,
  ).reshape(y.shape)
  along = lambda s: s.reshape(s.shape + (1,) * (y.ndim - s.ndim))
  wide = lambda x: x.astype(accumulation_dtype(y.dtype))
  step, decay = wide(along(step_dot)), wide(along(decay))
  y_dot = step * (wide(moved) + decay * wide(y))
  return y, call.dot(x_dot, kernel) + y_dot.astype(y.dtype)


def _check_axes(
    kernel: SketchedKernel, dimension_numbers: lax.DotDimensionNumbers
) -> lax.DotDimensionNumbers:
  """Canonicalizes dimension numbers, which must fit the layout of a target."""
  (x_contract, k_contract), (x_batch, k_batch) = jax.tree.map(
      int, dimension_numbers
  )
  target = kernel.target
  n_out = len(target.outputs)
  n_in = len(target.inputs)
  n_batch = kernel.ndim - n_in - n_out
  fits = tuple(k_batch) == tuple(range(n_batch))
  fits &= tuple(k_contract) == tuple(range(n_batch, n_batch + n_in))
  if not fits:
    raise ValueError(
        f"target {target.path!r} is contracted over kernel axes"
        f" {tuple(k_contract)} with batch axes {tuple(k_batch)}, but sketch"
        f" assumed {n_batch} batch, {n_in} input and {n_out} output axes;"
        " give its layout, as in sketch(targets={pattern: 'bio'})"
    )
  return (
      (tuple(x_contract), tuple(k_contract)),
      (tuple(x_batch), tuple(k_batch)),
  )


def dot_general(
    x: jax.Array,
    kernel: jax.Array | Kernel,
    dimension_numbers: lax.DotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    **kwargs: Any,
) -> jax.Array:
  """Like `jax.lax.dot_general`, but the kernel can be a LoGRA target.

  The forward pass is the plain product. In the backward pass the gradient of a
  target is its sketch `S = (X Aᵀ)ᵀ dY`, `[*batch, rank, d_out]` float32,
  instead of the dense `Xᵀ dY`, and the residual saved for it is `X Aᵀ` instead
  of `X`. In forward mode the tangent of the output is
  `dX W + (X Aᵀ) D + c X W` for a proposed update `Aᵀ D + c W`.

  Args:
    x: The input of the layer.
    kernel: An array or a target, `[*batch, *in, *out]`.
    dimension_numbers: As in `jax.lax.dot_general`, with the batch axes of a
      target first and its input axes next, in order.
    precision: As in `jax.lax.dot_general`.
    preferred_element_type: As in `jax.lax.dot_general`.
    **kwargs: Passed on to `jax.lax.dot_general` for an ordinary kernel (for
      example `out_sharding`); ignored for a target.

  Returns:
    The product, with axes `[*batch, *free axes of x, *out]`.

  Raises:
    ValueError: If the axes do not fit the layout that `sketch` assumed for the
      target.

  Examples:
    A projection to 2 heads of 3 features, as a model would call it:

    >>> import jax.numpy as jnp, logra_jax
    >>> x, kernel = jnp.ones((5, 8)), jnp.ones((8, 2, 3))
    >>> dimension_numbers = (((1,), (0,)), ((), ()))
    >>> logra_jax.dot_general(x, kernel, dimension_numbers).shape
    (5, 2, 3)

    To train it as a target, give its layout to `sketch`:

    >>> tx = logra_jax.sketch(rank=4, targets={'query/kernel': 'ioo'})
    >>> params = {'query': {'kernel': kernel}}
    >>> def loss_fn(params):
    ...   kernel = params['query']['kernel']
    ...   return logra_jax.dot_general(x, kernel, dimension_numbers).mean()
    >>> _, grads = logra_jax.value_and_grad(loss_fn)(params, tx.init(params))
    >>> grads['query']['kernel'].shape
    (4, 6)
  """
  if isinstance(kernel, Kernel):
    return kernel.dot_general(
        x, dimension_numbers, precision, preferred_element_type
    )
  return lax.dot_general(
      x,
      kernel,
      dimension_numbers,
      precision=precision,
      preferred_element_type=preferred_element_type,
      **kwargs,
  )


def dense(
    x: jax.Array,
    kernel: jax.Array | Kernel,
    *,
    precision: lax.PrecisionLike = None,
) -> jax.Array:
  """Contracts the last axis of `x` with the first of `kernel`.

  This is `x @ kernel` for models in plain JAX, with kernels that can be targets
  (see `dot_general`).

  Args:
    x: Input `[..., d_in]`.
    kernel: An array or a target, `[d_in, *out]`.
    precision: As in `jax.lax.dot_general`.

  Returns:
    The product `[..., *out]`.

  Examples:
    >>> import jax.numpy as jnp, logra_jax
    >>> logra_jax.dense(jnp.ones((2, 3, 8)), jnp.ones((8, 6))).shape
    (2, 3, 6)
  """
  contract = (((x.ndim - 1,), (0,)), ((), ()))
  return dot_general(x, kernel, contract, precision=precision)
