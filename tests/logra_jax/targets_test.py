"""Tests of ranks, layouts, and kernels that cannot be sketched."""

import jax.numpy as jnp
import numpy as np
import pytest

import logra_jax
from tests.helpers import sketched, toy


@pytest.mark.parametrize("rank", [0, -1, 2.5, True, "8", None, {".*": 0}])
def test_rank(rank):
  value = repr(rank[".*"] if isinstance(rank, dict) else rank)
  match = f"rank={value} must be a positive Python int"
  with pytest.raises(ValueError, match=match):
    logra_jax.sketch(rank=rank)


def test_rank_mapping():
  with pytest.raises(ValueError, match=r"rank={} names no target"):
    logra_jax.sketch(rank={})
  with pytest.raises(ValueError, match=r"rank has no pattern for .*q_proj"):
    logra_jax.sketch(rank={"x": 4}).init(toy.tree(toy.LAYER_SHAPES))
  with pytest.raises(ValueError, match=r"rank='x' matches no .*q_proj"):
    logra_jax.sketch(rank={"x": 4, ".*": 4}).init(toy.tree(toy.LAYER_SHAPES))


@pytest.mark.parametrize(
    "leaf,layout,match",
    [
        (
            jnp.ones((4, 4), jnp.int8),
            "",
            "'kernel' has dtype int8; only kernels of 16, 32.*leave it out",
        ),
        (
            jnp.ones((4, 4), jnp.float8_e4m3fn),
            "",
            "'kernel' has dtype float8_e4m3fn; only kernels of.*leave it out",
        ),
        (jnp.ones((4,)), "", r"'kernel' has shape \(4,\).*leave it out"),
        (jnp.ones((2, 4, 4)), "io", r"\(2, 4, 4\), which does not fit .*'io'"),
        (jnp.ones((0, 4)), "", r"'kernel' has shape \(0, 4\): it is empty"),
    ],
)
def test_kernels_that_cannot_be_targets(leaf, layout, match):
  tx = logra_jax.sketch(targets={"kernel": layout})
  with pytest.raises(ValueError, match=match):
    tx.init({"kernel": leaf})


def test_ranks_by_path():
  _, _, state = sketched.make(rank={"a/.*": 3, ".*": 5})
  assert [t.thin for t in state.plan.targets] == [(3, 20), (3, 5, 7)]


def test_rank_is_clipped_to_the_inputs():
  _, _, state = sketched.make(rank=16)
  assert [t.rank for t in state.plan.targets] == [12, 16]


def test_a_rank_can_be_a_numpy_integer():
  params = toy.tree({"kernel": (12, 7)})
  state = logra_jax.sketch(np.int64(4), targets=".*").init(params)
  assert state.plan.targets[0].rank == 4


def test_a_leaf_that_is_no_array_is_named():
  params = {"kernel": jnp.ones((4, 4)), "scale": 1.0}
  with pytest.raises(ValueError, match=r"1\.0 at 'scale', which is not an"):
    logra_jax.sketch(2, targets="kernel").init(params)


@pytest.mark.parametrize("n", [3, 4, 16])
def test_a_stack_as_long_as_a_rank_is_no_moment(n):
  """RowAdam's `[n, d_out]` of a stack has another target's thin shape."""
  params = {"experts": jnp.ones((n, 24, 16)), "o_proj": jnp.ones((16, 16))}
  state = logra_jax.sketch(4, targets=["experts", "o_proj"]).init(params)
  assert len(state.plan.targets) == 2
