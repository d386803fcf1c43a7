"""Products that are exact where it matters."""

import functools

import jax
import jax.numpy as jnp


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def float32_product(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
  """An einsum that is summed and returned in float32, whatever the inputs.

  Its derivatives are products in the inputs' dtype. By JAX's own rule they
  would mix float32 cotangents with bfloat16 inputs, which makes float32 copies
  of the latter and is slow.
  """
  if x.dtype == y.dtype == jnp.float32:
    return jnp.einsum(spec, x, y)
  # XLA's CPU has no such product of bfloat16 in every place.
  wide = lambda x, y: jnp.einsum(
      spec, x.astype(jnp.float32), y.astype(jnp.float32)
  )
  product = lambda x, y: jnp.einsum(
      spec, x, y, preferred_element_type=jnp.float32
  )
  return jax.lax.platform_dependent(x, y, cpu=wide, default=product)


def _product_jvp(spec, primals, tangents):
  out = float32_product(spec, *primals)
  total = jnp.zeros_like(out)
  for i, tangent in enumerate(tangents):
    if not isinstance(tangent, jax.custom_derivatives.SymbolicZero):
      args = list(primals)
      args[i] = tangent
      total += jnp.einsum(spec, *args).astype(jnp.float32)
  return out, total


float32_product.defjvp(_product_jvp, symbolic_zeros=True)
