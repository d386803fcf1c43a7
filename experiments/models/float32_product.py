"""An einsum that is summed in float32."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def float32_product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """Computes an einsum that is summed and returned in float32.

  Its derivatives are products in the dtype of the inputs. JAX's own rule would
  mix float32 cotangents with bfloat16 inputs, which makes float32 copies of the
  inputs and is slow.

  Args:
    spec: Subscripts, as in `jax.numpy.einsum`.
    x: The first operand.
    y: The second operand.

  Returns:
    The product in float32.
  """
  if x.dtype == y.dtype == jnp.float32:
    return jnp.einsum(spec, x, y)
  # XLA's CPU backend does not support this bfloat16 product everywhere.
  wide = lambda x, y: jnp.einsum(
      spec, x.astype(jnp.float32), y.astype(jnp.float32)
  )
  product = lambda x, y: jnp.einsum(
      spec, x, y, preferred_element_type=jnp.float32
  )
  return jax.lax.platform_dependent(x, y, cpu=wide, default=product)


def _product_jvp(
    spec: str, primals: tuple[jax.Array, ...], tangents: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
  out = float32_product(spec, *primals)
  total = jnp.zeros_like(out)
  for i, tangent in enumerate(tangents):
    if not isinstance(tangent, jax.custom_derivatives.SymbolicZero):
      args = list(primals)
      args[i] = tangent
      total += jnp.einsum(spec, *args).astype(jnp.float32)
  return out, total


float32_product.defjvp(_product_jvp, symbolic_zeros=True)
