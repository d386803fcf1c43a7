"""Tests of reading GGUF files."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import _optional
from experiments.models import hf, load
from experiments.models.decoder import Decoder
from tests.helpers.paths import GOLDEN

safetensors = _optional.require("safetensors.numpy", "train")
gguf = _optional.require("gguf", "train")

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleave(value, head_dim):
  """Makes rows i and i + head_dim / 2 of each head neighbours."""
  half = head_dim // 2
  order = np.stack([np.arange(half), np.arange(half) + half], 1).ravel()
  heads = value.reshape(-1, head_dim, *value.shape[1:])
  return heads[:, order].reshape(value.shape)


def write_gguf(file, family, skip="", quantise="", extra=None, **metadata):
  """Writes a golden checkpoint as llama.cpp's converter would."""
  config = load.from_path(GOLDEN / family).config
  writer = gguf.GGUFWriter(file, config.family)
  writer.add_block_count(config.n_layers)
  writer.add_context_length(config.max_length)
  writer.add_embedding_length(config.d_model)
  writer.add_feed_forward_length(config.d_ff)
  writer.add_head_count(config.n_heads)
  writer.add_head_count_kv(config.n_kv_heads)
  writer.add_key_length(config.head_dim)
  writer.add_rope_freq_base(config.rope_theta)
  writer.add_layer_norm_rms_eps(config.norm_eps)
  writer.add_tokenizer_model("gpt2")
  writer.add_tokenizer_pre("smollm")
  writer.add_token_list(["<|im_end|>", "A", "B", "AB"])
  writer.add_token_types([3, 1, 1, 1])
  writer.add_token_merges(["A B"])
  writer.add_eos_token_id(0)
  for key, value in metadata.items():
    writer.add_string(key.replace("__", "."), value)
  source = safetensors.load_file(GOLDEN / family / "model.safetensors")
  for name, value in source.items():
    value = value.astype(np.float32)
    if config.family == "llama" and ("q_proj" in name or "k_proj" in name):
      value = interleave(value, config.head_dim)
    name = name.replace("model.layers.", "blk.")
    for theirs, ours in _NAMES.items():
      name = name.replace(theirs, ours)
    if name == skip:
      continue
    raw_dtype = None
    if quantise and quantise in name:
      raw_dtype = gguf.GGMLQuantizationType.Q8_0
      value = gguf.quantize(value, raw_dtype)
    writer.add_tensor(name, value, raw_dtype=raw_dtype)
  if extra is not None:
    writer.add_tensor(extra, np.zeros(32, np.float32))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return file


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_gguf_file_holds_the_same_model(family, tmp_path):
  expected = load.from_path(GOLDEN / family)
  made = load.from_path(write_gguf(tmp_path / "model.gguf", family))
  assert made.config == expected.config
  chex.assert_trees_all_equal(made.params, expected.params)
  assert made.tokenizer.eos_ids == (0,)


def test_row_order_matters_for_llama(tmp_path):
  """Without reordering the rows of a Llama file, the logits are wrong."""
  expected = load.from_path(GOLDEN / "llama")
  kernel = expected.params["layers"]["q_proj"]["kernel"]
  rows = np.asarray(kernel[0]).T
  mixed = jnp.stack([interleave(rows, 8).T, kernel[1]])
  params = jax.tree.map(lambda x: x, expected.params)
  params["layers"]["q_proj"]["kernel"] = mixed
  golden = np.load(GOLDEN / "llama" / "logits.npz")
  apply = jax.jit(Decoder(expected.config).apply)
  logits = apply({"params": params}, golden["tokens"], golden["valid"])
  assert np.abs(logits - golden["logits"])[golden["valid"]].max() > 1e-2


def test_a_quantised_gguf_file_is_dequantised(tmp_path):
  """In Q8_0, every 32 inputs of an output share a scale and have 127 steps."""
  exact = load.from_path(GOLDEN / "llama").params["layers"]
  file = write_gguf(tmp_path / "model.gguf", "llama", quantise="ffn_gate")
  made = load.from_path(file).params["layers"]
  chex.assert_trees_all_equal(made["up_proj"], exact["up_proj"])
  kernel = np.asarray(exact["gate_proj"]["kernel"])  # 32 inputs: one block.
  error = np.abs(made["gate_proj"]["kernel"] - kernel)
  step = np.abs(kernel).max(axis=1, keepdims=True) / 127
  # Half a step, plus the scale's rounding to float16 over 127 steps.
  assert (error <= step * (0.5 + 127 * 2**-11)).all()
  assert error.max() > 0


@pytest.mark.parametrize("part", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_a_truncated_gguf_file_is_refused(tmp_path, part):
  file = write_gguf(tmp_path / "model.gguf", "llama")
  content = file.read_bytes()
  file.write_bytes(content[: int(part * len(content))])
  with pytest.raises(ValueError, match=r"model\.gguf is truncated"):
    load.from_path(file)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"skip": "blk.1.attn_k.weight"}, r"no tensor blk\.1\.attn_k\.weight"),
        ({"extra": "blk.0.lora.weight"}, r"does not use: blk\.0\.lora\.weight"),
        ({"extra": "rope_freqs.weight"}, "stretches its rotary frequencies"),
        ({"llama__rope__scaling__type": "yarn"}, r"rope\.scaling\.type='yarn'"),
    ],
)
def test_a_gguf_model_we_cannot_follow_is_refused(tmp_path, changes, match):
  file = write_gguf(tmp_path / "model.gguf", "llama", **changes)
  with pytest.raises(ValueError, match=match):
    load.from_path(file)


def test_gguf_files_of_unknown_architecture_are_refused(tmp_path):
  writer = gguf.GGUFWriter(tmp_path / "a.gguf", "mamba")
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  match = "unknown architecture 'mamba' .known: llama, qwen2, qwen3"
  with pytest.raises(ValueError, match=match):
    load.from_path(tmp_path / "a.gguf")


def test_a_gguf_model_is_described_by_a_hugging_face_directory(tmp_path):
  made = load.from_path(write_gguf(tmp_path / "model.gguf", "qwen2"))
  hf.save_description(tmp_path, made.config, made.tokenizer, "bfloat16")
  config, tokenizer = hf.load_description(tmp_path)
  assert config == made.config
  assert tokenizer.eos_ids == made.tokenizer.eos_ids
  assert tokenizer.encode("AB<|im_end|>BA") == [3, 0, 2, 1]
  assert tokenizer.decode([3, 1]) == made.tokenizer.decode([3, 1]) == "ABA"
