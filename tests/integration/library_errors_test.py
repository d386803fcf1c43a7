"""Bad input is refused early, by argument, value and what to do instead."""

import jax.numpy as jnp
import optax
import pytest

import logra_jax
from tests.helpers import toy

SHAPES = {
    "layers/q_proj/kernel": (2, 8, 6),
    "layers/norm/scale": (2, 8),
    "embed": (10, 8),
}


def params():
  return toy.tree(SHAPES)


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
    logra_jax.sketch(rank={"x": 4}).init(params())
  with pytest.raises(ValueError, match=r"rank='x' matches no .*q_proj"):
    logra_jax.sketch(rank={"x": 4, ".*": 4}).init(params())


@pytest.mark.parametrize(
    "kwargs,match",
    [
        (
            {"distribution": "uniform"},
            r"distribution='uniform' is unknown; use one of \['gaussian'",
        ),
        ({"clip_norm": 0.0}, "clip_norm=0.0 must be a positive finite"),
        ({"clip_norm": -1}, "clip_norm=-1 must be a positive finite"),
        ({"update_ratio": 0}, "update_ratio=0 must be a positive finite"),
        ({"update_ratio": float("nan")}, "update_ratio=nan must be"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must be a positive"),
        (
            {"weight_decay": 0.1, "update_ratio": 6e-5},
            r"weight_decay=0.1 .* update_ratio=6e-05.*leave one of them out",
        ),
        ({"seed": -1}, r"seed=-1 must be an int in \[0, 2\*\*32\)"),
        ({"seed": 2**32}, r"seed=4294967296 must be"),
        ({"seed": 1.5}, "seed=1.5 must be an int"),
        ({"seed": "a"}, "seed='a' must be an int"),
        ({"seed": None}, "seed=None must be an int"),
        ({"factor_dtype": jnp.int8}, "factor_dtype=.*int8.* float dtype"),
        ({"targets": []}, "targets is empty; name at least one"),
        ({"targets": None}, "targets=None.*must be"),
        ({"targets": [3]}, "targets has 3, which is not a string"),
        ({"targets": "(q"}, r"targets has '\(q', which is not a valid regular"),
        (
            {"targets": {".*": "oi"}},
            r"targets\['\.\*'\]='oi' is not a layout.*b \(batch",
        ),
        ({"targets": {".*": "io2"}}, "'io2' is not a layout"),
        ({"targets": {".*": "bi"}}, "'bi' is not a layout"),
        ({"others": "adam"}, "others.*'adam'.* must be an optax optimizer"),
        ({"others": {".*": 3}}, r"others\['\.\*'\]=3 must be an optax"),
        (
            {"others": optax.scale_by_adam()},
            r"others\['\.\*'\] keeps the gradient's sign; it must descend",
        ),
        (
            {"others": {"embed": optax.scale(1.0)}},
            r"others\['embed'\] keeps the gradient's sign",
        ),
        ({"inner": optax.adam(1e-3)}, "inner turns .* learning rate after"),
        ({"inner": optax.sgd}, "inner=.* must be an optax transformation"),
        ({"inner": "adam"}, "inner='adam' must be an optax transformation"),
    ],
)
def test_construction(kwargs, match):
  with pytest.raises(ValueError, match=match):
    logra_jax.sketch(**kwargs)


@pytest.mark.parametrize(
    "kwargs,match",
    [
        ({"b2": 1.0}, r"b2=1.0 must lie in \[0, 1\)"),
        ({"b2": -0.1}, r"b2=-0.1 must lie in \[0, 1\)"),
        ({"eps": 0.0}, "eps=0.0 must be positive"),
    ],
)
def test_row_adam(kwargs, match):
  with pytest.raises(ValueError, match=match):
    logra_jax.scale_by_row_adam(**kwargs)


@pytest.mark.parametrize("targets", [".*/x_proj/kernel", ["embed", "q_proj"]])
def test_a_pattern_that_matches_nothing(targets):
  pattern = targets if isinstance(targets, str) else targets[1]
  with pytest.raises(ValueError) as error:
    logra_jax.sketch(targets=targets).init(params())
  message = str(error.value)
  assert f"targets={pattern!r} matches no parameter" in message
  for path in SHAPES:
    assert path in message


def test_others_pattern_that_matches_nothing():
  with pytest.raises(ValueError, match=r"others='head' matches no.*embed"):
    logra_jax.sketch(others={"head": optax.sgd(1.0)}).init(params())


@pytest.mark.parametrize(
    "leaf,layout,match",
    [
        (
            jnp.ones((4, 4), jnp.int8),
            "",
            "'kernel' has dtype int8; only floating.*leave it out",
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


def loss(params, x):
  return jnp.sum(logra_jax.dense(x, params["layers"]["q_proj"]["kernel"][...]))


def test_update_ratio_without_parameters():
  tx = logra_jax.sketch(rank=2, update_ratio=6e-5)
  state = tx.init(params())
  grads = {
      "layers": {
          "q_proj": {"kernel": jnp.ones((2, 2, 6))},
          "norm": {"scale": None},
      },
      "embed": None,
  }
  match = r"params=None, but update_ratio needs .*tx.update\(grads"
  with pytest.raises(ValueError, match=match):
    tx.update(grads, state)


def test_parameters_that_do_not_fit_the_state():
  tx = logra_jax.sketch(rank=2)
  state = tx.init(params())
  other = toy.tree(SHAPES | {"layers/q_proj/kernel": (2, 8, 7)})
  match = (
      r"\(2, 8, 7\) at 'layers/q_proj/kernel', .*\(2, 8, 6\); make opt_state"
  )
  with pytest.raises(ValueError, match=match):
    logra_jax.value_and_grad(loss)(other, state, jnp.ones((3, 8)))
  with pytest.raises(ValueError, match="shape None at 'layers/q_proj/kernel'"):
    logra_jax.value_and_grad(loss)({"w": jnp.ones(3)}, state, jnp.ones((3, 8)))


def test_value_and_grad_without_a_sketch():
  tx = optax.sgd(1.0)
  p = {"w": jnp.arange(3.0)}
  value, grads = logra_jax.value_and_grad(lambda p: jnp.sum(p["w"] ** 2))(
      p, tx.init(p)
  )
  assert float(value) == 5.0 and grads["w"].tolist() == [0.0, 2.0, 4.0]


def test_dense_gradients_are_refused():
  tx = logra_jax.sketch(rank=2, others=optax.sgd(1.0))
  state = tx.init(params())
  match = (
      r"'layers/q_proj/kernel' has shape \(2, 8, 6\), not the sketch's"
      r" \(2, 2, 6\); make gradients with logra_jax.value_and_grad"
  )
  with pytest.raises(ValueError, match=match):
    tx.update(params(), state, params())
  no_embed = {**params(), "embed": None}
  no_embed["layers"]["q_proj"]["kernel"] = jnp.ones((2, 2, 6))
  with pytest.raises(ValueError, match="'embed' has shape None"):
    tx.update(no_embed, state, params())


def test_gradients_of_another_tree_are_refused():
  tx = logra_jax.sketch(rank=2)
  state = tx.init(params())
  with pytest.raises(ValueError, match="'layers/q_proj/kernel' has shape None"):
    tx.update({"w": jnp.ones(3)}, state, params())


def test_updates_of_another_tree_are_refused():
  tx = logra_jax.sketch(rank=2)
  p = params()
  with pytest.raises(ValueError, match=r"updates .*'embed'.*same structure"):
    logra_jax.apply_updates(p, {"w": jnp.ones(3)}, tx.init(p))
  thin = {
      "layers": {
          "q_proj": {"kernel": jnp.ones((2, 2, 6))},
          "norm": {"scale": None},
      },
      "embed": None,
  }
  match = "at the target 'layers/q_proj/kernel', which .*tx.update"
  with pytest.raises(ValueError, match=match):
    logra_jax.apply_updates(p, thin, tx.init(p))


def test_two_parameters_of_one_path():
  twins = {"a": {"b": jnp.ones((4, 4))}, "a/b": jnp.ones((4, 4))}
  with pytest.raises(ValueError, match="two parameters have the same path"):
    logra_jax.sketch(targets=".*").init(twins)
