"""Tests of loading a model from a path."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest

from experiments.configs import tiny as tiny_config
from experiments.models import load, tiny
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


def test_a_config_names_the_model_and_says_how_it_runs():
  config = tiny_config.get_config()
  config.seed, config.dtype, config.attention_block = 3, "bfloat16", 5
  loaded = load.for_run(config)
  chex.assert_trees_all_equal(loaded.params, tiny.make_tiny(3).params)
  assert loaded.config == dataclasses.replace(
      tiny.CONFIG,
      dtype="bfloat16",
      param_dtype=config.param_dtype,
      remat=config.remat,
      attention_block=5,
      token_block=config.token_block or None,
  )
