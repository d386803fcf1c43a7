"""Tests of stacking the weights of layers."""

import numpy as np

from experiments.models import hf, stacking
from tests.helpers.paths import GOLDEN


def test_stacking_asks_for_each_parameter_once():
  config = hf.read_config(GOLDEN / "llama")
  asked = []

  def read(path, layer):
    asked.append((path, layer))
    shape = stacking.param_shapes(config)[path]
    shape = shape if layer is None else shape[1:]
    return "x", np.full(shape, -1 if layer is None else layer, np.float32)

  params = stacking.stack(config, read)
  assert len(asked) == len(set(asked)) == 2 + 9 * config.n_layers
  scale = params["layers"]["attn_norm"]["scale"]
  np.testing.assert_array_equal(scale[:, 0], [0, 1])
