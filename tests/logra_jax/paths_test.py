"""Tests that patterns match whole paths, and that paths are unique."""

import jax.numpy as jnp
import optax
import pytest

import logra_jax
from tests.helpers import toy


@pytest.mark.parametrize("targets", [".*/x_proj/kernel", ["embed", "q_proj"]])
def test_a_pattern_that_matches_nothing(targets):
  pattern = targets if isinstance(targets, str) else targets[1]
  with pytest.raises(ValueError) as error:
    logra_jax.sketch(targets=targets).init(toy.tree(toy.LAYER_SHAPES))
  message = str(error.value)
  assert f"targets={pattern!r} matches no parameter" in message
  for path in toy.LAYER_SHAPES:
    assert path in message


def test_others_pattern_that_matches_nothing():
  with pytest.raises(ValueError, match=r"others='head' matches no.*embed"):
    logra_jax.sketch(others={"head": optax.sgd(1.0)}).init(
        toy.tree(toy.LAYER_SHAPES)
    )


def test_two_parameters_of_one_path():
  twins = {"a": {"b": jnp.ones((4, 4))}, "a/b": jnp.ones((4, 4))}
  with pytest.raises(ValueError, match="two parameters have the same path"):
    logra_jax.sketch(targets=".*").init(twins)
