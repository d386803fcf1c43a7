"""Tests of RowAdam against float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import logra_jax
from tests.helpers import oracles


@pytest.mark.parametrize("norm_preserving", [False, True])
@pytest.mark.parametrize("b2", [0.0, 0.95])
def test_row_adam(norm_preserving, b2):
  rng = np.random.default_rng(0)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  # The four matrices of the stack: normal, constant, huge and tiny.
  scale = np.asarray([1.0, 1.0, 1e30, 1e-30], np.float32)[:, None, None]
  sketches = [scale * normal(4, 5, 6) for _ in range(5)]
  for s in sketches:
    s[1] = 3.0
  sketches[1] = np.zeros_like(sketches[1])  # a batch without a gradient
  sketches[2][:, :, 2] = 0  # an output unit without a gradient
  tx = logra_jax.scale_by_row_adam(b2, norm_preserving=norm_preserving)
  state = tx.init(jnp.zeros((4, 5, 6)))
  expected = oracles.row_adam(sketches, b2, 1e-8, norm_preserving)
  update = jax.jit(tx.update)
  for s, wanted in zip(sketches, expected, strict=True):
    got, state = update(jnp.asarray(s), state)
    for j in range(4):
      oracles.assert_close(got[j], wanted[j], 3e-5)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state))
    if norm_preserving:
      for j in range(4):
        np.testing.assert_allclose(
            oracles.global_norm(got[j]), oracles.global_norm(s[j]), rtol=1e-5
        )
  # The comparison would detect a missing bias correction.
  if not norm_preserving and b2:
    with pytest.raises(AssertionError):
      first = oracles.row_adam([sketches[0]] * 2, b2)[1]
      oracles.assert_close(expected[0][0] * np.sqrt(1 - b2), first[0], 1e-2)


def test_row_adam_epsilon():
  s = jnp.full((1, 3), 2.0)
  plain = logra_jax.scale_by_row_adam(eps=0.5)
  got, _ = plain.update(s, plain.init(s))
  oracles.assert_close(got, np.full((1, 3), 2 / 2.5), 1e-6)
  # Relative to the mean RMS, so that the scale of the gradient does not matter.
  relative = logra_jax.scale_by_row_adam(eps=0.5, norm_preserving=True)
  s = jnp.asarray([[1.0, 3.0]])
  for size in (1.0, 1e-20, 1e20):
    got, _ = relative.update(size * s, relative.init(s))
    d = np.asarray([1 / (1 + 1), 3 / (3 + 1)])
    d *= np.sqrt(10) / np.linalg.norm(d)
    oracles.assert_close(np.asarray(got) / size, d[None], 1e-5)


@pytest.mark.parametrize(
    "kwargs,match",
    [
        ({"b2": 1.0}, r"b2=1.0 must lie in \[0, 1\)"),
        ({"b2": -0.1}, r"b2=-0.1 must lie in \[0, 1\)"),
        ({"eps": 0.0}, "eps=0.0 must be positive"),
    ],
)
def test_arguments_out_of_range_are_refused(kwargs, match):
  with pytest.raises(ValueError, match=match):
    logra_jax.scale_by_row_adam(**kwargs)
