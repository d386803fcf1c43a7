"""Tests of loading a model from a path."""

import chex
import jax
import jax.numpy as jnp
import pytest

from experiments.models import load
from tests.helpers.paths import GOLDEN


def test_parameters_are_read_in_the_dtype_asked_for():
  low = load.from_path(GOLDEN / "llama", param_dtype="bfloat16")
  assert low.config.param_dtype == "bfloat16"
  high = load.from_path(GOLDEN / "llama")
  cast = jax.tree.map(lambda x: x.astype(jnp.bfloat16), high.params)
  chex.assert_trees_all_equal(low.params, cast)  # The file is in bfloat16.


def test_paths_that_are_no_model(tmp_path):
  with pytest.raises(FileNotFoundError, match="no model at"):
    load.from_path(tmp_path / "nothing")
  file = tmp_path / "model.bin"
  file.write_bytes(b"x")
  with pytest.raises(ValueError, match=r"nor a \.gguf file"):
    load.from_path(file)
