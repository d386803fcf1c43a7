"""Counts of collectives on eight simulated devices; run by `hlo_cost_test`."""

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from experiments.planning import hlo_cost

N = 8
ROWS, COLUMNS = 64, 128
BYTES = ROWS * COLUMNS * 4  # Size of one device's float32 block.


def mesh():
  return jax.sharding.Mesh(np.asarray(jax.devices()), ("x",))


def counted(fun, *shapes_and_specs):
  arguments = [
      jax.ShapeDtypeStruct(
          shape, jnp.float32, sharding=NamedSharding(mesh(), spec)
      )
      for shape, spec in shapes_and_specs
  ]
  return hlo_cost.cost(jax.jit(fun).lower(*arguments).compile().as_text())


@pytest.mark.parametrize(
    "collective,kind,expected",
    [
        (lambda x: lax.psum(x, "x"), "all-reduce", BYTES),
        # Here the result is larger than the operand, ...
        (lambda x: lax.all_gather(x, "x"), "all-gather", N * BYTES),
        # ... and here the operand is larger.
        (
            lambda x: lax.psum_scatter(x, "x", tiled=True),
            "reduce-scatter",
            BYTES,
        ),
        (
            lambda x: lax.all_to_all(x, "x", 0, 0, tiled=True),
            "all-to-all",
            BYTES,
        ),
        (
            lambda x: lax.ppermute(
                x, "x", [(i, (i + 1) % N) for i in range(N)]
            ),
            "collective-permute",
            BYTES,
        ),
    ],
)
@pytest.mark.parametrize("iterations", [1, 5])
def test_a_collective_counts_as_often_as_it_runs(
    collective, kind, expected, iterations
):
  def block(x):
    def step(carry, _):
      y = collective(jnp.sin(carry))
      return carry + jnp.sum(y), None

    return lax.scan(step, x, None, length=iterations)[0]

  cost = counted(
      jax.shard_map(
          block, mesh=mesh(), in_specs=P("x"), out_specs=P("x"), check_vma=False
      ),
      ((N * ROWS, COLUMNS), P("x")),
  )
  assert cost.collective_bytes == {kind: iterations * expected}
  assert cost.flops == cost.unknown_loops == 0


def test_a_sharded_stack_of_layers():
  layers, d, tokens = 6, 256, 512

  def loss(weights, x):
    def layer(x, w):
      return jnp.tanh(x @ w), None

    return jnp.sum(lax.scan(layer, x, weights)[0])

  cost = counted(
      jax.grad(loss),
      ((layers, d, d), P(None, None, "x")),
      ((N * tokens, d), P("x")),
  )
  # One product forward and two backward, for the input and the weight. The
  # first layer's input gets a gradient too, although nothing uses it.
  assert cost.flops == 3 * layers * 2 * tokens * d * d
  # Each layer's kernel is gathered forward and backward. Its whole gradient is
  # summed over devices, because CPUs do not fuse the sum with the split.
  assert cost.collective_bytes["all-gather"] == 2 * layers * d * d * 4
  reduced = {k: v for k, v in cost.collective_bytes.items() if "reduce" in k}
  assert sum(reduced.values()) == pytest.approx(layers * d * d * 4, rel=0.01)
