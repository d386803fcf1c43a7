"""Tests that patterns match whole paths, and that paths are unique."""

from flax import linen as nn
from flax import nnx
from flax.core import freeze
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


@pytest.mark.parametrize(
    "name", ["value", "raw_value", "kernel", "key", "0", "a.b", "größe"]
)
@pytest.mark.parametrize("wrap", [dict, freeze])
def test_any_name_of_a_parameter_is_trained(name, wrap):
  params = wrap({"attn": {"query": jnp.ones((4, 4)), name: jnp.ones((4, 4))}})
  plan = logra_jax.sketch(2, targets="attn/.*").init(params).plan
  assert {t.path for t in plan.targets} == {"attn/query", f"attn/{name}"}
  assert plan.frozen == ()


def test_a_value_head_can_be_trained_densely():
  params = {"q_proj": {"kernel": jnp.ones((4, 4))}}
  params["head"] = {"value": jnp.ones(4), "policy": jnp.ones(4)}
  tx = logra_jax.sketch(2, others={"head/.*": optax.sgd(1.0)})
  assert set(tx.init(params).plan.dense) == {"head/value", "head/policy"}


def test_boxes_are_no_part_of_a_path():
  boxed = {"kernel": nn.Partitioned(jnp.ones((4, 4)), names=("a", "b"))}
  state = nnx.state(nnx.Linear(4, 4, use_bias=False, rngs=nnx.Rngs(0)))
  for params in (boxed, state):
    plan = logra_jax.sketch(2, targets=".*").init(params).plan
    assert [t.path for t in plan.targets] == ["kernel"]
