"""The dense operation whose backward pass emits a sketch.

Inside `logra_jax.value_and_grad` and `logra_jax.kl_probe` each target kernel
of the parameter tree is a `SketchedKernel`: the kernel, a thin slot, and the
key of its basis. `dot_general` is the one operation that consumes it; with an
ordinary array it is `jax.lax.dot_general`, so the same model runs inference.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from logra_jax import _basis
from logra_jax._targets import Target

DimensionNumbers = tuple[
    tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
]


_STATIC = {"static": True}


class Kernel:
  """A pytree that stands where a kernel would, and multiplies in its own way.

  `dot_general` (here and in `logra_jax.linen` and `logra_jax.nnx`) hands it the
  layer's input. Subclasses are frozen dataclasses, registered as pytrees, with
  the fields `kernel`, the parameter `[*batch, *in, *out]`, and `dtype`, what to
  compute in (None: the kernel's own); every leaf leads with the batch axes.
  """

  kernel: jax.Array
  dtype: Any

  @property
  def shape(self) -> tuple[int, ...]:
    return self.kernel.shape

  @property
  def ndim(self) -> int:
    return self.kernel.ndim

  def with_dtype(self, dtype: Any) -> "Kernel":
    """Itself, computing in another dtype."""
    fields: Any = self
    return dataclasses.replace(fields, dtype=dtype)

  def dot_general(
      self,
      x: jax.Array,
      dimension_numbers: DimensionNumbers,
      precision: Any = None,
      preferred_element_type: Any = None,
  ) -> jax.Array:
    """The product of `x` with the kernel; as `jax.lax.dot_general`."""
    raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SketchedKernel(Kernel):
  """A target kernel as the model sees it while it is differentiated.

  Every leaf leads with the kernel's batch axes, so that `scan`, `vmap` and
  `jax.checkpoint` slice all of them alike.

  Attributes:
    kernel: `[*batch, *in, *out]`, the parameter.
    factor: `[*batch, rank, d_out]` float32. In reverse mode zeros, whose
      cotangent is the sketch; in forward mode the proposed thin update D.
    key: `[*batch, 2]` uint32, the basis.
    target: what the axes are.
    decay: forward mode: `[*batch]` float32, the coefficient c of the kernel
      itself in the proposed update `Aᵀ D + c W`. Else None.
    step: forward mode: `[*batch]` float32 zeros, how much of the proposed
      update is taken; what the probe is differentiated by. Else None.
    dtype: dtype to compute in, None for the kernel's own.
  """

  kernel: jax.Array
  factor: jax.Array
  key: jax.Array
  target: Target = dataclasses.field(metadata=_STATIC)
  decay: jax.Array | None = None
  step: jax.Array | None = None
  dtype: Any = dataclasses.field(default=None, metadata=_STATIC)

  def dot_general(
      self,
      x: jax.Array,
      dimension_numbers: DimensionNumbers,
      precision: Any = None,
      preferred_element_type: Any = None,
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
    if index is Ellipsis:  # how Flax NNX reads the whole of a variable
      return self
    return self._refuse()

  def _refuse(self, *unused: Any) -> Any:
    raise TypeError(self._misuse())

  __jax_array__ = __neg__ = __pow__ = __matmul__ = __rmatmul__ = _refuse
  __add__ = __radd__ = __sub__ = __rsub__ = _refuse
  __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse

  def __getattr__(self, name: str) -> Any:
    if name.startswith("_"):  # protocols, which ask whether it is there
      raise AttributeError(name)
    raise AttributeError(f"{name!r}: {self._misuse()}")

  def _misuse(self) -> str:
    return (
        f"the LoGRA target {self.target.path!r} is used by an operation that"
        " emits no sketch; consume it through logra_jax.dot_general (as"
        " logra_jax.linen.Dense and logra_jax.nnx.Linear do), or leave it out"
        " of targets"
    )


def cast_in_place(x: jax.Array, dtype: Any) -> jax.Array:
  """`x.astype(dtype)` where it stands.

  XLA would rather cast a whole stack of weights before the loop over layers
  than one matrix in it, and so hold a second copy of all of them.
  """
  return x if x.dtype == dtype else lax.optimization_barrier(x).astype(dtype)


@dataclasses.dataclass(frozen=True)
class _Call:
  """What is static in one application of a sketched kernel."""

  target: Target
  dimension_numbers: Any
  precision: Any
  preferred: Any
  dtype: Any
  x_dtype: Any

  def dot(self, x: jax.Array, kernel: jax.Array) -> jax.Array:
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
    """`x` as `[*batch, N, d_in]`."""
    (contract, _), (batch, _) = self.dimension_numbers
    free = [a for a in range(x.ndim) if a not in (*contract, *batch)]
    sizes = [x.shape[a] for a in batch]
    x = x.transpose(*batch, *free, *contract)
    return x.reshape(*sizes, -1, self.target.d_in)

  def project(self, x: jax.Array, key: jax.Array) -> jax.Array:
    """`X Aᵀ [*batch, N, rank]`."""
    target = self.target
    return _basis.project(self.rows(x), key, target.rank, target.distribution)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Type:
  """Shape, dtype and sharding of an array, as a residual without arrays."""

  aval: Any


def _sketch_sharding(kernel: jax.Array, target: Target) -> Any:
  """That of the kernel's batch and outputs, on a mesh that wants it said."""
  sharding = jax.typeof(kernel).sharding
  if sharding.mesh.empty or sharding.mesh.are_all_axes_auto:
    return None
  n_in, n_out = len(target.inputs), len(target.outputs)
  batch = sharding.spec[: kernel.ndim - n_in - n_out]
  # Several output axes are one axis of the sketch.
  out = sharding.spec[-1] if n_out == 1 else None
  spec = jax.sharding.PartitionSpec(*batch, None, out)
  return jax.sharding.NamedSharding(sharding.mesh, spec)


def _varying_as(x: jax.Array, *others: Any) -> jax.Array:
  """Under `shard_map`, `x` with a value for each shard that others have.

  The transpose of this cast is the sum over shards that any parameter gets.
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
  # [*batch, N, rank] is kept where a dense gradient would keep [N, d_in].
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
      "...nr,...ro->...no", call.project(x, key), factor.astype(call.x_dtype)
  ).reshape(y.shape)
  along = lambda s: s.reshape(s.shape + (1,) * (y.ndim - s.ndim))
  y_dot = along(step_dot) * (moved + along(decay) * y)
  return y, call.dot(x_dot, kernel) + y_dot.astype(y.dtype)


def _check_axes(kernel: SketchedKernel, dimension_numbers: Any) -> Any:
  """Canonical dimension numbers; raises where the layout says otherwise."""
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
        f" {tuple(k_contract)} with batch axes {tuple(k_batch)}, but targets"
        f" took it as {n_batch} batch, {n_in} input and {n_out} output axes;"
        " give its layout: sketch(targets={pattern: 'bio'})"
    )
  return (
      (tuple(x_contract), tuple(k_contract)),
      (tuple(x_batch), tuple(k_batch)),
  )


def dot_general(
    x: jax.Array,
    kernel: Any,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    **kwargs: Any,
) -> jax.Array:
  """`jax.lax.dot_general` that also takes a LoGRA target as its kernel.

  Forward it is the plain product. Backward, a target's gradient is its sketch
  `S = (X Aᵀ)ᵀ dY`, `[*batch, rank, d_out]` float32, instead of the dense
  `Xᵀ dY`; what is saved for it is `X Aᵀ`, not `X`. In forward mode the tangent
  of the output is `dX W + (X Aᵀ) D + c X W` for a proposed update
  `Aᵀ D + c W`.

  Args:
    x: the layer's input.
    kernel: `[*batch, *in, *out]`, an array or a target of `sketch`.
    dimension_numbers: as in `jax.lax.dot_general`, with the kernel's batch
      axes first and its input axes next, in order.
    precision: as in `jax.lax.dot_general`.
    preferred_element_type: as in `jax.lax.dot_general`.
    **kwargs: passed on to `jax.lax.dot_general` for an ordinary kernel
      (`out_sharding`).

  Returns:
    The product, with axes `[*batch, *free axes of x, *out]`.

  Raises:
    ValueError: the axes are not those that `targets` gave the kernel.
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


def dense(x: jax.Array, kernel: Any, *, precision: Any = None) -> jax.Array:
  """`x @ kernel` for plain JAX code: the last axis of x, the first of kernel.

  Args:
    x: `[..., d_in]`.
    kernel: `[d_in, *out]`, an array or a target of `sketch`.
    precision: as in `jax.lax.dot_general`.

  Returns:
    `[..., *out]`.
  """
  contract = (((x.ndim - 1,), (0,)), ((), ()))
  return dot_general(x, kernel, contract, precision=precision)
