"""Tests of what the compiled programs of decoding compute and copy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models import decoder, tiny
from experiments.rollouts import decode_steps
from experiments.rollouts.sampling import Sampling


def test_prefill_computes_no_logits():
  loaded = tiny.make_tiny(0)
  text = decode_steps.read_prompts.lower(
      decoder.Decoder(loaded.config),
      loaded.params,
      np.zeros((3, 6), np.int32),
      np.ones((3, 6), bool),
      "float32",
  ).as_text()
  assert "tensor<3x6x32xf32>" in text  # [N, P, D]
  assert "tensor<14x32xf32>" in text  # The embedding, [V, D].
  assert "x14xf32>" not in text.replace("<14x", "")  # [..., V]


@pytest.mark.slow
def test_no_second_cache_is_made():
  """Decoding updates the donated cache in place."""
  loaded = tiny.make_tiny(0)
  slots = decode_steps.empty(loaded.config, 4, 6, 8, "float32")
  inputs = decode_steps.DecodeInputs(
      loaded.params, jax.random.key(0), jnp.float32(1), None
  )
  lowered = decode_steps.decode.lower(
      decoder.Decoder(loaded.config),
      decode_steps.Options(Sampling(8), ()),
      inputs,
      slots,
      np.int32(0),
      np.int32(0),
  )
  text = lowered.compile().as_text()
  # No copy of all layers' keys [2, 4, 2, 8, 13] or values.
  assert "f32[2,4,2,8,13]" in text
  assert not re.search(r"f32\[2,4,2,(8,13|13,8)\]\S* copy\(", text)
