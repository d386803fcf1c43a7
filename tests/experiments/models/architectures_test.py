"""Compares architectures by name with the published ones."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models import architectures, hf
from experiments.models.decoder import Decoder

# Sums of the tensors' sizes in the headers of the published files.
PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "llama-3.1-8b": 8_030_261_248,
}


def test_every_model_has_the_published_number_of_parameters():
  assert {
      name: architectures.n_params(config)
      for name, config in architectures.MODELS.items()
  } == PUBLISHED


@pytest.mark.parametrize("name", ["qwen2.5-32b", "qwen3-4b", "llama-3.1-8b"])
def test_the_count_is_that_of_the_decoder_itself(name):
  config = architectures.architecture(name)
  made = jax.eval_shape(
      lambda: Decoder(config).init(jax.random.key(0), jnp.zeros((1, 1), int))
  )
  sizes = [np.prod(x.shape, dtype=int) for x in jax.tree.leaves(made)]
  assert sum(sizes) == architectures.n_params(config)


def test_names_are_read_in_any_case():
  assert (
      architectures.architecture("Qwen2.5-7B")
      == architectures.MODELS["qwen2.5-7b"]
  )


def test_an_unknown_name_is_refused_with_near_ones():
  with pytest.raises(ValueError, match=r"model='qwen2.5-8b' .*qwen2.5-7b or "):
    architectures.architecture("qwen2.5-8b")
  with pytest.raises(ValueError, match=r"neither a directory nor .*Known: smo"):
    architectures.architecture("gpt-5")


def test_a_directory_needs_no_weights(tmp_path):
  llama = {
      "architectures": ["LlamaForCausalLM"],
      "hidden_size": 4096,
      "intermediate_size": 14336,
      "max_position_embeddings": 131072,
      "num_attention_heads": 32,
      "num_hidden_layers": 32,
      "num_key_value_heads": 8,
      "rms_norm_eps": 1e-5,
      "rope_scaling": {
          "factor": 8.0,
          "high_freq_factor": 4.0,
          "low_freq_factor": 1.0,
          "original_max_position_embeddings": 8192,
          "rope_type": "llama3",
      },
      "rope_theta": 500000.0,
      "tie_word_embeddings": False,
      "vocab_size": 128256,
  }
  (tmp_path / "config.json").write_text(json.dumps(llama))
  assert (
      architectures.architecture(tmp_path)
      == architectures.MODELS["llama-3.1-8b"]
  )
  assert hf.read_config(tmp_path, "bfloat16").param_dtype == "bfloat16"


def test_a_directory_without_a_config_is_refused(tmp_path):
  with pytest.raises(ValueError, match=r"has no config\.json"):
    architectures.architecture(tmp_path)
