"""Tests that errors name the argument, its value and the remedy."""

import jax.numpy as jnp
import optax
import pytest

import logra_jax
from tests.helpers import toy


def params():
  return toy.tree(toy.LAYER_SHAPES)


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
